//! Tests the daemon on Redis servers with sentinels. Each test has its own servers, and some tests make another server
//! the master.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod failover;
mod group;
mod init;
mod wrong;

use super::cluster::crowd::{Crowd, TARGETS, model};
use crate::common;
use common::{Daemon, Model, World, eventually, redis_likes};
use tallyd_rabbitmq::Publisher;

use group::Group;

const SETTINGS: &str = "[reconcile]\nrepair_targets_max_percent = 100\n";

/// The servers, a test environment on them with all counters loaded, and a daemon.
struct Stage {
    daemon: Daemon,
    publisher: Publisher,
    world: World,
    group: Group,
}

impl Stage {
    async fn new(name: &str, settings: &str) -> Self {
        let group = Group::start().await;
        let world = World::new(name, &group.settings(settings)).await;
        let publisher = world.publisher().await;
        let loaded = world.tallyd(&["reconcile"]);
        assert!(loaded.status.success(), "{}", common::stderr(&loaded));
        let daemon = world.daemon_with(&[("TALLYD__RECONCILE__WATCH_EVERY", "1s")]);
        daemon.logged("\"consuming\"").await;
        Self { daemon, publisher, world, group }
    }

    fn crowd(&self) -> Crowd {
        Crowd::new(self.group.api_server(&self.world), false)
    }

    /// Runs a reconcile, and checks that it leaves no drift.
    async fn reconcile(&self, mode: &str) -> serde_json::Value {
        let report = self.world.reconcile(mode).await;
        assert_eq!((&report["ended"], &report["left"]), (&"done".into(), &0.into()), "{report}");
        report
    }

    /// Waits until the master has more new likes than there are videos.
    async fn goes_on(&self) {
        let likes = async || {
            let mut master = self.group.connect_master().await?;
            Some(self.world.redis_numbers(&mut master, &self.world.cache.keys).await.values().sum::<i64>())
        };
        let before = std::cell::Cell::new(None);
        eventually("likes continue", || async {
            let now = likes().await;
            before.set(before.get().or(now));
            now.zip(before.get()).is_some_and(|(now, before)| now > before + TARGETS.cast_signed())
        })
        .await;
    }

    /// Checks that MySQL and Redis are equal to the model, and that no run finds a drift.
    async fn close(self, model: &Model) {
        self.world.drained(&self.publisher).await;
        self.world.assert_rows_equal(model).await;
        self.world.outbox_added().await;
        self.world.assert_redis_equals_on(&mut self.group.connect_master().await.unwrap(), model).await;
        let counters = model.counters();
        let client = self.group.api_server(&self.world);
        let shown = redis_likes(&client, &counters.keys().copied().collect::<Vec<_>>()).await;
        assert_eq!(shown, counters.into_values().map(Some).collect::<Vec<_>>());
        let report = self.reconcile("--full").await;
        for number in ["drifted", "phantoms", "unknown", "undecided", "counters_off", "buckets_loaded"] {
            assert_eq!(report[number], 0, "{number}: {report}");
        }
        assert!(self.daemon.stop().success());
    }
}
