//! Deletes what a world has made on the servers of dev/up when the world goes out of scope.

use sqlx::{AssertSqlSafe, MySqlPool};
use tallyd_base::config::Amqp;
use tallyd_rabbitmq::Broker;

use super::accounts::Accounts;
use super::{DEADLINE, patient, stack};

pub(super) struct Leftovers {
    pub world: String,
    pub amqp: Amqp,
    /// `None` if the world's MySQL belongs to the test, and ends with it.
    pub mysql: Option<(String, Accounts)>,
}

impl Drop for Leftovers {
    /// After a failure, everything stays: the data help to find the cause. The next dev/test removes them.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let delete = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(self.delete());
        };
        // A thread of a runtime can't wait for another runtime.
        let deleted = std::thread::scope(|scope| scope.spawn(delete).join());
        deleted.expect("the test's leftovers could not be deleted");
    }
}

impl Leftovers {
    async fn delete(&self) {
        let Self { world, amqp, mysql } = self;
        let url = stack("AMQP_URL").as_str().into();
        let timeout_ms = DEADLINE.as_millis() as u64;
        let broker = Broker::new(&Amqp { url, seeds: Vec::new(), timeout_ms, ..amqp.clone() }).unwrap();
        let link = broker.connect("test").await.unwrap();
        let of_partitions = (0..broker.partitions()).map(|partition| broker.queue(partition));
        for queue in of_partitions.chain([format!("{world}.returned")]) {
            let _ = link.channel.queue_delete(queue.into(), Default::default()).await;
        }
        for exchange in ["events", "partitions"] {
            let _ = link.channel.exchange_delete(format!("{world}.{exchange}").into(), Default::default()).await;
        }
        if let Some((admin_url, accounts)) = mysql {
            let admin = MySqlPool::connect(&format!("{admin_url}mysql")).await.unwrap();
            sqlx::query(AssertSqlSafe(format!("DROP DATABASE {world}"))).execute(&admin).await.unwrap();
            accounts.drop(&admin).await;
        }
        let mut redis = patient(&stack("REDIS_URL")).await;
        let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{world}:*")).query_async(&mut redis).await.unwrap();
        for keys in keys.chunks(1_000) {
            let _: i64 = redis::cmd("UNLINK").arg(keys).query_async(&mut redis).await.unwrap();
        }
    }
}
