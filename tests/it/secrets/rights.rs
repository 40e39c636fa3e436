//! Tests that the accounts from the files under ops/ have no unnecessary rights. Almost all other tests
//! use the same accounts, and so show that the accounts have enough rights.

use lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use sqlx::mysql::{MySqlDatabaseError, MySqlPool};
use sqlx::{AssertSqlSafe, Executor};
use tallyd_base::config::{Amqp, ServerUrl};
use tallyd_connect::fate::Fate;
use tallyd_rabbitmq::{Broker, BrokerError, Link};

use crate::common::World;

/// The codes of MySQL's errors for missing rights: for a database, for a login or a file, for a table, and for commands
/// of administrators.
const DENIED: [u16; 4] = [1044, 1045, 1142, 1227];

async fn is_denied(pool: &MySqlPool, sql: &str) {
    let error = pool.execute(AssertSqlSafe(sql.to_owned())).await.expect_err(sql);
    let number = error.as_database_error().map(|error| error.downcast_ref::<MySqlDatabaseError>().number());
    assert!(number.is_some_and(|number| DENIED.contains(&number)), "{sql}: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_mysql_the_daemon_changes_no_table_and_an_api_server_no_row() {
    let world = World::new("rights_mysql", "").await;
    let accounts = world.accounts.as_ref().unwrap();
    let url = world.config.mysql.url.expose();
    let daemon = MySqlPool::connect(&accounts.of_daemon(url)).await.unwrap();
    for sql in [
        "DROP TABLE like_record",
        "TRUNCATE TABLE counter",
        "ALTER TABLE counter ADD COLUMN x INT",
        "CREATE TABLE another (x INT)",
        "CREATE INDEX x ON counter (value)",
        "CREATE TRIGGER x BEFORE INSERT ON counter FOR EACH ROW SET NEW.value = 0",
        "SELECT 1 FROM mysql.user",
        "CREATE DATABASE another",
        "CREATE USER another",
        "GRANT ALL ON *.* TO CURRENT_USER()",
        "SELECT * FROM like_record INTO OUTFILE '/var/tmp/of-a-test'",
        "SET GLOBAL read_only = 1",
    ] {
        is_denied(&daemon, sql).await;
    }
    let api = MySqlPool::connect(&accounts.of_api(url)).await.unwrap();
    assert_eq!(api.execute("SELECT * FROM like_record").await.unwrap().rows_affected(), 0);
    for sql in [
        "INSERT INTO like_record SELECT * FROM like_record",
        "UPDATE counter SET value = 0",
        "DELETE FROM counter",
        "DROP TABLE counter",
        "CREATE TABLE another (x INT)",
    ] {
        is_denied(&api, sql).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_redis_nobody_does_what_administrators_do_or_reads_the_keys_of_others() {
    let world = World::new("rights_redis", "").await;
    let accounts = world.accounts.as_ref().unwrap();
    let url = world.config.redis.url.expose();
    let (own, others) = (format!("{}:c:video:0", world.name), "t_others:c:video:0".to_owned());
    for url in [accounts.of_daemon(url), accounts.of_api(url)] {
        let client = redis::Client::open(url).unwrap();
        let mut redis = client.get_multiplexed_async_connection().await.unwrap();
        let _: Option<String> = redis::cmd("HGET").arg(&own).arg("1").query_async(&mut redis).await.unwrap();
        for words in [
            vec!["FLUSHALL"],
            vec!["FLUSHDB"],
            vec!["CONFIG", "GET", "*"],
            vec!["CONFIG", "SET", "maxmemory", "1"],
            vec!["SHUTDOWN", "NOSAVE"],
            vec!["DEBUG", "SLEEP", "0"],
            vec!["REPLICAOF", "NO", "ONE"],
            vec!["ACL", "SETUSER", "another", "on", "nopass", "+@all"],
            vec!["SCRIPT", "FLUSH"],
            vec!["FUNCTION", "FLUSH"],
            vec!["MODULE", "LIST"],
            vec!["KEYS", "*"],
            vec!["CLIENT", "KILL", "TYPE", "normal"],
            vec!["MONITOR"],
            vec!["DEL", &own],
            vec!["MIGRATE", "127.0.0.1", "1", &own, "0", "1"],
            vec!["HGET", &others, "1"],
            vec!["EVAL", "return redis.call('HGET', KEYS[1], '1')", "1", &others],
            vec!["EVAL", "return redis.call('FLUSHALL')", "0"],
        ] {
            let mut command = redis::cmd(words[0]);
            command.arg(&words[1..]);
            let error = command.exec_async(&mut redis).await.expect_err(words[0]).to_string();
            // If a script runs the command, Redis returns the error of the script, which has another text.
            assert!(error.contains("permission") || error.contains("can't run this command"), "{words:?}: {error}");
        }
    }
}

async fn linked(url: String) -> Link {
    let broker = Broker::new(&Amqp { url: ServerUrl::from(url.as_str()), ..Amqp::default() }).unwrap();
    broker.connect("test").await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn on_the_broker_an_api_server_publishes_events_alone_and_the_daemon_keeps_to_its_names() {
    let world = World::new("rights_rabbitmq", "").await;
    drop(world.publisher().await);
    let accounts = world.accounts.as_ref().unwrap();
    let url = world.config.amqp.url.expose();
    let (queue, exchange) = (world.broker.queue(0), world.broker.exchange());
    let declared = async |url: String, name: &str| {
        let link = linked(url).await;
        let declare = link.channel.queue_declare(name.into(), QueueDeclareOptions::durable(), FieldTable::default());
        link.call("declare", declare).await.map(drop)
    };
    let denied =
        |result: Result<(), BrokerError>| assert_eq!(result.expect_err("it was accepted").fate(), Fate::Refused);
    denied(declared(accounts.of_api(url), &format!("{}.events.9", world.name)).await);
    denied(declared(accounts.of_daemon(url), "of-somebody-else").await);
    let link = linked(accounts.of_api(url)).await;
    let consume = link.channel.basic_consume(
        queue.as_str().into(),
        "".into(),
        BasicConsumeOptions::default(),
        FieldTable::default(),
    );
    denied(link.call("consume", consume).await.map(drop));
    let api = Amqp { url: ServerUrl::from(accounts.of_api(url).as_str()), ..world.config.amqp.clone() };
    let api = Broker::new(&api).unwrap();
    let publisher = api.connect_publisher("test").await.unwrap();
    publisher.publish(&exchange, "1", b"{}").await.unwrap();
    // An API server's account can't publish directly to a queue. Only the daemon does this, for fence messages.
    assert!(publisher.publish("", &queue, b"{}").await.is_err());
}
