//! What many tests begin and end with: likes, waits until all published events are in MySQL and in Redis, and comparisons.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tallyd_core::event::encode_fence;
use tallyd_core::model::UserId;
use tallyd_mysql::jobs::number_of;
use tallyd_rabbitmq::Publisher;

use super::{Daemon, Model, STARTED, World, event_of, eventually, target};

/// The number of a run that no job reaches.
const RUN_OF_TESTS: u64 = 1 << 30;

impl World {
    /// Waits until the daemon has written all messages that were published before. To detect this, the test publishes
    /// a fence to the queue of each partition. A new fence is written after all earlier messages. The broker's
    /// queue depths can't be used, because they are seconds old.
    pub async fn drained(&self, publisher: &Publisher) {
        const LOCK: &str =
            "INSERT IGNORE INTO job_lock (job, run, owner, lease_until) VALUES ('test', ?, '', '1970-01-02')";
        let next = || number_of(RUN_OF_TESTS, u64::from(STARTED.fetch_add(1, Ordering::Relaxed)));
        let last = AtomicU64::new(0);
        sqlx::query(LOCK).bind(RUN_OF_TESTS).execute(&self.pool).await.unwrap();
        let sent_in = AtomicI64::new(-1);
        eventually("all is written", || async {
            // A daemon ignores a fence that a former session has returned. Each fence has a number of its own: when the last
            // one is committed, none is left in a queue.
            let epochs = self.count("SELECT CAST(COALESCE(SUM(epoch), 0) AS SIGNED) FROM partition_owner").await;
            if sent_in.swap(epochs, Ordering::Relaxed) != epochs {
                let fence = next();
                last.store(fence, Ordering::Relaxed);
                for partition in 0..self.broker.partitions() {
                    publisher.publish_behind(&self.broker.queue(partition), &encode_fence(fence)).await.unwrap();
                }
            }
            let sql = "SELECT COUNT(*) FROM partition_fence WHERE job = 'test' AND fence >= ?";
            let passed: i64 =
                sqlx::query_scalar(sql).bind(last.load(Ordering::Relaxed)).fetch_one(&self.pool).await.unwrap();
            passed == i64::from(self.broker.partitions())
        })
        .await;
    }

    /// Waits until all published events are in MySQL and in Redis.
    pub async fn counted(&self, publisher: &Publisher) {
        self.drained(publisher).await;
        self.outbox_added().await;
    }

    /// Publishes these bodies, and waits until the daemon has written them.
    pub async fn consumed(&self, publisher: &Publisher, bodies: &[(UserId, Vec<u8>)]) {
        self.publish(publisher, bodies).await;
        self.drained(publisher).await;
    }

    /// Waits until all published events are written, compares MySQL and Redis with the model, and stops the daemon.
    pub async fn ends_as(&self, model: &Model, publisher: &Publisher, daemon: Daemon) {
        self.drained(publisher).await;
        self.assert_equals(model).await;
        assert!(daemon.stop().success());
    }

    /// Compares Redis with the model, and stops the daemon.
    pub async fn redis_ends_as(&self, model: &Model, daemon: Daemon) {
        self.assert_redis_equals(model).await;
        assert!(daemon.stop().success());
    }

    /// Starts a daemon, and waits until Redis has all counters. Then this many users like each of this many targets, and
    /// MySQL and Redis have these likes.
    pub async fn liked(&self, targets: u64, users: u64) -> (Daemon, Model) {
        let publisher = self.publisher().await;
        let client = self.api_server();
        let daemon = self.daemon();
        assert!(self.tallyd(&["reconcile"]).status.success());
        let mut model = Model::default();
        for id in 1..=targets {
            for user in 1..=users {
                model.apply(&event_of(client.like(target(id), UserId(user), &[]).await.unwrap()));
            }
        }
        self.drained(&publisher).await;
        self.assert_equals(&model).await;
        (daemon, model)
    }

    /// Waits until Redis has all rows that the outbox has at the start of this call, according to MySQL.
    pub async fn outbox_added(&self) {
        let last = async |sql: &'static str| -> BTreeMap<u16, i64> {
            let rows: Vec<(u16, i64)> = sqlx::query_as(sql).fetch_all(&self.pool).await.unwrap();
            rows.into_iter().collect()
        };
        let written = last("SELECT `partition`, CAST(outbox AS SIGNED) FROM partition_owner WHERE outbox > 0").await;
        eventually("Redis has all rows of the outbox", || async {
            let added = last("SELECT `partition`, CAST(applied AS SIGNED) FROM outbox_state").await;
            written.iter().all(|(partition, row)| added.get(partition).is_some_and(|added| added >= row))
        })
        .await;
    }
}
