//! Tests the daemon on a Redis Cluster. Each test starts three masters, and some tests move keys from one master to
//! another.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod apart;
mod boards;
pub(crate) mod crowd;
mod failover;
mod faults;
mod filters;
mod init;
mod layouts;
mod moving;
mod nodes;
mod old_keys;
mod outbox;
mod truth;
mod wrong;

use crate::common;
use common::{Daemon, Model, World, event_of};
use futures_util::{StreamExt, stream};
use tallyd_core::model::{Target, UserId};
use tallyd_rabbitmq::Publisher;

use crate::common::scripts::ApiServer;
use nodes::Nodes;

/// The number of likes that the test sends at the same time.
const AT_ONCE: usize = 64;

/// A Redis Cluster, a test environment on it with all counters loaded, and a daemon.
struct Stage {
    daemon: Daemon,
    client: ApiServer,
    publisher: Publisher,
    world: World,
    nodes: Nodes,
}

impl Stage {
    async fn new(name: &str, settings: &str, environment: &[(&str, &str)]) -> Self {
        let nodes = Nodes::start().await;
        let world = World::new(name, &nodes.settings(settings)).await;
        let publisher = world.publisher().await;
        let client = nodes.api_server(&world);
        assert!(world.tallyd(&["reconcile"]).status.success());
        let daemon = world.daemon_with(environment);
        Self { daemon, client, publisher, world, nodes }
    }

    /// Sends the likes concurrently, and applies them to the model.
    async fn like(&self, likes: &[(Target, UserId, bool)], model: &mut Model) {
        let set = |(target, user, liked): (Target, UserId, bool)| async move {
            let set = if liked {
                self.client.like(target, user, &[]).await
            } else {
                self.client.unlike(target, user, &[]).await
            };
            event_of(set.unwrap())
        };
        let events: Vec<_> = stream::iter(likes.iter().copied()).map(set).buffer_unordered(AT_ONCE).collect().await;
        events.iter().for_each(|event| model.apply(event));
    }

    /// Runs a reconcile in this mode, and checks that it finds no problem.
    async fn is_exact(&self, mode: &str) {
        let report = self.world.reconcile(mode).await;
        for number in ["drifted", "phantoms", "unknown", "undecided", "left", "counters_off", "buckets_loaded"] {
            assert_eq!(report[number], 0, "{number}: {report}");
        }
        assert_eq!(report["ended"], "done", "{report}");
    }

    /// Checks that MySQL and Redis are equal to the model, and that no run finds a drift.
    async fn close(self, model: &Model) {
        self.world.drained(&self.publisher).await;
        self.world.assert_rows_equal(model).await;
        self.world.outbox_added().await;
        self.nodes.assert_equal(&self.world, model).await;
        self.is_exact("--full").await;
        assert!(self.daemon.stop().success());
    }
}
