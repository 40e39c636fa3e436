//! On SIGHUP the daemon applies or rejects the new settings. The daemon loses no event, and codes keep their meaning.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common;
use common::proxy::Proxy;
use common::{Daemon, Model, World, body, eventually, stderr, stdout, target};
use sqlx::{AssertSqlSafe, Row};
use tallyd_core::event::{LikeEvent, encode_count, encode_like};
use tallyd_core::model::{Metric, Micros, TargetId, UserId};
use tallyd_mysql::Store;
use tokio_util::sync::CancellationToken;

/// Returns the log lines with this event name.
fn events(daemon: &Daemon, name: &str) -> Vec<serde_json::Value> {
    let log = daemon.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    lines.filter(|line| line["event"] == name).collect()
}

/// Reloads the daemon with these settings, and waits for the next log line with the event name `end`.
async fn reload(world: &World, daemon: &Daemon, settings: &str, end: &str) -> serde_json::Value {
    let before = events(daemon, end).len();
    world.write(settings);
    daemon.signal("HUP");
    eventually(&format!("{end} is logged"), || async { events(daemon, end).len() > before }).await;
    events(daemon, end).pop().unwrap()
}

/// Returns the counters in MySQL that are not zero, by target and metric.
async fn numbers(world: &World) -> BTreeMap<(u64, u8), i64> {
    let sql = "SELECT target_id, metric, CAST(SUM(value) AS SIGNED) AS value FROM counter GROUP BY target_id, metric \
               HAVING value <> 0";
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| ((row.get(0), row.get(1)), row.get(2))).collect()
}

fn counted(id: u64, metric: &str, event_id: &str) -> (UserId, Vec<u8>) {
    (UserId(id), encode_count(TargetId(id), ("video", metric), 1, tallyd_base::runtime::clock::now(), event_id, None))
}

async fn dead_letters(world: &World) -> Vec<String> {
    sqlx::query_scalar("SELECT reason FROM dead_letter ORDER BY id").fetch_all(&world.pool).await.unwrap()
}

