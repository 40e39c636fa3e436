//! The daemon counts the likes in Redis, and API servers only publish them.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::AsyncCommands;
use sqlx::AssertSqlSafe;
use tallyd_client::{ClickLimits, Clicked, ClientError, Event, PublishError};
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{Kind, Metric, Target, TargetId, UserId};
use tallyd_rabbitmq::Publisher;

use crate::common;
use common::{Daemon, Dice, Model, World, as_api, body, client_of, drift, limited_client_of, lose, stderr, target};

/// The difference between the clocks of the two API servers.
const APART: Duration = Duration::from_secs(3_600);

/// Users who send their clicks to two API servers. The clock of one server is an hour behind.
struct Clicks {
    dice: Dice,
    targets: u64,
    model: Model,
}

impl Clicks {
    fn of(targets: u64) -> Self {
        Self { dice: Dice::of_run(22), targets, model: Model::default() }
    }

    fn some(&mut self, count: u64) -> Vec<(UserId, Vec<u8>)> {
        (0..count).map(|_| self.one()).collect()
    }

    fn one(&mut self) -> (UserId, Vec<u8>) {
        let now = tallyd_base::runtime::clock::now();
        // All clicks of a user go through the same API server.
        let user = UserId(1 + self.dice.below(50));
        let at = if user.0.is_multiple_of(2) { now.before(APART) } else { now };
        let liked = self.dice.percent(60);
        let event = LikeEvent { target: target(1 + self.dice.below(self.targets)), user, at, liked };
        self.model.apply(&event);
        body(&event)
    }
}

/// Starts a site. Its daemon counts likes, and its API servers only publish likes.
async fn open(name: &str, settings: &str) -> (World, Publisher, Daemon) {
    let world = World::new(name, settings).await;
    let (publisher, daemon) = (world.publisher().await, world.consuming().await);
    (world, publisher, daemon)
}

