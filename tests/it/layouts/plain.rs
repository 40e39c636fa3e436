//! Tests the layouts with one key per target, and with one key per target and metric.

use tallyd_core::model::UserId;
use tokio_util::sync::CancellationToken;

use super::{assert_all_equal, assert_read, crowd, settled};
use crate::common::scripts::Clicked;
use crate::common::{Model, as_api, eventually, redis_likes, stderr, target};

const STRING: &str = "[redis]\nlayout = \"string\"\n";
const ENTITY: &str = "[redis]\nlayout = \"entity\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn numbers_are_under_the_names_that_sites_give_them() {
    for (name, settings, key, field) in [
        ("plain_string", STRING, "counter:42:like", None),
        ("plain_entity", ENTITY, "counter:video:42", Some("like")),
        ("plain_own", "[redis]\nlayout = \"string\"\ncounter_key = \"{kind}/{id}/likes\"\n", "video/42/likes", None),
    ] {
        let (world, daemon, publisher) = settled(name, &as_api(settings)).await;
        let client = world.api_server();
        let first = client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
        assert_eq!(first.count, Some(1));
        assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { count: Some(1), .. }));
        let second = client.like(target(42), UserId(8), &[]).await.unwrap().counted().unwrap();
        let mut command = redis::cmd(if field.is_some() { "HGET" } else { "GET" });
        command.arg(format!("{}:{key}", world.name)).arg(field);
        let number: i64 = command.query_async(&mut world.redis().await).await.unwrap();
        assert_eq!(number, 2, "{key}");
        assert!(client.take_back(&second, &[]).await.unwrap());
        let mut model = Model::default();
        model.apply(&first.event);
        world.drained(&publisher).await;
        assert_read(&world, &model).await;
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_phantoms_and_what_is_lost_are_mended_while_likes_go_on() {
    for (name, settings) in [("plain_mended_string", STRING), ("plain_mended_entity", ENTITY)] {
        let settings = format!("{settings}[reconcile]\nrepair_targets_max_percent = 100\n");
        let (world, daemon, publisher) = settled(name, &settings).await;
        let stop = CancellationToken::new();
        let crowd = crowd(&world, 3, 0, &stop);
        let mut redis = world.redis().await;
        let add = |id, by: i64| {
            let place = world.cache.keys.place("video", target(id), tallyd_core::model::Metric(1));
            let mut command = redis::cmd(if name.ends_with("entity") { "HINCRBY" } else { "INCRBY" });
            command.arg(place.key).arg(place.part.strip_prefix("entity:")).arg(by);
            command
        };
        // If a target's first like arrives during a run, the run leaves the target to the next run.
        eventually("the counters to change exist", || async {
            world.count("SELECT COUNT(*) FROM counter WHERE target_id <= 3").await == 3
        })
        .await;
        for (id, by) in [(1, 3), (2, 100), (3, 1), (1_000_001, 5), (1_000_002, -5)] {
            let _: i64 = add(id, by).query_async(&mut redis).await.unwrap();
        }
        let report = world.reconcile("--full").await;
        assert_eq!(report["drifted"].as_u64(), Some(5), "{report}");
        // A phantom is a counter in Redis for a target without rows in MySQL. The run can find more than two phantoms,
        // because the first like of a target reaches MySQL a moment later than Redis.
        assert!(report["phantoms"].as_u64() >= Some(2), "{report}");
        let client = world.api_server();
        assert_eq!(redis_likes(&client, &[target(1_000_001), target(1_000_002)]).await, [Some(0), Some(0)]);

        // Only from here on may a run of the daemon mend something.
        world.write(&format!("{settings}watch_every = \"1s\"\n"));
        daemon.signal("HUP");
        let () = redis::cmd("EVAL")
            .arg("for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('UNLINK', key) end return redis.status_reply('OK')")
            .arg(0)
            .arg(format!("{}:*", world.name))
            .query_async(&mut redis)
            .await
            .unwrap();
        let targets: Vec<_> = (1..=20).map(target).collect();
        eventually("the lost data are loaded", || async {
            redis_likes(&client, &targets).await.iter().all(Option::is_some)
        })
        .await;
        stop.cancel();
        let model = crowd.await.unwrap();
        world.drained(&publisher).await;
        // Redis counted some likes before the flush, but their events were published after it. A reconcile must repair
        // these counters, so the test retries.
        eventually("all counters are compared", || async {
            let report = world.reconcile("--full").await;
            report["drifted"].as_u64() == Some(0) && report["unknown"].as_u64() == Some(0)
        })
        .await;
        assert_all_equal(&world, &publisher, &model).await;
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_holds_something_else_is_left_alone_and_said() {
    let (world, _daemon, _) = settled("plain_junk", &as_api(STRING)).await;
    let client = world.api_server();
    let place = world.cache.keys.place("video", target(42), tallyd_core::model::Metric(1));
    let mut redis = world.redis().await;
    let () = redis::cmd("SET").arg(&place.key).arg("many").query_async(&mut redis).await.unwrap();
    let error = client.like(target(42), UserId(7), &[]).await.unwrap_err();
    let error = format!("{:#}", anyhow::Error::from(error));
    assert!(error.contains("holds no number"), "{error}");
    assert_eq!(redis_likes(&client, &[target(42)]).await, [None]);
    let clicks: i64 = redis::cmd("EXISTS")
        .arg(world.cache.keys.recent("video", world.cache.keys.bucket(target(42))).to_vec())
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(clicks, 0, "Redis does not remember a click that was not counted");
    let report = world.tallyd(&["reconcile", "--full"]);
    assert!(report.status.success(), "{}", stderr(&report));
    let left: String = redis::cmd("GET").arg(&place.key).query_async(&mut redis).await.unwrap();
    assert_eq!(left, "many");
}