/// Publishes likes and views until `stop`. Returns the number of views of video 7, and the result of the likes.
async fn traffic(
    world: &World,
    sent: Arc<AtomicU64>,
    stop: CancellationToken,
) -> impl Future<Output = (i64, Model)> + use<> {
    let (publisher, exchange) = (world.publisher().await, world.broker.exchange());
    async move {
        let (mut model, mut views) = (Model::default(), 0);
        while !stop.is_cancelled() {
            for user in 1..=20 {
                let at = tallyd_base::runtime::clock::now();
                let like = LikeEvent { target: target(7), user: UserId(user), at, liked: user % 3 > 0 };
                let (_, event) = body(&like);
                publisher.publish(&exchange, &user.to_string(), &event).await.unwrap();
                model.apply(&like);
                let (_, event) = counted(7, "view", &format!("view-{views}"));
                publisher.publish(&exchange, &user.to_string(), &event).await.unwrap();
                views += 1;
            }
            sent.fetch_add(20, Ordering::Relaxed);
        }
        (views, model)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_that_are_added_under_load_are_counted_from_the_moment_that_it_is_logged() {
    let settings = |metrics: &str| format!("[amqp]\npartitions = 2\n[metrics]\nlike = 1\nview = 2\n{metrics}");
    let world = World::new("reload_metrics", &settings("")).await;
    let daemon = world.daemon();
    daemon.logged("\"started\"").await;
    let (stop, sent) = (CancellationToken::new(), Arc::new(AtomicU64::new(0)));
    let traffic = tokio::spawn(traffic(&world, Arc::clone(&sent), stop.clone()).await);
    let publisher = world.publisher().await;
    let mut expected = BTreeMap::new();
    let (mut metrics, mut early) = (String::new(), Vec::new());
    for code in 10..20_u8 {
        let before = sent.load(Ordering::Relaxed);
        eventually("the traffic continues", || async { sent.load(Ordering::Relaxed) > before }).await;
        // The daemon does not know the metric yet.
        world.publish(&publisher, &[counted(99, &format!("m{code}"), &format!("{code}-early"))]).await;
        early.push("unknown-metric".to_owned());
        eventually("the early event is a dead letter", || async { dead_letters(&world).await == early }).await;
        metrics += &format!("m{code} = {code}\n");
        let reloaded = reload(&world, &daemon, &settings(&metrics), "reloaded").await;
        assert_eq!(reloaded["changed"], format!("[metrics] m{code}"));
        // Each of the two partitions receives some of these events.
        let events: Vec<_> = (1..=50).map(|id| counted(id, &format!("m{code}"), &format!("{code}-{id}"))).collect();
        world.publish(&publisher, &events).await;
        expected.extend((1..=50).map(|id| ((id, code), 1)));
    }
    stop.cancel();
    let (views, model) = traffic.await.unwrap();
    world.drained(&publisher).await;
    expected.insert((7, 2), views);
    expected.extend(model.counters().into_iter().map(|(target, likes)| ((target.id.0, 1), likes)));
    assert_eq!(numbers(&world).await, expected);
    world.assert_equals(&model).await;
    assert_eq!(dead_letters(&world).await, early);
    // A reload must not restart sessions. Each session restarts once because it has learned the size of its messages.
    assert!(events(&daemon, "consuming").len() < 10, "the sessions continued");
    assert!(events(&daemon, "outage-begun").is_empty());
    assert_eq!(world.count("SELECT COUNT(*) FROM metric_name").await, 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kind_that_is_added_is_taken_and_its_numbers_are_loaded() {
    let settings = |kinds: &str| format!("[reconcile]\nwatch_every = \"1s\"\n[kinds]\nvideo = 1\n{kinds}");
    let world = World::new("reload_kind", &settings("")).await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let reloaded = reload(&world, &daemon, &settings("post = 2\n"), "reloaded").await;
    assert_eq!(reloaded["changed"], "[kinds] post");
    let publisher = world.publisher().await;
    let like = LikeEvent { target: target(9), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true };
    world.consumed(&publisher, &[(UserId(1), encode_like(&like, "post", None))]).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE kind = 2").await, 1);
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("post", world.cache.keys.bucket(target(9)));
    eventually("the watch has loaded the buckets of the new kind", || {
        let (mut redis, key) = (redis.clone(), key.clone());
        async move {
            let loaded: Option<String> = redis::cmd("HGET").arg(key).arg("_").query_async(&mut redis).await.unwrap();
            loaded.is_some_and(|loaded| !loaded.starts_with('~'))
        }
    })
    .await;
    let posts: i64 = redis::cmd("EXISTS").arg(&key).query_async(&mut redis).await.unwrap();
    assert_eq!(posts, 1);
    assert!(stdout(&world.tallyd(&["show", "post:9"])).contains("post:9"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_is_wrong_is_refused_with_all_its_problems_and_the_old_one_stays() {
    let old = "[metrics]\nlike = 1\nview = 2\n";
    let world = World::new("reload_wrong", old).await;
    let daemon = world.daemon();
    daemon.logged("\"started\"").await;
    let wrong = "[metrics]\nlike = 1\n[kinds]\nvideo = 0\n[consumer]\nlinger_ms = 99999\n[log]\nlevel = \"debug\"\n";
    let refused = reload(&world, &daemon, wrong, "reload-refused").await;
    let problems = refused["problems"].as_str().unwrap();
    assert!(
        problems.contains("[kinds] video is 0, allowed are 1 to 255")
            && problems.contains("[consumer] linger_ms is 99999"),
        "{problems}"
    );
    let problems = reload(&world, &daemon, "[metrics]\nviews = 2\nlike = \"x\"", "reload-refused").await;
    assert!(problems["problems"].as_str().unwrap().contains("config.toml:"), "{problems}");
    let level = reload(&world, &daemon, &format!("{old}[log]\nlevel = \"a=b=c\""), "reload-refused").await;
    assert!(level["problems"].as_str().unwrap().contains("[log] read level"), "{level}");
    std::fs::remove_file(world.config_path()).unwrap();
    daemon.signal("HUP");
    daemon.logged("can't be read").await;
    let publisher = world.publisher().await;
    world.consumed(&publisher, &[counted(3, "view", "one")]).await;
    assert_eq!(numbers(&world).await, BTreeMap::from([((3, 2), 1)]));
    assert!(events(&daemon, "reloaded").is_empty() && events(&daemon, "batch-committed").is_empty());
    let nothing = reload(&world, &daemon, old, "reloaded").await;
    assert_eq!(nothing["changed"], "nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_a_restart_is_named_and_the_rest_is_taken() {
    let world = World::new("reload_restart", "").await;
    let daemon = world.daemon();
    daemon.logged("\"started\"").await;
    let new = "[amqp]\npartitions = 2\n[consumer]\nlinger_ms = 7\nfuture_max = \"10m\"\n[log]\nlevel = \"debug\"\n\
               [reconcile]\nchanged_cron = \"* * * * * *\"\n";
    let named = reload(&world, &daemon, new, "reload-needs-restart").await;
    assert_eq!(named["keys"], "[amqp] partitions, [consumer] linger_ms");
    daemon.logged("\"reloaded\"").await;
    let changed = &events(&daemon, "reloaded")[0]["changed"];
    assert_eq!(changed, "[consumer] future_max, [log] level, [reconcile] changed_cron");
    // The new settings apply: a job starts on schedule, the log has more lines, and later times are accepted.
    daemon.logged("\"job-started\"").await;
    let publisher = world.publisher().await;
    let like = LikeEvent {
        target: target(1),
        user: UserId(1),
        at: Micros(tallyd_base::runtime::clock::now().0 + 400_000_000),
        liked: true,
    };
    world.publish(&publisher, &[body(&like)]).await;
    eventually("the like is written", || async { world.count("SELECT COUNT(*) FROM like_record").await == 1 }).await;
    daemon.logged("\"batch-committed\"").await;
    // Each reload reports this setting until the setting has its old value again. Then the daemon accepts the reload.
    let named = reload(&world, &daemon, "[amqp]\npartitions = 2\n", "reload-needs-restart").await;
    assert_eq!(named["keys"], "[amqp] partitions");
    let back = reload(&world, &daemon, "", "reloaded").await;
    assert_eq!(back["changed"], "nothing");
    assert_eq!(events(&daemon, "reload-needs-restart").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_holds_numbers_is_taken_away_only_when_it_is_retired() {
    let both = "[kinds]\nvideo = 1\npost = 2\n[metrics]\nlike = 1\nview = 2\nunused = 3\n";
    let world = World::new("reload_retired", both).await;
    let daemon = world.daemon();
    daemon.logged("\"started\"").await;
    let publisher = world.publisher().await;
    let like = LikeEvent { target: target(9), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true };
    world.consumed(&publisher, &[counted(3, "view", "one"), (UserId(1), encode_like(&like, "post", None))]).await;

    let refused = reload(&world, &daemon, "[metrics]\nlike = 1\n", "reload-refused").await;
    let problems = refused["problems"].as_str().unwrap();
    let said =
        |what: &str| format!("no longer has {what}, whose code in MySQL is 2, and there are rows with this code: add");
    assert!(problems.contains(&said("post")) && problems.contains(&said("view")), "{problems}");
    assert!(!problems.contains("unused"), "{problems}");
    world.consumed(&publisher, &[counted(3, "view", "two")]).await;
    assert_eq!(numbers(&world).await[&(3, 2)], 2, "the old configuration is in force");

    let without = "[metrics]\nlike = 1\n[retired]\nkinds = [\"post\"]\nmetrics = [\"view\"]\n";
    let changed = reload(&world, &daemon, without, "reloaded").await;
    let keys = "[kinds] post, [metrics] unused, [metrics] view, [retired] kinds, [retired] metrics";
    assert_eq!(changed["changed"], keys);
    assert!(daemon.log().contains("[metrics] unused = 3 is removed: no rows had its code"));
    world.consumed(&publisher, &[counted(3, "view", "three")]).await;
    assert_eq!((numbers(&world).await[&(3, 2)], dead_letters(&world).await), (2, vec!["unknown-metric".to_owned()]));

    // A code can get a new name if no counter has the code, and if an earlier reload has removed the old name.
    let other = format!("{without}[kinds]\nvideo = 1\n").replace("like = 1\n", "like = 1\nshare = 3\n");
    reload(&world, &daemon, &other, "reloaded").await;
    assert!(daemon.log().contains("[metrics] share = 3 replaces unused, whose code had no rows"));
    let refused = reload(&world, &daemon, &other.replace("share = 3", "clap = 3"), "reload-refused").await;
    let said = "[metrics] clap = 3, but in MySQL 3 is the code of share, and a daemon with the former name can still be running";
    assert!(refused["problems"].as_str().unwrap().contains(said), "{refused}");
    let refused = reload(&world, &daemon, &other.replace("share = 3", "share = 2"), "reload-refused").await;
    let problems = refused["problems"].as_str().unwrap();
    assert!(problems.contains("[metrics] share = 2, but in MySQL 2 is the code of view"), "{problems}");
    // An operator can configure a retired metric again.
    reload(&world, &daemon, &both.replace("unused = 3\n", "share = 3\n"), "reloaded").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_code_that_would_change_its_meaning_ends_the_start_with_78() {
    let world = World::new("reload_codes", "[metrics]\nlike = 1\nview = 2\nshare = 3\n").await;
    // These counters were written before MySQL had the names of codes, so the daemon accepts the configured names.
    let insert = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) \
                  VALUES (1, 42, 2, 0, 5, '2026-11-21'), (1, 42, 3, 0, 6, '2026-11-21')";
    sqlx::query(insert).execute(&world.pool).await.unwrap();
    let daemon = world.daemon();
    daemon.logged("\"started\"").await;
    assert!(daemon.stop().success());
    for (settings, problem) in [
        (
            "[kinds]\npost = 1\n[metrics]\nlike = 1\nview = 2\nshare = 3\n",
            "[kinds] post = 1, but in MySQL 1 is the code of video",
        ),
        ("[metrics]\nlike = 1\nview = 3\nshare = 2\n", "[metrics] share = 2, but in MySQL 2 is the code of view"),
        ("[metrics]\nlike = 1\nview = 4\nshare = 3\n", "[metrics] view = 4, but in MySQL its code is 2"),
        ("[metrics]\nlike = 1\nview = 2\n", "[metrics] no longer has share"),
    ] {
        world.write(settings);
        for command in [&[][..], &["reconcile"], &["config", "check"]] {
            let output = world.tallyd(command);
            assert_eq!(output.status.code(), Some(78), "{command:?}: {}", stderr(&output));
            assert!(stderr(&output).contains(problem), "{command:?}: {}", stderr(&output));
        }
    }
    assert_eq!(world.count("SELECT COUNT(*) FROM metric_name WHERE removed_at IS NULL").await, 3);
    world.write("[metrics]\nlike = 1\nview = 2\nclap = 4\n[retired]\nmetrics = [\"share\"]\n");
    let checked = world.tallyd(&["config", "check"]);
    assert!(stdout(&checked).contains("[metrics] clap = 4 is new"), "{}{}", stdout(&checked), stderr(&checked));
    assert_eq!(world.count("SELECT COUNT(*) FROM metric_name").await, 3, "a check must not note anything");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_starts_without_mysql_compares_codes_before_it_writes() {
    let world = World::new("reload_away", "[mysql]\nconnect_timeout_ms = 500\n[metrics]\nlike = 1\nview = 2\n").await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let through_proxy = [("TALLYD__MYSQL__URL", url.as_str())];
    let publisher = world.publisher().await;
    world.publish(&publisher, &[counted(3, "view", "one")]).await;
    proxy.hold();
    let daemon = world.daemon_with(&through_proxy);
    daemon.logged("\"mysql-away\"").await;
    // While MySQL is unreachable, the daemon rejects settings that need MySQL, and applies other settings.
    let refused = reload(&world, &daemon, "[metrics]\nlike = 1\nview = 2\nclap = 3\n", "reload-refused").await;
    assert!(
        refused["problems"].as_str().unwrap().contains("the meaning of codes could not be read from MySQL"),
        "{refused}"
    );
    proxy.release();
    daemon.logged("\"started\"").await;
    eventually("the event is written", || async { !numbers(&world).await.is_empty() }).await;
    assert!(daemon.stop().success());

    world.write("[mysql]\nconnect_timeout_ms = 500\n[metrics]\nlike = 1\nshare = 2\n");
    world.publish(&publisher, &[counted(3, "share", "two")]).await;
    proxy.hold();
    proxy.cut();
    let mut daemon = world.daemon_with(&through_proxy);
    daemon.logged("\"mysql-away\"").await;
    proxy.release();
    assert_eq!(daemon.wait().code(), Some(78));
    assert!(daemon.log().contains("[metrics] share = 2, but in MySQL 2 is the code of view"), "{}", daemon.log());
    assert!(!daemon.log().contains("\"consuming\""), "no event was consumed");
    assert_eq!(numbers(&world).await, BTreeMap::from([((3, 2), 1)]));

    proxy.hold();
    proxy.cut();
    let daemon = world.daemon_with(&through_proxy);
    daemon.logged("\"mysql-away\"").await;
    assert!(daemon.stop().success(), "the daemon can be stopped while it waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn systemd_is_told_when_a_reload_begins_and_ends() {
    let world = World::new("reload_systemd", "").await;
    let path = world.folder.path().join("notify");
    let socket = tokio::net::UnixDatagram::bind(&path).unwrap();
    let daemon = world.daemon_with(&[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    let told = async |beginning: &str| loop {
        let mut bytes = [0; 1_024];
        let read = tokio::time::timeout(common::DEADLINE, socket.recv(&mut bytes)).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
        if text.starts_with(beginning) {
            return text;
        }
    };
    told("READY=1").await;
    for settings in ["[daemon]\ndrain_max_s = 40\n", "[daemon]\ndrain_max_s = 0\n"] {
        world.write(settings);
        daemon.signal("HUP");
        let reloading = told("RELOADING=1").await;
        let since = reloading.split("MONOTONIC_USEC=").nth(1).unwrap().trim();
        assert!(since.parse::<u64>().unwrap() > 0, "{reloading}");
        told("READY=1").await;
    }
    assert_eq!((events(&daemon, "reloaded").len(), events(&daemon, "reload-refused").len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_that_start_at_once_note_the_same_names() {
    let world = World::new("reload_at_once", "[metrics]\nlike = 1\nview = 2\nshare = 3\n").await;
    let daemons: Vec<Daemon> = (0..4).map(|_| world.daemon()).collect();
    for daemon in &daemons {
        daemon.logged("\"started\"").await;
    }
    let names: Vec<(u8, String)> =
        sqlx::query_as("SELECT metric, name FROM metric_name ORDER BY metric").fetch_all(&world.pool).await.unwrap();
    let names: Vec<(u8, &str)> = names.iter().map(|(code, name)| (*code, name.as_str())).collect();
    assert_eq!(names, [(1, "like"), (2, "view"), (3, "share")]);
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
}

#[tokio::test]
async fn whether_a_metric_has_numbers_is_asked_for_no_longer_than_allowed() {
    let world = World::new("reload_bounded", "").await;
    let mut from = 0;
    while from < 400_000 {
        let rows: Vec<String> = (from..from + 20_000).map(|id| format!("(1,{id},1,0,1,'2026-11-21')")).collect();
        let insert =
            format!("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {}", rows.join(","));
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&world.pool).await.unwrap();
        from += 20_000;
    }
    let store = Store::new(&world.config.mysql, 1).unwrap();
    let long = Duration::from_secs(60);
    assert_eq!(store.is_metric_in_use(Metric(1), long).await.unwrap(), Some(true));
    assert_eq!(store.is_metric_in_use(Metric(2), long).await.unwrap(), Some(false));
    assert_eq!(store.is_metric_in_use(Metric(2), Duration::from_millis(1)).await.unwrap(), None);
}
