//! Tests the daemon with quorum queues, on a RabbitMQ cluster of three nodes that the test starts. Some nodes fail.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod cluster;
mod load;

use std::process::Output;
use std::time::Instant;

use crate::common;
use cluster::{Cluster, End, NODES};
use common::{Daemon, World, eventually, stderr};
use load::{Load, TARGETS};

const SETTINGS: &str = "partitions = 2\n[consumer]\nbatch_events_max = 500\n[metrics]\nlike = 1\nview = 2\n\
    [reconcile]\nrepair_targets_max_percent = 100\n";

/// The nodes, a test environment on these nodes, a daemon, and a continuous load.
struct Stage {
    load: Load,
    daemon: Daemon,
    world: World,
    cluster: Cluster,
    began: Instant,
}

impl Stage {
    async fn new(name: &str) -> Self {
        let began = Instant::now();
        let cluster = Cluster::start().await;
        let world = World::new(name, &cluster.settings(SETTINGS)).await;
        drop(world.publisher().await);
        assert!(world.tallyd(&["reconcile"]).status.success());
        let daemon = world.daemon();
        let load = Load::start(&world);
        let stage = Self { load, daemon, world, cluster, began };
        stage.goes_on("the start").await;
        stage
    }

    /// Waits until new likes and counts are published, and until MySQL has new counts from each partition. Prints how
    /// long this took.
    async fn goes_on(&self, after: &str) {
        let began = Instant::now();
        let (clicks, counted) = self.load.published();
        eventually("likes and counts are published", || async {
            let (more_clicks, more_counted) = self.load.published();
            more_clicks > clicks + TARGETS && more_counted > counted + 50
        })
        .await;
        let published = began.elapsed();
        // All count events of the load change the same counter. This counter has a row for each partition.
        let written = async || -> Vec<i64> {
            let sql = "SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 2 GROUP BY slot ORDER BY slot";
            sqlx::query_scalar(sql).fetch_all(&self.world.pool).await.unwrap()
        };
        let before = written().await;
        eventually("each partition is written", || async {
            let now = written().await;
            now.len() == 2 && (before.len() < 2 || now.iter().zip(&before).all(|(now, before)| now > before))
        })
        .await;
        eprintln!(
            "{:>5.1} s: after {after}, publishing took {:.1} s and writing took {:.1} s",
            self.began.elapsed().as_secs_f32(),
            published.as_secs_f32(),
            began.elapsed().as_secs_f32()
        );
    }

    /// Checks that MySQL and Redis have each published event exactly once, and no other events.
    async fn close(self) {
        let (model, counted, again) = self.load.stop().await;
        let (world, daemon) = (self.world, self.daemon);
        let publisher = world.broker.connect_publisher("test").await.unwrap();
        world.drained(&publisher).await;
        world.assert_equals(&model).await;
        let views = world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 2").await;
        assert_eq!(views, counted, "views");
        assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
        let report = world.report(&["reconcile", "--full"]);
        assert_eq!((&report["ended"], &report["drifted"]), (&"done".into(), &0.into()), "{report}");
        // In some runs no click fails because of a fault, so the test checks the daemon's log for faults.
        let log = daemon.log();
        assert!(log.contains("consuming partition 0 works again after"), "{log}");
        eprintln!(
            "{:>5.1} s: {} likes, {counted} views, {again} clicks again",
            self.began.elapsed().as_secs_f32(),
            model.rows.len()
        );
        assert!(daemon.stop().success());
        drop(self.cluster);
    }
}

/// Runs a full reconcile of numbers that API servers count. The run knows only this node.
fn reconcile_through(stage: &Stage, place: usize) -> Output {
    // Only this command takes likes for numbers of API servers: a run of the default mode waits for no fence.
    let by_api = "[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n";
    stage.world.write(&stage.cluster.settings(&format!("{SETTINGS}{by_api}")));
    let mut run = stage.world.command();
    run.args(["reconcile", "--full"]).env("TALLYD__AMQP__SEEDS", "[]");
    let ran = run.env("TALLYD__AMQP__URL", stage.cluster.url(place)).output().unwrap();
    stage.world.write(&stage.cluster.settings(SETTINGS));
    ran
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_die_freeze_are_cut_off_or_restart_lose_nothing_and_double_nothing() {
    let mut stage = Stage::new("brokers").await;
    stage.cluster.lead(1, &stage.world).await;
    stage.goes_on("leaders moved").await;
    stage.cluster.stop(1, End::Killed);
    stage.goes_on("the leader crashed").await;
    stage.cluster.start_again(1).await;

    stage.cluster.lead(0, &stage.world).await;
    stage.cluster.cut_off(0);
    stage.cluster.is_alone(0).await;
    stage.goes_on("the leader was cut off").await;
    // The run's fence messages go through the nodes that remain.
    let report = stage.world.report(&["reconcile"]);
    assert_eq!(report["ended"], "done", "{report}");
    stage.cluster.reconnect(0);
    stage.cluster.is_ready(0).await;
    stage.goes_on("it returned").await;

    stage.cluster.lead(2, &stage.world).await;
    stage.cluster.signal(2, "STOP");
    stage.goes_on("the leader froze").await;
    stage.cluster.signal(2, "CONT");
    stage.goes_on("it resumed").await;

    stage.cluster.lead(1, &stage.world).await;
    stage.cluster.ignores_partitions(0);
    stage.cluster.cut_off(0);
    // This node says that the queues have no messages and no consumers.
    let run = reconcile_through(&stage, 0);
    assert_eq!(run.status.code(), Some(75), "{}", stderr(&run));
    assert!(stderr(&run).contains("fence"), "{}", stderr(&run));
    stage.goes_on("a node was cut off, and its clients were not").await;
    stage.cluster.stop(0, End::Killed);
    stage.cluster.start_again(0).await;
    stage.goes_on("it returned").await;

    // The test first stops the node that was frozen. This node runs again, but the other nodes can have excluded it
    // from the cluster.
    for place in (0..NODES).rev() {
        stage.cluster.stop(place, End::InOrder);
        stage.goes_on("a node stopped cleanly").await;
        stage.cluster.start_again(place).await;
        stage.cluster.awaits_quorum(place).await;
    }
    stage.close().await;
}