/// Checks that MySQL and Redis have the result of all clicks.
async fn end(world: World, publisher: &Publisher, daemon: Daemon, clicks: &Clicks) {
    world.drained(publisher).await;
    world.assert_equals(&clicks.model).await;
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn likes_that_are_only_published_are_exact_in_both_stores() {
    let (world, publisher, mut daemon) = open("by_daemon", "").await;
    let mut clicks = Clicks::of(40);
    for _ in 0..3 {
        let bodies = clicks.some(2_000);
        world.publish(&publisher, &bodies).await;
        daemon.kill();
        daemon = world.daemon();
        // The last events are published again, as after a lost confirm.
        world.publish(&publisher, &bodies[1_500..]).await;
    }
    end(world, &publisher, daemon, &clicks).await;
}

#[tokio::test]
async fn the_rust_client_only_publishes_likes() {
    let (world, publisher, _daemon) = open("by_daemon_client", "").await;
    let client = world.client();
    // User 1 clicks twice. User 3 likes, and then unlikes.
    for user in [1, 1, 2, 3] {
        let clicked = client.like(target(42), UserId(user)).await.unwrap();
        assert!(matches!(clicked, Clicked::Published(_)), "{clicked:?}");
    }
    let Clicked::Published(event) = client.unlike(target(42), UserId(3)).await.unwrap() else { panic!() };
    client.publish(&Event::Like(event), None).await.unwrap();
    let mut config = world.api.clone();
    config.redis.url = "redis://127.0.0.1:1/0".into();
    client_of(&config).like(target(42), UserId(4)).await.unwrap();
    let unknown = Target { kind: Kind(9), ..target(42) };
    let refused = client.like(unknown, UserId(5)).await;
    assert!(matches!(refused, Err(PublishError::NotSent(ClientError::NoKind(_)))), "{refused:?}");
    world.counted(&publisher).await;
    assert_eq!((world.redis_counters().await[&target(42)], world.counters().await[&target(42)]), (3, 3));
}

#[tokio::test]
async fn an_event_that_was_not_confirmed_is_published_again_by_the_rust_client() {
    let world = World::new("by_daemon_again", "").await;
    let publisher = world.publisher().await;
    let mut config = world.api.clone();
    config.amqp.url = "amqp://nobody@127.0.0.1:1/%2f".into();
    let failed = client_of(&config).like(target(42), UserId(7)).await;
    let Err(PublishError::NotConfirmed { event, .. }) = failed else { panic!("{failed:?}") };
    world.client().publish(&event, None).await.unwrap();
    let _daemon = world.daemon();
    world.counted(&publisher).await;
    assert_eq!(world.redis_counters().await[&target(42)], 1);
}

#[tokio::test]
async fn the_rust_client_publishes_no_click_of_a_user_who_clicks_too_often() {
    let world = World::new("by_daemon_limit", "").await;
    world.publisher().await;
    let client =
        limited_client_of(&world.api, ClickLimits { rate_likes_max: 1, rate_window: Duration::from_secs(3_600) });
    assert!(matches!(client.like(target(1), UserId(7)).await.unwrap(), Clicked::Published(_)));
    let limited = client.unlike(target(1), UserId(7)).await.unwrap();
    assert!(matches!(limited, Clicked::Limited { wait } if wait <= Duration::from_secs(3_600)), "{limited:?}");
    assert!(matches!(client.like(target(1), UserId(8)).await.unwrap(), Clicked::Published(_)));
}

#[tokio::test]
async fn the_rust_client_refuses_what_api_servers_count_and_publishes_it_with_the_scripts_at() {
    let settings = as_api("[metrics]\nlike = 1\nview = 2\n[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n");
    let (world, publisher, _daemon) = open("by_daemon_refused", &settings).await;
    let client = world.client();
    let refused = [
        client.like(target(42), UserId(7)).await.unwrap_err(),
        client.unlike(target(42), UserId(7)).await.unwrap_err(),
        client.add(target(42), Metric(2), 1, "a").await.unwrap_err(),
    ];
    for (error, number) in refused.into_iter().zip(["video:like", "video:like", "video:view"]) {
        let PublishError::NotSent(ClientError::CountedByApi(name)) = &error else { panic!("{error:?}") };
        assert_eq!(name, number);
        assert!(format!("{:#}", anyhow::Error::from(error)).contains("docs/scripts.md"));
    }
    // An API server has counted this like with a script.
    let counted = world.api_server().count(target(42), UserId(7), true, &[]).await.unwrap();
    client.publish(&Event::Like(counted.event), counted.count).await.unwrap();
    world.drained(&publisher).await;
    let mut model = Model::default();
    model.apply(&counted.event);
    world.assert_equals(&model).await;
}

#[tokio::test]
async fn published_likes_count_on_the_board_that_their_rule_names() {
    let settings = "[[rule]]\nmetric = \"like\"\nboard = \"liked\"\n[[board]]\nname = \"liked\"\nperiod = \"total\"\n";
    let (world, publisher, daemon) = open("by_daemon_board", settings).await;
    let mut clicks = Clicks::of(9);
    let bodies = clicks.some(1_000);
    world.publish(&publisher, &bodies).await;
    world.publish(&publisher, &bodies).await;
    end(world, &publisher, daemon, &clicks).await;
}

#[tokio::test]
async fn a_reconcile_of_published_likes_loads_and_repairs_without_rabbitmq() {
    let (world, publisher, daemon) = open("by_daemon_judged", "").await;
    let mut clicks = Clicks::of(40);
    let bodies = clicks.some(2_000);
    world.publish(&publisher, &bodies).await;
    world.counted(&publisher).await;
    assert!(daemon.stop().success());
    let reconcile = |arguments: &[&str]| {
        let mut command = world.command();
        command.arg("reconcile").args(arguments).args(["--format", "json"]);
        let output = command.env("TALLYD__AMQP__URL", "amqp://guest@127.0.0.1:1/%2f").output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)))
    };
    lose(&world).await;
    let first: serde_json::Value = reconcile(&["--full"]);
    assert_eq!((&first["buckets_loaded"], &first["drifted"]), (&16.into(), &0.into()), "{first}");
    // No daemon writes these events.
    world.publish(&publisher, &clicks.some(500)).await;
    drift(&world, target(7), 3).await;
    drift(&world, target(8), -2).await;
    let report = reconcile(&["--target", "video:7"]);
    assert_eq!((&report["repaired"], &report["in_flight"]), (&1.into(), &serde_json::Value::Null), "{report}");
    let report = reconcile(&["--full"]);
    assert_eq!((&report["drifted"], &report["repaired"]), (&1.into(), &1.into()), "{report}");
    let daemon = world.daemon();
    end(world, &publisher, daemon, &clicks).await;
}

