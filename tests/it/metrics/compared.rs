//! Reconciles find and repair the drifts of counters of all metrics.

use std::collections::BTreeMap;

use redis::AsyncCommands;
use tallyd_core::model::{Target, UserId};
use tallyd_mysql::Store;
use tallyd_redis::keys::KindNames;

use super::common::size::some_of;
use super::common::{as_api, event_of, stdout, target};
use super::{BALANCE, LAYOUTS, LIKE, METRICS, Product, SHARE, VIEW};
use crate::common::scripts::Counting;

fn listed(report: &serde_json::Value) -> Vec<(String, String, i64)> {
    let targets = report["targets"].as_array().unwrap().iter();
    let mut listed: Vec<_> = targets
        .map(|line| {
            (
                line["target"].as_str().unwrap().into(),
                line["metric"].as_str().unwrap().into(),
                line["added"].as_i64().unwrap(),
            )
        })
        .collect();
    listed.sort();
    listed
}

#[tokio::test(flavor = "multi_thread")]
async fn each_drifted_number_is_repaired_and_no_other() {
    for layout in some_of(&LAYOUTS) {
        let mut product =
            Product::open(&format!("metrics_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        product.fill(1, 200).await;
        // A drifted number without a row in MySQL is a phantom, which only a full run finds.
        event_of(product.client.like(target(4), UserId(1), &[]).await.unwrap());
        product.numbers.entry((target(4), LIKE)).and_modify(|it| *it += 1).or_insert(1);
        for (id, metric) in [(3, VIEW), (4, BALANCE), (4, SHARE)] {
            product.client.add(target(id), metric, 60, &format!("{id}-{}", metric.0)).await.unwrap();
            product.numbers.entry((target(id), metric)).and_modify(|it| *it += 60).or_insert(60);
        }
        product.numbers.retain(|_, number| *number != 0);
        product.assert_equal().await;
        product.drift(target(3), VIEW, 4).await;
        product.drift(target(4), LIKE, -1).await;
        product.drift(target(4), BALANCE, -100).await;
        product.drift(target(4), SHARE, -50).await;
        let report = product.world.report(&["reconcile"]);
        assert_eq!((&report["drifted"], &report["repaired"]), (&4.into(), &4.into()), "{layout}: {report}");
        let expected =
            [("video:3", "view", -4), ("video:4", "balance", 100), ("video:4", "like", 1), ("video:4", "share", 50)];
        assert_eq!(listed(&report), expected.map(|(target, metric, added)| (target.into(), metric.into(), added)));
        product.ends_equal().await;
    }
}

/// A rule forbids negative counts, but only Redis enforces this rule. So the same counter can become negative in MySQL.
#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_is_below_zero_in_mysql_is_so_in_redis_and_nobody_is_shown_it() {
    for layout in some_of(&LAYOUTS) {
        let product =
            Product::open(&format!("metrics_below_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        let (client, expected) = (&product.client, |number| BTreeMap::from([((target(1), VIEW), number)]));
        product.drift(target(1), VIEW, 5).await;
        client.add(target(1), VIEW, -3, "taken").await.unwrap().counted().unwrap();
        product.settled().await;
        assert_eq!((product.in_mysql().await, product.in_redis().await), (expected(-3), expected(2)));
        for (repaired, mode) in [(1, "--changed"), (0, "--full")] {
            let report = product.world.reconcile(mode).await;
            assert_eq!((&report["repaired"], &report["left"]), (&repaired.into(), &0.into()), "{layout}: {report}");
            assert_eq!((product.in_mysql().await, product.in_redis().await), (expected(-3), expected(-3)));
        }
        let shown = client.read(&[target(1)]).await.unwrap();
        assert_eq!(shown[0].get(VIEW).unwrap().value, 0, "{layout}");
        let refused = client.add(target(1), VIEW, -1, "refused").await.unwrap();
        assert!(matches!(refused, Counting::BelowZero { .. }), "{layout}: {refused:?}");
        super::common::lose(&product.world).await;
        product.world.reconcile("--changed").await;
        assert_eq!(product.in_redis().await, expected(-3), "{layout}: loaded");
        client.add(target(1), VIEW, 4, "added").await.unwrap().counted().unwrap();
        product.settled().await;
        assert_eq!((product.in_mysql().await, product.in_redis().await), (expected(1), expected(1)));
        product.close().await;
    }
}

/// An operator has changed `counter` by hand. When a run repairs Redis with this wrong count, the like count in Redis
/// must not become negative.
#[tokio::test(flavor = "multi_thread")]
async fn likes_are_not_repaired_below_zero_where_counter_is_wrong() {
    let mut product = Product::open("metrics_likes_below", &as_api("")).await;
    event_of(product.client.like(target(1), UserId(1), &[]).await.unwrap());
    product.numbers.insert((target(1), LIKE), 1);
    product.settled().await;
    sqlx::query("UPDATE counter SET value = -5").execute(&product.world.pool).await.unwrap();
    let report = product.world.reconcile("--changed").await;
    assert_eq!((&report["drifted"], &report["left"]), (&1.into(), &1.into()), "{report}");
    assert_eq!(product.in_redis().await, product.numbers);
    let report = product.world.reconcile("--full").await;
    assert_eq!((&report["counters_off"], &report["drifted"]), (&1.into(), &0.into()), "{report}");
    product.ends_equal().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_searches_each_metric_for_what_mysql_does_not_know() {
    for layout in some_of(&LAYOUTS) {
        let mut product =
            Product::open(&format!("metrics_phantom_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        product.fill(2, 60).await;
        let unviewed = (1..).map(target).find(|it| !product.numbers.contains_key(&(*it, VIEW))).unwrap();
        product.drift(unviewed, VIEW, 7).await;
        product.drift(target(500), BALANCE, -2).await;
        product.drift(target(501), LIKE, 2).await;
        product.drift(target(502), SHARE, -1).await;
        product.settled().await;
        let report = product.world.report(&["reconcile", "--full"]);
        assert_eq!((&report["phantoms"], &report["repaired"]), (&4.into(), &4.into()), "{layout}: {report}");
        let again = product.world.report(&["reconcile", "--full"]);
        assert_eq!((&again["phantoms"], &again["drifted"]), (&0.into(), &0.into()), "{layout}: {again}");
        product.ends_equal().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_redis_has_lost_is_known_again_only_with_all_numbers() {
    for layout in some_of(&LAYOUTS) {
        let mut product =
            Product::open(&format!("metrics_lost_{layout}"), &format!("[redis]\nlayout = \"{layout}\"\n")).await;
        product.fill(3, 200).await;
        product.assert_equal().await;
        super::common::lose(&product.world).await;
        // API servers count these changes while Redis does not know the counters.
        product.fill(4, 60).await;
        let report = product.world.report(&["reconcile"]);
        assert_eq!(report["repaired"], 0, "{layout}: {report}");
        product.assert_equal().await;
        send_again(&product).await;
        product.ends_equal().await;
    }
}

/// Adds the first rows of the outbox to Redis again. A daemon does the same if the daemon is frozen while Redis loses its
/// data.
async fn send_again(product: &Product) {
    let store = Store::new(&product.world.config.mysql, 1).unwrap();
    let rows = store.outbox_after(0, 0, 10).await.unwrap();
    assert!(!rows.is_empty());
    let rows: Vec<_> = rows.into_iter().map(|row| (row.number, row.additions)).collect();
    let kinds = KindNames::new(&product.world.config.kinds);
    let mut late = product.world.cache.applying(&kinds, 0, 0, &rows);
    while !late.is_done() {
        product.world.cache.apply_some(&mut late).await.unwrap();
    }
    late.ended().failed.unwrap();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_go_through_all_metrics() {
    let mut product = Product::open("metrics_scrub", "[reconcile]\nscrub_parts = 3\n").await;
    product.fill(5, 300).await;
    product.settled().await;
    for metric in METRICS {
        product.drift(target(7), metric, 3).await;
        product.drift(Target { id: tallyd_core::model::TargetId(900), ..target(7) }, metric, 2).await;
    }
    let mut repaired = 0;
    for _ in 0..4 {
        repaired += product.world.report(&["reconcile", "--scrub", "--force", "--yes"])["repaired"].as_u64().unwrap();
    }
    assert_eq!(repaired, 8);
    product.ends_equal().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_target_is_explained_with_those_of_its_numbers_that_there_are() {
    let product = Product::open("metrics_explained", "").await;
    product.client.add(target(5), VIEW, 4, "a").await.unwrap().counted().unwrap();
    product.settled().await;
    product.drift(target(5), VIEW, 2).await;
    let shown = stdout(&product.world.tallyd(&["reconcile", "--target", "video:5", "--dry-run"]));
    assert!(shown.contains("video:5 view: drifted, Redis 6, MySQL 4"), "{shown}");
    assert!(!shown.contains("balance"), "{shown}");
    let bucket = product.world.cache.keys.counters("video", product.world.cache.keys.bucket(target(5)));
    let field: String = product.world.redis().await.hget(bucket, 5).await.unwrap();
    assert_eq!(field, "0,6");
    product.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_to_another_layout_takes_all_numbers_along() {
    let mut product = Product::open("metrics_moved", "[redis.also]\nlayout = \"string\"\nbucket_bits = 4\n").await;
    product.fill(8, 200).await;
    product.settled().await;
    // API servers counted these counters before the second layout was configured, so the second layout does not have
    // them.
    let also = product.world.cache.also(&product.world.config.redis, &product.world.config.metrics).unwrap().unwrap();
    for (target, metric) in product.numbers.keys() {
        let place = also.keys.place("video", *target, *metric);
        let _: i64 = product.world.redis().await.del(place.key).await.unwrap();
    }
    for bucket in 0..also.keys.buckets() {
        let _: i64 = product.world.redis().await.del(also.keys.counters("video", bucket)).await.unwrap();
    }
    let from = product.world.cache.keys.layout().to_string();
    let moved = product.world.tallyd(&["admin", "layout", "migrate", "--from", &from, "--to", "string:4"]);
    assert!(moved.status.success(), "{}", super::common::stderr(&moved));
    assert_eq!(product.in_cache(&also).await, product.numbers);
    product.ends_equal().await;
}
