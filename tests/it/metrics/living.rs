//! Reconcile runs compare counters and load counters while other tasks add to these counters without a pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tallyd_core::model::{Metric, Target};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::common::size::some_of;
use super::common::{Dice, eventually, lose, target};
use super::{LAYOUTS, Numbers, Product, SHARE, TARGETS, VIEW};
use crate::common::scripts::ApiServer;

/// A task that adds to the counters of one metric without a pause. Half of the additions go to one target.
struct Crowd {
    stop: CancellationToken,
    added: Arc<AtomicU64>,
    ended: JoinHandle<Numbers>,
}

impl Crowd {
    fn begin(product: &Product, metric: Metric, number: u64) -> Self {
        let (stop, added) = (CancellationToken::new(), Arc::<AtomicU64>::default());
        let ended = tokio::spawn(add(Arc::clone(&product.client), metric, number, stop.clone(), Arc::clone(&added)));
        Self { stop, added, ended }
    }

    /// Waits until the task has added at least `more`, counted from the start of this wait.
    async fn goes_on(&self, more: u64) {
        let until = self.added.load(Ordering::Relaxed) + more;
        eventually("the task adds", || async { self.added.load(Ordering::Relaxed) >= until }).await;
    }

    async fn end(self, product: &mut Product) {
        self.stop.cancel();
        for (of, number) in self.ended.await.unwrap() {
            *product.numbers.entry(of).or_default() += number;
        }
    }
}

async fn add(
    client: Arc<ApiServer>,
    metric: Metric,
    number: u64,
    stop: CancellationToken,
    added: Arc<AtomicU64>,
) -> Numbers {
    let (mut dice, mut numbers) = (Dice::of_run(number + 1), Numbers::new());
    for event in 0_u64.. {
        if stop.is_cancelled() {
            break;
        }
        let target = if dice.percent(50) { target(1) } else { target(1 + dice.below(TARGETS)) };
        let delta = 1 + dice.below(3).cast_signed();
        client.add(target, metric, delta, &format!("{number}-{event}")).await.unwrap();
        *numbers.entry((target, metric)).or_default() += delta;
        added.fetch_add(1, Ordering::Relaxed);
    }
    numbers
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_daemon_adds_is_never_taken_for_drift_and_every_drift_is_found() {
    for layout in some_of(&LAYOUTS) {
        let mut product =
            Product::open(&format!("shared_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        let crowds = [Crowd::begin(&product, SHARE, 1), Crowd::begin(&product, SHARE, 2)];
        crowds[0].goes_on(200).await;
        for mode in ["--changed", "--full", "--changed"] {
            let report = product.world.report(&["reconcile", mode]);
            assert_eq!((&report["drifted"], &report["busy"]), (&0.into(), &0.into()), "{layout}: {report}");
            assert!(report["checked"].as_u64().unwrap() >= 20, "{report}");
        }
        product.drift(target(1), SHARE, 5).await;
        product.drift(target(2), SHARE, -3).await;
        let report = product.world.report(&["reconcile"]);
        assert_eq!((&report["repaired"], &report["drift_sum"]), (&2.into(), &8.into()), "{layout}: {report}");
        for crowd in crowds {
            crowd.end(&mut product).await;
        }
        product.ends_equal().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_api_servers_count_all_the_time_is_judged_by_what_was_added_since_the_cut() {
    let mut product = Product::open("viewed", "").await;
    let crowds = [1, 2, 3, 4].map(|number| Crowd::begin(&product, VIEW, number));
    crowds[0].goes_on(200).await;
    // A pass samples a counter, and then reads MySQL's count. The test repeats the run until an addition arrives
    // between these two steps. On a slow machine, the first run can end without such an addition.
    eventually("an addition arrives while the run compares its counter", || async {
        let report = product.world.report(&["reconcile", "--full"]);
        assert_eq!((&report["drifted"], &report["undecided"]), (&0.into(), &0.into()), "{report}");
        report["busy"].as_u64().unwrap() > 0
    })
    .await;
    product.drift(target(1), VIEW, 5).await;
    let report = product.world.report(&["reconcile", "--full"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &5.into()), "{report}");
    lose(&product.world).await;
    crowds[0].goes_on(100).await;
    let report = product.world.report(&["reconcile", "--changed"]);
    assert_eq!(report["drifted"], 0, "{report}");
    for crowd in crowds {
        crowd.end(&mut product).await;
    }
    product.ends_equal().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_redis_loses_while_the_daemon_adds_is_loaded_to_the_last_one() {
    for layout in some_of(&LAYOUTS) {
        let mut product =
            Product::open(&format!("shared_lost_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        product.fill(6, 100).await;
        let crowds = [Crowd::begin(&product, SHARE, 1), Crowd::begin(&product, SHARE, 2)];
        for _ in 0..3 {
            crowds[0].goes_on(60).await;
            if layout != "packed" {
                forget_shares(&product).await;
            }
            lose(&product.world).await;
            crowds[1].goes_on(60).await;
            let report = product.world.report(&["reconcile", "--changed"]);
            assert_eq!(report["drifted"], 0, "{layout}: {report}");
        }
        for crowd in crowds {
            crowd.end(&mut product).await;
        }
        product.ends_equal().await;
    }
}

/// Deletes the share counters in Redis. In the layouts `entity` and `string`, this function also deletes the separate
/// key of each counter.
async fn forget_shares(product: &Product) {
    let mut redis = product.world.redis().await;
    for number in 1..=TARGETS {
        let place = product.world.cache.keys.place("video", target(number), SHARE);
        let command = match place.part.strip_prefix("entity:") {
            Some(field) => redis::cmd("HDEL").arg(&place.key).arg(field).to_owned(),
            None => redis::cmd("DEL").arg(&place.key).to_owned(),
        };
        let _: i64 = command.query_async(&mut redis).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_state_of_redis_is_seen_though_its_marks_are_older_too() {
    let mut product = Product::open("shared_older", "").await;
    product.fill(7, 120).await;
    product.assert_equal().await;
    let bucket = product.world.cache.keys.counters("video", product.world.cache.keys.bucket(target(1)));
    let mut redis = product.world.redis().await;
    let dumped: Vec<u8> = redis::cmd("DUMP").arg(&bucket).query_async(&mut redis).await.unwrap();
    let before = shares(&product, target(1)).await;
    for number in 0..5 {
        product
            .client
            .add(target(1), SHARE, 2, &format!("later-{number}-{}", tallyd_base::runtime::clock::now()))
            .await
            .unwrap();
        *product.numbers.entry((target(1), SHARE)).or_default() += 2;
    }
    product.assert_equal().await;
    // The test restores an old state of the bucket, as after a failover to an outdated replica.
    let restored = redis::cmd("RESTORE").arg(&bucket).arg(0).arg(dumped).arg("REPLACE").to_owned();
    let () = restored.query_async(&mut redis).await.unwrap();
    assert_eq!(shares(&product, target(1)).await, before);
    let report = product.world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &10.into()), "{report}");
    product.ends_equal().await;
}

async fn shares(product: &Product, target: Target) -> i64 {
    product.in_redis().await.get(&(target, SHARE)).copied().unwrap_or(0)
}