#[tokio::test]
async fn a_changed_run_lists_likes_and_counts_of_a_late_clock() {
    let (world, publisher, _daemon) = open("by_daemon_changed", "[metrics]\nlike = 1\nview = 2\n").await;
    world.report(&["reconcile", "--full"]);
    let at = tallyd_base::runtime::clock::now().before(APART);
    let likes =
        (1..=20).map(|user| body(&LikeEvent { target: target(user % 4 + 1), user: UserId(user), at, liked: true }));
    let view = encode_count(TargetId(5), ("video", "view"), 3, at, "a late view", None);
    world.publish(&publisher, &likes.chain([(UserId(1), view)]).collect::<Vec<_>>()).await;
    world.counted(&publisher).await;
    drift(&world, target(3), 1).await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(5)));
    let () = world.redis().await.hset(key, 5, "0,2").await.unwrap();
    let report = world.reconcile("--changed").await;
    assert_eq!((&report["checked"], &report["repaired"]), (&5.into(), &2.into()), "{report}");
    assert_eq!(world.redis_counters().await, world.counters().await);
}

#[tokio::test]
async fn lost_counters_of_likes_are_loaded_while_others_are_published() {
    let (world, publisher, daemon) = open("by_daemon_loaded", "").await;
    let mut clicks = Clicks::of(400);
    world.publish(&publisher, &clicks.some(3_000)).await;
    world.counted(&publisher).await;
    let first = world.report(&["reconcile", "--full"]);
    assert_eq!((&first["drifted"], &first["unknown"]), (&0.into(), &0.into()), "{first}");
    for _ in 0..3 {
        lose(&world).await;
        let bodies = clicks.some(6_000);
        let publishing = world.publish(&publisher, &bodies);
        let reconciling = world.reconcile("--changed");
        let ((), report) = tokio::join!(publishing, reconciling);
        assert_eq!((&report["buckets_loaded"], &report["drifted"]), (&16.into(), &0.into()), "{report}");
    }
    end(world, &publisher, daemon, &clicks).await;
}

#[tokio::test]
async fn a_corrected_counter_of_likes_is_right_in_redis_after_the_run() {
    let (world, publisher, _daemon) = open("by_daemon_corrected", "").await;
    let at = tallyd_base::runtime::clock::now();
    let likes: Vec<_> = (1..=10)
        .flat_map(|id| {
            (1..=5).map(move |user| body(&LikeEvent { target: target(id), user: UserId(user), at, liked: true }))
        })
        .collect();
    world.publish(&publisher, &likes).await;
    world.counted(&publisher).await;
    world.report(&["reconcile", "--full"]);
    // The test deletes rows that `counter` and Redis still count. The test also changes another target's row in
    // `counter`, while the count of this target in Redis stays right.
    for sql in [
        "DELETE FROM like_record WHERE target_id = 1 AND user_id > 2",
        "UPDATE counter SET value = value - 4 WHERE target_id = 2 LIMIT 1",
    ] {
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    let output = world.tallyd(&["reconcile", "--full", "--dry-run", "--format", "json"]);
    let dry: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&dry["counters_off"], &dry["repaired"]), (&2.into(), &0.into()), "{dry}");
    assert_eq!(stderr(&output).matches("\"counter-off\"").count(), 1, "{}", stderr(&output));
    let report = world.report(&["reconcile", "--full", "--force", "--yes"]);
    assert_eq!(report["counters_off"], 2, "{report}");
    world.outbox_added().await;
    let expected: BTreeMap<Target, i64> = (1..=10).map(|id| (target(id), if id == 1 { 2 } else { 5 })).collect();
    assert_eq!(world.redis_counters().await, expected);
    assert_eq!(world.counters().await, expected);
    let again = world.report(&["reconcile", "--full"]);
    assert_eq!((&again["counters_off"], &again["drifted"]), (&0.into(), &0.into()), "{again}");
}
