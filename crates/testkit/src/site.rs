//! Runs users who click all the time, and compares MySQL and Redis with the expected state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::task::JoinSet;

use super::clicker::Clicker;
use super::{ApiServer, Daemon, Model, World, eventually};

/// The number of clickers that click at the same time. Each clicker clicks on a few popular targets and on many other
/// targets.
const CLICKERS: u64 = 8;
const HOT: u64 = 2;
const COLD: u64 = 300;

/// A site whose users like and unlike through an API server until the test stops the site. A click that can't be published
/// ends the test.
pub struct Site {
    stop: Arc<AtomicBool>,
    clicks: Arc<AtomicU64>,
    users: JoinSet<Model>,
}

impl Site {
    pub fn open(world: &World) -> Self {
        let each = Clicker { number: 0, users: 10, hot: HOT, cold: COLD };
        Self::of(&Arc::new(world.api_server()), CLICKERS, each)
    }

    pub fn of(server: &Arc<ApiServer>, clickers: u64, each: Clicker) -> Self {
        let mut site = Self { stop: Arc::default(), clicks: Arc::default(), users: JoinSet::new() };
        for number in 0..clickers {
            let (server, stop, clicks) = (Arc::clone(server), Arc::clone(&site.stop), Arc::clone(&site.clicks));
            site.users.spawn(Clicker { number, ..each }.click(server, stop, clicks));
        }
        site
    }

    pub async fn clicked(&self, more: u64) {
        let until = self.clicks.load(Ordering::Relaxed) + more;
        eventually("users click", || async { self.clicks.load(Ordering::Relaxed) >= until }).await;
    }

    pub async fn close(mut self) -> Model {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Model::default();
        while let Some(model) = self.users.join_next().await {
            all.rows.extend(model.unwrap().rows);
        }
        all
    }

    /// Stops the users. Fails unless MySQL and Redis have all clicks, and a last reconcile finds nothing to repair.
    /// Returns the model.
    pub async fn end(self, world: &World) -> Model {
        let model = self.close().await;
        world.drained(&world.broker.connect_publisher("test").await.unwrap()).await;
        world.assert_equals(&model).await;
        reconciled(world, &[]).await;
        model
    }
}

/// Runs a full reconcile, which must find and repair these drifts (counters that are wrong in Redis). The call retries
/// while a daemon's reconcile is running, and while daemons take over partitions.
pub async fn reconciled(world: &World, drifts: &[i64]) {
    let ended = || async {
        let output = world.tallyd(&["reconcile", "--full", "--format", "json"]);
        let report: serde_json::Value = match output.status.code() {
            Some(75) => return false,
            Some(0) => serde_json::from_slice(&output.stdout).unwrap(),
            code => panic!("{code:?}: {}", super::stderr(&output)),
        };
        let sum: i64 = drifts.iter().map(|drift| drift.abs()).sum();
        for (name, number) in [("drifted", drifts.len() as i64), ("drift_sum", sum), ("left", 0), ("counters_off", 0)] {
            assert_eq!(report[name], number, "{name} in {report}");
        }
        true
    };
    eventually("a reconcile ends", ended).await;
}

pub async fn owners(world: &World) -> BTreeMap<u16, String> {
    let rows: Vec<(u16, Option<String>)> =
        sqlx::query_as("SELECT `partition`, owner FROM partition_owner WHERE `partition` < 256")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    rows.into_iter().filter_map(|(partition, owner)| Some((partition, owner?))).collect()
}

pub async fn taken_from(world: &World, gone: &Daemon) {
    let (pid, all) = (format!(":{}", gone.child.id()), usize::from(world.broker.partitions()));
    eventually("other daemons hold all partitions", || async {
        let owners = owners(world).await;
        owners.len() == all && owners.values().all(|owner| !owner.ends_with(&pid))
    })
    .await;
}

pub async fn has_all(world: &World, daemon: &Daemon) {
    let (pid, all) = (format!(":{}", daemon.child.id()), usize::from(world.broker.partitions()));
    eventually("the daemon holds all partitions", || async {
        let owners = owners(world).await;
        owners.len() == all && owners.values().all(|owner| owner.ends_with(&pid))
    })
    .await;
}

pub async fn all_held(world: &World) {
    let all = usize::from(world.broker.partitions());
    eventually("all partitions are held", || async { owners(world).await.len() == all }).await;
}
