//! A run loads missing data into Redis while the daemon adds to the same counters.

use redis::AsyncCommands;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Addition, Metric, UserId};
use tallyd_mysql::outbox;
use tallyd_rabbitmq::Publisher;

use super::stage::{Run, assert_numbers};
use crate::common::{Daemon, Model, World, body, lose, stderr, target};

struct Site {
    /// This field comes before `world`, so that the daemon is dropped first. The daemon's log is in the world's folder.
    daemon: Daemon,
    world: World,
    publisher: Publisher,
    model: Model,
}

impl Site {
    /// Makes a site. In Redis and MySQL, each of its targets 1 to 20 has three likes.
    async fn new(name: &str) -> Self {
        let world = World::new(name, "").await;
        let (publisher, daemon) = (world.publisher().await, world.daemon());
        assert!(world.tallyd(&["reconcile"]).status.success());
        let mut site = Self { daemon, world, publisher, model: Model::default() };
        for user in 1..=3 {
            site.like(1..=20, user).await;
        }
        site
    }

    /// Publishes likes of the user, and waits until these likes are in MySQL and in Redis.
    async fn like(&mut self, ids: impl Iterator<Item = u64>, user: u64) {
        self.publish(ids, user).await;
        self.world.outbox_added().await;
    }

    /// Publishes likes of the user, and waits until these likes are in MySQL.
    async fn publish(&mut self, ids: impl Iterator<Item = u64>, user: u64) {
        let at = tallyd_base::runtime::clock::now();
        let events: Vec<LikeEvent> =
            ids.map(|id| LikeEvent { target: target(id), user: UserId(user), at, liked: true }).collect();
        events.iter().for_each(|event| self.model.apply(event));
        let bodies: Vec<_> = events.iter().map(body).collect();
        self.world.publish(&self.publisher, &bodies).await;
        self.world.drained(&self.publisher).await;
    }

    async fn unloaded(&self) -> u64 {
        self.world.cache.unloaded("video", 0..self.world.cache.keys.buckets()).await.unwrap().lost
    }

    async fn close(self) {
        self.world.assert_equals(&self.model).await;
        assert!(self.daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_after_a_loads_cut_are_added_by_the_outbox_alone() {
    let mut site = Site::new("touched").await;
    for point in ["reconcile:unloaded", "reconcile:loading"] {
        lose(&site.world).await;
        let mut run = Run::start(&site.world, &["--changed"], &[("TALLYD_PAUSE_POINT", point)]);
        run.paused().await;
        let user = site.model.rows.len() as u64;
        site.like(5..=15, user).await;
        site.like(5..=9, user + 1).await;
        let report = run.report().await;
        assert_numbers(&report, &[("buckets_loaded", 16), ("drifted", 0), ("transient", 0), ("busy", 0)]);
        site.world.assert_redis_equals(&site.model).await;
    }
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_that_no_like_touched_are_loaded_unmeasured() {
    let mut site = Site::new("untouched").await;
    lose(&site.world).await;
    site.like([3, 4].into_iter(), 9).await;
    let mut run = Run::start(&site.world, &["--changed"], &[("TALLYD_PAUSE_POINT", "reconcile:sampled")]);
    // While the run loads counters into Redis, the run takes no samples. So the run pauses at the first sample of its
    // comparison.
    run.paused().await;
    assert_eq!(site.unloaded().await, 0);
    site.world.assert_redis_equals(&site.model).await;
    assert_numbers(&run.report().await, &[("counters_loaded", 20), ("drifted", 0)]);
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_beside_a_paused_outbox_with_a_long_backlog_ends() {
    let mut site = Site::new("touched_paused").await;
    let paused = site.world.tallyd(&["pause", "outbox", "--for", "10m"]);
    assert!(paused.status.success(), "{}", stderr(&paused));
    site.daemon.logged("order-begun").await;
    let additions: Vec<Addition> =
        (0..200_000).map(|id| Addition { target: target(1_000 + id), metric: Metric(1), delta: 1 }).collect();
    for _ in 0..3 {
        let mut tx = site.world.pool.begin().await.unwrap();
        outbox::append(&mut tx, 0, &additions).await.unwrap();
        tx.commit().await.unwrap();
    }
    lose(&site.world).await;
    let mut run = Run::start(&site.world, &["--changed"], &[("TALLYD_PAUSE_POINT", "reconcile:unloaded")]);
    run.paused().await;
    site.publish(1..=20, 9).await;
    assert_numbers(&run.report().await, &[("buckets_loaded", 16), ("drifted", 0), ("undecided", 0)]);
    assert!(site.daemon.stop().success());
}

/// Loads all counters into Redis again. Returns the field of target 1, and the number of buckets that are not loaded.
async fn reloaded(site: &Site) -> (String, u64) {
    let report = site.world.report(&["reconcile", "--reload"]);
    assert_eq!((&report["left"], &report["drifted"]), (&0.into(), &0.into()), "{report}");
    let key = site.world.cache.keys.counters("video", site.world.cache.keys.bucket(target(1)));
    (site.world.redis().await.hget(key, 1).await.unwrap(), site.unloaded().await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_adds_nothing_to_numbers_of_a_retired_metric() {
    let mut site = Site::new("touched_retired").await;
    let view = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 1, 2, 0, 5, UTC_TIMESTAMP(6))";
    sqlx::query(view).execute(&site.world.pool).await.unwrap();
    site.world.set("[metrics]\nlike = 1\nview = 2\n");
    assert_eq!(reloaded(&site).await, ("3,5".to_owned(), 0));
    site.world.set("[metrics]\nlike = 1\n[retired]\nmetrics = [\"view\"]\n");
    assert_eq!(reloaded(&site).await, ("3,5".to_owned(), 0));
    sqlx::query("DELETE FROM counter WHERE metric = 2").execute(&site.world.pool).await.unwrap();
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_is_no_number_keeps_no_bucket_unknown() {
    let site = Site::new("touched_junk").await;
    let key = site.world.cache.keys.counters("video", site.world.cache.keys.bucket(target(1)));
    let mut redis = site.world.redis().await;
    let () = redis.hset(&key, 1, "junk").await.unwrap();
    assert_eq!(reloaded(&site).await, ("junk".to_owned(), 0));
    let () = redis.hset(&key, 1, "3").await.unwrap();
    site.close().await;
}
