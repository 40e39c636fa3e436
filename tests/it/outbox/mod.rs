//! Tests counters that only the daemon changes. The daemon adds each count to Redis once, even after faults and without
//! a reconcile.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod away;
mod crash;
mod paused;
mod refused;
mod script;
mod sharded;
mod store;

use std::collections::BTreeMap;

use crate::common;
use common::{Dice, World, drift, eventually, target};
use sqlx::Row;
use tallyd_core::event::encode_count;
use tallyd_core::model::{Metric, Target, TargetId, UserId};
use tallyd_rabbitmq::Publisher;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

/// Only API servers count `comment` in Redis. This test has no API servers, so Redis gets no comments.
const METRICS: &str =
    "[metrics]\nlike = 1\nview = 3\ncomment = 4\nforward = 5\n[[rule]]\nmetric = \"comment\"\nwriter = \"api\"\n";

const VIEW: Metric = Metric(3);
const COMMENT: Metric = Metric(4);
const FORWARD: Metric = Metric(5);

/// The value of each counter that is not zero, by target and metric.
type Numbers = BTreeMap<(u64, u8), i64>;

/// Makes `count` events, and stores their sums.
struct Counts {
    dice: Dice,
    /// The number of targets.
    targets: u64,
    next: u64,
    sums: Numbers,
}

impl Counts {
    fn of(targets: u64) -> Self {
        Self { dice: Dice::of_run(11), targets, next: 0, sums: Numbers::new() }
    }

    /// Makes `count` further events of all metrics, for random targets.
    fn some(&mut self, count: u64) -> Vec<(UserId, Vec<u8>)> {
        (0..count)
            .map(|_| 1 + self.dice.below(self.targets))
            .collect::<Vec<_>>()
            .into_iter()
            .map(|id| self.one(id))
            .collect()
    }

    /// Makes one `count` event for each target.
    fn each(&mut self) -> Vec<(UserId, Vec<u8>)> {
        (1..=self.targets).map(|id| self.one(id)).collect()
    }

    fn one(&mut self, id: u64) -> (UserId, Vec<u8>) {
        self.next += 1;
        let delta = self.dice.below(12).cast_signed() - 4;
        let (metric, name) = [(VIEW, "view"), (FORWARD, "forward"), (COMMENT, "comment")][self.dice.below(3) as usize];
        if delta != 0 {
            let sum = self.sums.entry((id, metric.0)).or_insert(0);
            *sum += delta;
            self.sums.retain(|_, sum| *sum != 0);
        }
        let event_id = format!("event-{}", self.next);
        (
            UserId(self.next),
            encode_count(TargetId(id), ("video", name), delta, tallyd_base::runtime::clock::now(), &event_id, None),
        )
    }

    fn by_daemon(&self) -> Numbers {
        self.sums.iter().filter(|((_, metric), _)| *metric != COMMENT.0).map(|(of, sum)| (*of, *sum)).collect()
    }
}

