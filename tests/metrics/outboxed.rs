//! Numbers that the daemon adds to Redis, compared and loaded while it adds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tallyd::client::Client;
use tallyd::model::{Micros, Target};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::common::{Dice, eventually, lose, target};
use super::{LAYOUTS, Numbers, Product, SHARE, TARGETS};

/// Somebody who shares all the time, half of it one target.
struct Sharer {
    stop: CancellationToken,
    shared: Arc<AtomicU64>,
    ended: JoinHandle<Numbers>,
}

impl Sharer {
    fn begin(product: &Product, number: u64) -> Self {
        let (stop, shared) = (CancellationToken::new(), Arc::<AtomicU64>::default());
        let ended = tokio::spawn(share(Arc::clone(&product.client), number, stop.clone(), Arc::clone(&shared)));
        Self { stop, shared, ended }
    }

    /// Waits until so much more was shared.
    async fn goes_on(&self, more: u64) {
        let until = self.shared.load(Ordering::Relaxed) + more;
        eventually("somebody shares", || async { self.shared.load(Ordering::Relaxed) >= until }).await;
    }

    async fn end(self, product: &mut Product) {
        self.stop.cancel();
        for (of, number) in self.ended.await.unwrap() {
            *product.numbers.entry(of).or_default() += number;
        }
    }
}

async fn share(client: Arc<Client>, number: u64, stop: CancellationToken, shared: Arc<AtomicU64>) -> Numbers {
    let (mut dice, mut numbers) = (Dice::new(number + 1), Numbers::new());
    for event in 0_u64.. {
        if stop.is_cancelled() {
            break;
        }
        let target = if dice.percent(50) { target(1) } else { target(1 + dice.below(TARGETS)) };
        let delta = 1 + dice.below(3).cast_signed();
        client.add(target, SHARE, delta, &format!("{number}-{event}")).await.unwrap();
        *numbers.entry((target, SHARE)).or_default() += delta;
        shared.fetch_add(1, Ordering::Relaxed);
    }
    numbers
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_daemon_adds_is_never_taken_for_drift_and_every_drift_is_found() {
    for layout in LAYOUTS {
        let mut product =
            Product::open(&format!("shared_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        let sharers = [Sharer::begin(&product, 1), Sharer::begin(&product, 2)];
        sharers[0].goes_on(200).await;
        for mode in ["--changed", "--full", "--changed"] {
            let report = product.world.report(&["reconcile", mode]);
            assert_eq!((&report["drifted"], &report["busy"]), (&0.into(), &0.into()), "{layout}: {report}");
            assert!(report["checked"].as_u64().unwrap() >= 20, "{report}");
        }
        product.drift(target(1), SHARE, 5).await;
        product.drift(target(2), SHARE, -3).await;
        let report = product.world.report(&["reconcile"]);
        assert_eq!((&report["repaired"], &report["drift_sum"]), (&2.into(), &8.into()), "{layout}: {report}");
        for sharer in sharers {
            sharer.end(&mut product).await;
        }
        product.assert_equal().await;
        product.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_redis_loses_while_the_daemon_adds_is_loaded_to_the_last_one() {
    for layout in LAYOUTS {
        let mut product =
            Product::open(&format!("shared_lost_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        product.fill(6, 100).await;
        let sharers = [Sharer::begin(&product, 1), Sharer::begin(&product, 2)];
        for _ in 0..3 {
            sharers[0].goes_on(60).await;
            if layout != "packed" {
                forget_shares(&product).await;
            }
            lose(&product.world).await;
            sharers[1].goes_on(60).await;
            let report = product.world.report(&["reconcile", "--changed"]);
            assert_eq!(report["drifted"], 0, "{layout}: {report}");
        }
        for sharer in sharers {
            sharer.end(&mut product).await;
        }
        product.assert_equal().await;
        product.close().await;
    }
}

/// In the layouts entity and string a loss takes the numbers' own keys, too.
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
        product.client.add(target(1), SHARE, 2, &format!("later-{number}-{}", Micros::now())).await.unwrap();
        *product.numbers.entry((target(1), SHARE)).or_default() += 2;
    }
    product.assert_equal().await;
    // What a failover to a replica that was behind leaves.
    let restored = redis::cmd("RESTORE").arg(&bucket).arg(0).arg(dumped).arg("REPLACE").to_owned();
    let () = restored.query_async(&mut redis).await.unwrap();
    assert_eq!(shares(&product, target(1)).await, before);
    let report = product.world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &10.into()), "{report}");
    product.assert_equal().await;
    product.close().await;
}

async fn shares(product: &Product, target: Target) -> i64 {
    product.in_redis().await.get(&(target, SHARE)).copied().unwrap_or(0)
}
