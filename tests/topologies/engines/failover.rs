//! Another server becomes the primary behind a fixed address.

use sqlx::mysql::MySqlPool;
use tallyd_core::model::{Metric, UserId};
use tallyd_mysql::Store;

use super::common::proxy::Proxy;
use super::common::{Daemon, Model, World, event_of, eventually, target};
use super::servers::{ACCOUNT, Pair, are_here, number, run, text};
use super::{stream_of_likes, take};

/// A primary and its replica behind one address. At first the address leads to the primary.
struct Stage {
    pair: Pair,
    proxy: Proxy,
    world: World,
}

impl Stage {
    /// Returns `None` if MariaDB is not installed on this machine.
    async fn new(name: &str) -> Option<Self> {
        if !are_here() {
            return None;
        }
        let pair = Pair::start().await;
        let proxy = Proxy::to(pair.primary.address()).await;
        let url = format!("mysql://{ACCOUNT}@{}/{{world}}", proxy.address);
        let settings = format!(
            "[mysql]\nurl = \"{url}\"\n[consumer]\nbatch_events_max = 200\n[reconcile]\nrepair_targets_max_percent = 100"
        );
        let world = World::on(format!("mysql://root@{}/", proxy.address), name, &settings).await;
        Some(Self { pair, proxy, world })
    }

    /// Makes the replica the new primary, and makes the address lead to it. Connections to the old primary stay open.
    async fn promote(&mut self) {
        self.pair.promote().await;
        self.proxy.lead(self.pair.replica.address());
        self.world.pool.close().await;
        self.world.pool = MySqlPool::connect(self.world.config.mysql.url.expose()).await.unwrap();
    }

    async fn replica_has_all(&self) {
        let written = text(&self.pair.primary_pool, "SELECT @@gtid_binlog_pos").await;
        eventually("the replica has all", || async {
            text(&self.pair.replica_pool, "SELECT @@gtid_slave_pos").await == written
        })
        .await;
    }

    /// Returns a status variable of the primary's semi-synchronous replication.
    async fn semi_sync(&self, name: &str) -> i64 {
        let sql = format!(
            "SELECT CAST(VARIABLE_VALUE AS SIGNED) FROM information_schema.GLOBAL_STATUS \
             WHERE VARIABLE_NAME = 'rpl_semi_sync_master_{name}'"
        );
        number(&self.pair.primary_pool, &sql).await
    }