/// Returns the counters in MySQL.
async fn in_mysql(world: &World) -> Numbers {
    sqlx::query(
        "SELECT target_id, metric, CAST(SUM(value) AS SIGNED) AS value FROM counter \
         WHERE metric <> 1 GROUP BY target_id, metric HAVING value <> 0",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap()
    .iter()
    .map(|row| ((row.get(0), row.get(1)), row.get(2)))
    .collect()
}

/// Returns the counters in Redis for the videos 1 to `targets`.
async fn in_redis(world: &World, cache: &Cache, targets: u64) -> Numbers {
    let names = KindNames::new(&world.config.kinds);
    let targets: Vec<Target> = (1..=targets).map(target).collect();
    let mut numbers = Numbers::new();
    for metric in [VIEW, COMMENT, FORWARD] {
        let of_metric: Vec<_> = targets.iter().map(|target| (*target, metric)).collect();
        let samples = cache.sample(&names, &of_metric).await.unwrap();
        for (target, sample) in targets.iter().zip(samples) {
            numbers.insert((target.id.0, metric.0), sample.unwrap().value);
        }
    }
    numbers.retain(|_, value| *value != 0);
    numbers
}

/// Checks that MySQL and Redis have the sums of all counts, without a reconcile.
async fn assert_exact(world: &World, publisher: &Publisher, counts: &Counts) {
    world.counted(publisher).await;
    assert_eq!(in_mysql(world).await, counts.sums);
    assert_eq!(in_redis(world, &world.cache, counts.targets).await, counts.by_daemon());
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
}

#[tokio::test]
async fn what_the_daemon_counts_comes_to_redis_and_what_api_servers_count_does_not() {
    let world = World::new("outbox_way", METRICS).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let client = world.api_server();
    for user in 1..=5 {
        client.like(target(1), UserId(user), &[]).await.unwrap();
    }
    let mut counts = Counts::of(40);
    let bodies = counts.some(800);
    world.publish(&publisher, &bodies).await;
    world.counted(&publisher).await;
    world.publish(&publisher, &bodies).await;
    assert_exact(&world, &publisher, &counts).await;
    assert_eq!(world.redis_counters().await.get(&target(1)), Some(&5), "each like must be counted once");
    let rows = world.count("SELECT COUNT(*) FROM outbox").await;
    assert!(rows > 0);
    // The daemon must not add these changes to Redis.
    let (user, id) = (UserId(1), TargetId(7));
    let comment = encode_count(id, ("video", "comment"), 1, tallyd_base::runtime::clock::now(), "last comment", None);
    let nothing = encode_count(id, ("video", "view"), 0, tallyd_base::runtime::clock::now(), "no view", None);
    *counts.sums.entry((7, COMMENT.0)).or_insert(0) += 1;
    counts.sums.retain(|_, sum| *sum != 0);
    world.publish(&publisher, &[(user, comment), (user, nothing)]).await;
    assert_exact(&world, &publisher, &counts).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM outbox").await, rows);
}

#[tokio::test]
async fn two_layouts_get_the_same_numbers() {
    let also = "[redis.also]\nlayout = \"entity\"\ncounter_key = \"also:{kind}:{id}\"\nbucket_bits = 3\n";
    let world = World::new("outbox_also", &format!("{also}{METRICS}")).await;
    let second = world.cache.also(&world.config.redis, &world.config.metrics).unwrap().unwrap();
    let mut dying = world.consuming_with(&[("TALLYD_FAULT_POINT", "outbox:amidst")]).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(40);
    world.publish(&publisher, &counts.some(300)).await;
    dying.logged("fault-point").await;
    dying.wait();
    let _daemon = world.daemon();
    world.publish(&publisher, &counts.some(300)).await;
    assert_exact(&world, &publisher, &counts).await;
    assert_eq!(in_redis(&world, &second, counts.targets).await, counts.by_daemon());
}

#[tokio::test]
async fn drift_of_what_the_daemon_counts_is_repaired_at_once() {
    let settings = "[reconcile]\npublish_grace = \"1h\"\nrepair_targets_max_percent = 100\n";
    let world = World::new("outbox_grace", settings).await;
    let _daemon = world.consuming().await;
    let (publisher, client) = (world.publisher().await, world.api_server());
    assert_eq!(world.report(&["reconcile"])["drifted"], 0);
    for (round, mode) in ["--full", "--changed"].into_iter().enumerate() {
        client.like(target(1), UserId(round as u64 + 1), &[]).await.unwrap();
        world.counted(&publisher).await;
        drift(&world, target(1), 3).await;
        assert_eq!(world.report(&["reconcile", mode])["repaired"], 1, "{mode}");
        assert_eq!(world.redis_counters().await.get(&target(1)), Some(&(round as i64 + 1)));
    }
}

#[tokio::test]
async fn what_is_committed_at_the_stop_is_added_before_the_end() {
    let world = World::new("outbox_stop", &format!("[consumer]\nlinger_ms = 1000\n{METRICS}")).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(20);
    for _ in 0..3 {
        let daemon = world.consuming().await;
        world.publish(&publisher, &counts.some(50)).await;
        assert!(daemon.stop().success());
        let rest = "SELECT COUNT(*) FROM partition_owner AS p LEFT JOIN outbox_state AS s USING (`partition`) \
                    WHERE p.outbox > COALESCE(s.applied, 0)";
        assert_eq!(world.count(rest).await, 0);
        let (mysql, redis) = (in_mysql(&world).await, in_redis(&world, &world.cache, counts.targets).await);
        assert_eq!(redis, mysql.into_iter().filter(|((_, metric), _)| *metric != COMMENT.0).collect());
    }
    let _daemon = world.daemon();
    assert_exact(&world, &publisher, &counts).await;
}
