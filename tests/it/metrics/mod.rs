//! Tests a product that counts several metrics. Reconciles compare the product's counters in Redis with its counters in
//! MySQL.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod boards;
mod compared;
mod living;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common;
use crate::common::scripts::ApiServer;
use common::{Daemon, Dice, World, event_of, eventually, target};
use tallyd_core::model::{Metric, Target, UserId};
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;
use tallyd_redis::read::Found;

const LIKE: Metric = Metric(1);
/// API servers count this metric in Redis.
const VIEW: Metric = Metric(2);
/// API servers also count this metric, and its counters can be negative.
const BALANCE: Metric = Metric(3);

/// The daemon counts this metric in Redis.
const SHARE: Metric = Metric(4);

const METRICS: [Metric; 4] = [LIKE, VIEW, BALANCE, SHARE];

const RULES: &str = "[metrics]\nlike = 1\nview = 2\nbalance = 3\nshare = 4\n\
                     [[rule]]\nmetric = \"view\"\nwriter = \"api\"\n\
                     [[rule]]\nmetric = \"balance\"\nwriter = \"api\"\nbelow_zero = true\n";

const LAYOUTS: [&str; 3] = ["packed", "entity", "string"];

const TARGETS: u64 = 30;

/// The expected counters that are not zero.
type Numbers = BTreeMap<(Target, Metric), i64>;

/// A test site with a daemon. Redis has loaded all buckets of the site.
struct Product {
    /// Before the world, so that it stops before its database is deleted.
    daemon: Option<Daemon>,
    world: World,
    client: Arc<ApiServer>,
    numbers: Numbers,
}

impl Product {
    async fn open(name: &str, settings: &str) -> Self {
        Self::of(World::new(name, &format!("{RULES}{settings}")).await).await
    }

    async fn of(world: World) -> Self {
        let daemon = world.consuming().await;
        world.succeeds(&["reconcile"]).await;
        let client = Arc::new(world.api_server());
        Self { world, daemon: Some(daemon), client, numbers: Numbers::new() }
    }

    /// Makes random changes of all metrics.
    async fn fill(&mut self, seed: u64, changes: u64) {
        let mut dice = Dice::of_run(seed);
        for number in 0..changes {
            let target = target(1 + dice.below(TARGETS));
            let metric = METRICS[dice.below(4) as usize];
            let delta = match metric {
                LIKE => {
                    let user = UserId(seed * 1_000_000 + number + 1);
                    event_of(self.client.like(target, user, &[]).await.unwrap());
                    1
                }
                VIEW | SHARE => 1 + dice.below(9).cast_signed(),
                _ => dice.below(20).cast_signed() - 12,
            };
            if metric != LIKE {
                let id = format!("{seed}-{number}");
                self.client.add(target, metric, delta, &id).await.unwrap();
            }
            *self.numbers.entry((target, metric)).or_default() += delta;
        }
        self.numbers.retain(|_, number| *number != 0);
    }

    /// Changes a counter in Redis only.
    async fn drift(&self, target: Target, metric: Metric, by: i64) {
        let place = self.world.cache.keys.place("video", target, metric);
        let script = redis::Script::new(include_str!("../../../lua/count.lua"));
        let mut call = script.prepare_invoke();
        call.key(place.key);
        if let Some(bucket) = place.bucket {
            call.key(bucket);
        }
        call.arg(target.id.0).arg(place.part).arg("add").arg(by).arg(1);
        let _: redis::Value = call.invoke_async(&mut self.world.redis().await).await.unwrap();
    }

    /// Returns the counters that Redis knows and that are not zero.
    async fn in_redis(&self) -> Numbers {
        self.in_cache(&self.world.cache).await
    }

    async fn in_cache(&self, cache: &Cache) -> Numbers {
        let targets: Vec<Target> = (1..=TARGETS).map(target).collect();
        let found = cache.read(&KindNames::new(&self.world.config.kinds), &METRICS, &targets).await.unwrap();
        let mut numbers = Numbers::new();
        for (target, found) in targets.into_iter().zip(found) {
            let Found::Known(values) = found else { continue };
            let of = METRICS.iter().zip(values).filter(|(_, value)| *value != 0);
            numbers.extend(of.map(|(metric, value)| ((target, *metric), value)));
        }
        numbers
    }

    /// Waits until all events are in MySQL, and until the daemon has added its counts to Redis.
    async fn settled(&self) {
        self.world.drained(&self.world.publisher().await).await;
        eventually("the outbox is in Redis", || async {
            self.world
                .count(
                    "SELECT COUNT(*) FROM partition_owner LEFT JOIN outbox_state USING (`partition`) \
                     WHERE outbox > COALESCE(applied, 0)",
                )
                .await
                == 0
        })
        .await;
    }

    /// Checks that Redis and MySQL have exactly the expected counters.
    async fn assert_equal(&self) {
        self.settled().await;
        assert_eq!(self.in_mysql().await, self.numbers);
        assert_eq!(self.in_redis().await, self.numbers);
    }

    async fn in_mysql(&self) -> Numbers {
        let rows: Vec<(u64, u8, i64)> = sqlx::query_as(
            "SELECT target_id, metric, CAST(SUM(value) AS SIGNED) FROM counter GROUP BY target_id, metric HAVING SUM(value) <> 0",
        )
        .fetch_all(&self.world.pool)
        .await
        .unwrap();
        rows.into_iter().map(|(id, metric, value)| ((target(id), Metric(metric)), value)).collect()
    }

    async fn ends_equal(self) {
        self.assert_equal().await;
        self.close().await;
    }

    async fn close(self) {
        assert!(self.daemon.unwrap().stop().success());
    }
}