    /// Waits until the daemon is writing batches.
    async fn at_work(&self, daemon: &Daemon) {
        daemon.logged("partition-taken").await;
        eventually("some batches are written", || async {
            self.world.count("SELECT COUNT(*) FROM like_record").await > 500
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_switchover_under_load_loses_and_doubles_nothing_and_leaves_the_old_server() {
    let Some(mut stage) = Stage::new("switchover").await else { return };
    let publisher = stage.world.publisher().await;
    let (mut likes, mut model) = (stream_of_likes(31), Model::default());
    let daemon = stage.world.daemon();
    stage.world.publish(&publisher, &take(&mut likes, 10_000, &mut model)).await;
    stage.at_work(&daemon).await;
    let newest = "SELECT CAST(MAX(run) AS SIGNED) FROM job_run";
    assert!(stage.world.tallyd(&["reconcile"]).status.success());
    let before = stage.world.count(newest).await;
    run(&stage.pair.primary_pool, "SET GLOBAL read_only = 1").await;
    stage.world.publish(&publisher, &take(&mut likes, 500, &mut model)).await;
    daemon.logged("read-only").await;
    stage.replica_has_all().await;
    // The pool has two connections to the old server. The test uses only one of the two connections for a query, so
    // only this connection notices the failover.
    let store = Store::new(&stage.world.config.mysql, 2).unwrap();
    drop((store.acquire().await.unwrap(), store.acquire().await.unwrap()));
    stage.promote().await;
    assert_eq!(store.take_job("archive", "all", "test").await.unwrap_err().number(), Some(1290));
    let (one, two) = (store.acquire().await.unwrap(), store.acquire().await.unwrap());
    drop((one, two));
    for _ in 0..4 {
        assert!(store.clock().await.unwrap().1, "the pool gave out a connection to the old server");
    }
    stage.world.publish(&publisher, &take(&mut likes, 2_000, &mut model)).await;
    stage.world.drained(&publisher).await;
    stage.world.assert_equals(&model).await;
    let after = stage.world.report(&["reconcile"]);
    assert_eq!(after["ended"], "done", "{after}");
    assert!(stage.world.count(newest).await > before);
    let there = format!("SELECT COUNT(*) FROM information_schema.processlist WHERE user = '{ACCOUNT}'");
    eventually("no connection uses the old server", || async { number(&stage.pair.primary_pool, &there).await == 0 })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_only_says_that_it_is_read_only_is_left() {
    let Some(mut stage) = Stage::new("only_says").await else { return };
    let store = Store::new(&stage.world.config.mysql, 1).unwrap();
    run(&stage.pair.primary_pool, "SET GLOBAL read_only = 1").await;
    assert!(!store.clock().await.unwrap().1, "the server must report that it is read-only");
    stage.promote().await;
    assert!(store.clock().await.unwrap().1, "the pool still uses its connection to the old server");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_dies_under_load_has_lost_nothing_where_replication_is_semi_synchronous() {
    let Some(mut stage) = Stage::new("semi_sync").await else { return };
    let settings = "SET GLOBAL rpl_semi_sync_master_wait_point = 'AFTER_SYNC'; SET GLOBAL rpl_semi_sync_master_timeout = 600000; \
                    SET GLOBAL rpl_semi_sync_master_enabled = ON";
    run(&stage.pair.primary_pool, settings).await;
    run(&stage.pair.replica_pool, "STOP SLAVE IO_THREAD; START SLAVE IO_THREAD").await;
    eventually("commits wait for the replica", || async { stage.semi_sync("clients").await == 1 }).await;
    let publisher = stage.world.publisher().await;
    let (mut likes, mut model) = (stream_of_likes(32), Model::default());
    let daemon = stage.world.daemon();
    stage.world.publish(&publisher, &take(&mut likes, 10_000, &mut model)).await;
    stage.at_work(&daemon).await;
    // The replica stops reading, so only the primary gets the next writes before it crashes. With asynchronous
    // replication these writes would be lost.
    run(&stage.pair.replica_pool, "STOP SLAVE IO_THREAD").await;
    stage.world.publish(&publisher, &take(&mut likes, 2_000, &mut model)).await;
    eventually("a batch waits for the replica", || async { stage.semi_sync("wait_sessions").await > 0 }).await;
    let written = text(&stage.pair.primary_pool, "SELECT @@gtid_binlog_pos").await;
    assert_ne!(
        text(&stage.pair.replica_pool, "SELECT @@gtid_slave_pos").await,
        written,
        "the replica must lack the batch"
    );
    stage.pair.primary.kill();
    stage.world.publish(&publisher, &take(&mut likes, 500, &mut model)).await;
    stage.promote().await;
    stage.world.drained(&publisher).await;
    stage.world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_failover_has_lost_is_lost_in_redis_too_with_the_next_reconcile() {
    let Some(mut stage) = Stage::new("lossy").await else { return };
    let client = stage.world.api_server();
    let publisher = stage.world.publisher().await;
    assert!(stage.world.tallyd(&["reconcile"]).status.success());
    let (_daemon, mut kept) = (stage.world.daemon(), Model::default());
    for user in 1..=20 {
        let clicked = client.like(target(1 + user % 3), UserId(user), &[]).await.unwrap();
        kept.apply(&event_of(clicked));
    }
    stage.world.drained(&publisher).await;
    stage.replica_has_all().await;
    // The next commits are only on the primary. When the primary fails, the daemon has already acknowledged the events
    // of these commits.
    run(&stage.pair.replica_pool, "STOP SLAVE").await;
    for user in 21..=25 {
        client.like(target(1), UserId(user), &[]).await.unwrap();
    }
    stage.world.drained(&publisher).await;
    stage.world.outbox_added().await;
    stage.pair.primary.kill();
    run(&stage.pair.replica_pool, "SET GLOBAL read_only = 0").await;
    stage.proxy.lead(stage.pair.replica.address());
    stage.world.pool = MySqlPool::connect(stage.world.config.mysql.url.expose()).await.unwrap();
    let later = client.like(target(1), UserId(26), &[]).await.unwrap();
    kept.apply(&event_of(later));
    stage.world.drained(&publisher).await;
    stage.world.assert_rows_equal(&kept).await;
    stage.world.outbox_added().await;
    let report = stage.world.report(&["reconcile"]);
    assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &1.into()), "{report}");
    stage.world.assert_redis_equals(&kept).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_and_counters_are_not_read_from_a_read_only_server() {
    let Some(stage) = Stage::new("reads_split").await else { return };
    let store = Store::new(&stage.world.config.mysql, 2).unwrap();
    assert!(store.fences("reconcile").await.is_ok());
    assert!(store.truths(&[(target(1), Metric(1))], None, None).await.is_ok());
    run(&stage.pair.primary_pool, "SET GLOBAL read_only = 1").await;
    // The server is read-only now, like a replica to which a proxy sends reads.
    let fences = store.fences("reconcile").await;
    assert!(fences.is_err_and(|error| error.is_of_no_primary()));
    let truths = store.truths(&[(target(1), Metric(1))], None, None).await;
    assert!(truths.is_err_and(|error| error.is_of_no_primary()));
    run(&stage.pair.primary_pool, "SET GLOBAL read_only = 0").await;
}
