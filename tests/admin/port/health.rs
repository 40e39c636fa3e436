//! Liveness, readiness and status of the daemon while servers fail and recover.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::common::proxy::Proxy;
use super::common::size::pace;
use super::common::{World, eventually};
use super::{ANY, address, get, like};

/// Returns the status of one server.
fn server(told: &Value, name: &str) -> Value {
    let servers = told["servers"].as_array().unwrap();
    servers.iter().find(|server| server["server"] == name).cloned().unwrap_or(Value::Null)
}

#[tokio::test(flavor = "multi_thread")]
async fn ready_says_which_server_is_away_and_why() {
    let world = World::new("health_away", &format!("{ANY}[redis]\ntimeout_ms = 500\n")).await.hurried();
    let (mysql, mysql_url) = Proxy::before(world.config.mysql.url.expose()).await;
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let (rabbitmq, rabbitmq_url) = Proxy::before(world.config.amqp.url.expose()).await;
    let daemon = world.daemon_with(&[
        ("TALLYD__MYSQL__URL", mysql_url.as_str()),
        ("TALLYD__REDIS__URL", redis_url.as_str()),
        ("TALLYD__AMQP__URL", rabbitmq_url.as_str()),
    ]);
    let address = address(&daemon).await;
    eventually("the daemon is ready", || async { get(&address, "/readyz").await.status == 200 }).await;
    let told = get(&address, "/readyz").await.json();
    assert_eq!((&told["ready"], &told["state"], &told["reasons"]), (&json!(true), &json!("running"), &json!([])));
    assert!(["mysql", "redis", "rabbitmq"].iter().all(|name| server(&told, name)["up"] == true), "{told}");

    // Without Redis the daemon still writes events.
    redis.hold();
    eventually("Redis is reported as unreachable", || async {
        server(&get(&address, "/readyz").await.json(), "redis")["up"] == false
    })
    .await;
    let answer = get(&address, "/readyz").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(server(&answer.json(), "redis")["reason"].is_string(), "{}", answer.body);
    redis.release();

    for (proxy, name) in [(&mysql, "mysql"), (&rabbitmq, "rabbitmq")] {
        proxy.hold();
        proxy.cut();
        eventually("the daemon is not ready", || async { get(&address, "/readyz").await.status == 503 }).await;
        eventually("the reasons name the unreachable server", || async {
            let told = get(&address, "/readyz").await.json();
            server(&told, name)["up"] == false
                && told["reasons"].to_string().contains(&format!("{name} is unreachable: "))
        })
        .await;
        assert_eq!(get(&address, "/livez").await.json(), json!({ "live": true, "stuck": [] }));
        proxy.release();
        eventually("the daemon is ready again", || async { get(&address, "/readyz").await.status == 200 }).await;
    }

    // The connection with which the daemon checks RabbitMQ breaks, and RabbitMQ answers.
    let told = async || get(&address, "/v1/status").await.json();
    let since = server(&told().await, "rabbitmq")["since"].clone();
    rabbitmq.cut();
    let mut checked_at = told().await["now"].as_i64();
    for _ in 0..2 {
        eventually("the servers were checked", || async { told().await["observed_at"].as_i64() > checked_at }).await;
        checked_at = told().await["observed_at"].as_i64();
    }
    assert_eq!(server(&told().await, "rabbitmq")["since"], since, "RabbitMQ was reported as unreachable");
    assert!(daemon.stop().success());

    // A port that refuses connections is no silent server.
    let refused = world.daemon_with(&[("TALLYD__MYSQL__URL", "mysql://tallyd@127.0.0.1:9/tally")]);
    let address = super::address(&refused).await;
    eventually("the refused connection is the reason", || async {
        let reason = server(&get(&address, "/readyz").await.json(), "mysql")["reason"].to_string();
        reason.contains("connection refused")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_drains_is_alive_and_not_ready() {
    let world = World::new("health_drain", ANY).await.hurried();
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let mut daemon = world.daemon_with(&[("TALLYD__MYSQL__URL", url.as_str())]);
    let address = address(&daemon).await;
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    proxy.hold();
    world.publish(&publisher, &[like(42, 1)]).await;
    eventually("a message is in flight", || async {
        let told = get(&address, "/v1/status").await.json();
        told["partitions"][0]["oldest_unacked_s"].as_f64().unwrap() > 0.0
    })
    .await;
    daemon.signal("TERM");
    daemon.logged("\"stop-asked\"").await;
    eventually("it drains", || async { get(&address, "/readyz").await.json()["state"] == "draining" }).await;
    let ready = get(&address, "/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(ready.json()["reasons"].to_string().contains("the daemon is stopping"), "{}", ready.body);
    assert_eq!(get(&address, "/livez").await.status, 200);
    assert_eq!(get(&address, "/v1/status").await.json()["state"], "draining");
    proxy.release();
    let released = Instant::now();
    assert!(daemon.wait().success());
    assert!(released.elapsed() < Duration::from_secs(60), "{:?}", released.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_tells_of_partitions_jobs_boards_and_what_fails() {
    let settings = format!(
        "{ANY}[reconcile]\nwatch_every = \"1s\"\n[[board]]\nname = \"likes\"\nperiod = \"week\"\n\
         [archive]\ncron = \"0 0 0 1 1 *\"\n"
    );
    let world = World::new("status", &settings).await.hurried();
    let (proxy, url) = Proxy::before(world.config.amqp.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__AMQP__URL", url.as_str())]);
    let address = address(&daemon).await;
    let publisher = world.publisher().await;
    let garbage = (like(1, 1).0, b"{".to_vec());
    world.publish(&publisher, &[like(42, 1), like(42, 2), garbage]).await;
    let told = || async { get(&address, "/v1/status").await.json() };
    eventually("the batch is reported", || async { told().await["events_committed"] == 2 }).await;
    eventually("the partition is reported", || async {
        let partition = told().await["partitions"][0].clone();
        partition["standing"] == "writing" && partition["consumers"] == 1 && partition["owner"].is_string()
    })
    .await;
    eventually("the dead letter is reported", || async { told().await["dead_letters"]["malformed-json"] == 1 }).await;
    eventually("the board is reported", || async { told().await["boards"][0]["state"] == "open" }).await;

    // A run that a command started is reported, too.
    let report = world.reconcile("--full").await;
    assert_eq!(report["ended"], "done");
    eventually("the run is reported", || async {
        let told = told().await;
        let jobs = told["jobs"].as_array().unwrap().clone();
        let full = jobs.iter().find(|job| job["job"] == "reconcile" && job["mode"] == "full");
        let archive = jobs.iter().find(|job| job["job"] == "archive" && job["mode"] == "closed");
        full.is_some_and(|job| job["last"]["outcome"] == "done")
            && archive.is_some_and(|job| job["next_at"].is_i64())
            && told["reconciles"].as_array().unwrap().iter().any(|run| run["mode"] == "full")
    })
    .await;

    proxy.hold();
    proxy.cut();
    eventually("the failing operation is reported", || async {
        let told = told().await;
        let waits = told["waits"].as_array().unwrap();
        waits.iter().any(|wait| wait["what"] == "consuming partition 0" && wait["reason"].as_str().unwrap().len() > 5)
    })
    .await;
    proxy.release();
    eventually("the status shows no waiting operation", || async { told().await["waits"] == json!([]) }).await;
    eventually("a point of the last hour includes both events", || async {
        let points = get(&address, "/v1/history").await.json();
        let of = |point: &Value| point["events_s"].as_f64().unwrap();
        // A point usually covers ten seconds, but less in a hurried world.
        let rates = [0.05, 0.4].map(|rate| rate * f64::from(pace()));
        let has_both = |point: &Value| (rates[0]..=rates[1]).contains(&of(point)) && point["lag_p50_s"].is_f64();
        points.as_array().unwrap().iter().any(has_both)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_can_not_write_is_not_ready_though_all_servers_answer() {
    let world = World::new("health_unwritten", ANY).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    eventually("the daemon is ready", || async { get(&address, "/readyz").await.status == 200 }).await;
    let rename = |from: &str, to: &str| sqlx::query(sqlx::AssertSqlSafe(format!("RENAME TABLE {from} TO {to}")));
    rename("like_record", "gone").execute(&world.pool).await.unwrap();
    let publisher = world.publisher().await;
    world.publish(&publisher, &[like(42, 1)]).await;
    eventually("the daemon is not ready", || async {
        let answer = get(&address, "/readyz").await;
        answer.status == 503 && answer.body.contains("partition 0 is failing: writing partition 0 failed: ")
    })
    .await;
    // The queue is empty, because the daemon holds the message.
    eventually("the message is reported as waiting", || async {
        let partition = &get(&address, "/v1/status").await.json()["partitions"][0];
        (&partition["standing"], &partition["messages"], &partition["held"])
            == (&json!("failing"), &json!(0), &json!(1))
    })
    .await;
    assert!(get(&address, "/metrics").await.body.contains("tallyd_held_messages{partition=\"0\"} 1.0\n"));
    let told = get(&address, "/readyz").await.json();
    assert!(["mysql", "redis", "rabbitmq"].iter().all(|name| server(&told, name)["up"] == true), "{told}");
    rename("gone", "like_record").execute(&world.pool).await.unwrap();
    eventually("the daemon is ready again", || async { get(&address, "/readyz").await.status == 200 }).await;
    world.drained(&publisher).await;
    assert_eq!(world.counters().await[&super::target(42)], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_only_looked_hides_no_other_and_one_that_died_is_told() {
    let world = World::new("status_runs", ANY).await.hurried();
    for sql in [
        "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES (1, 42, 1, 0, '2026-11-21')",
        "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 42, 1, 0, 1, '2026-11-21')",
    ] {
        sqlx::query(sql).execute(&world.pool).await.unwrap();
    }
    // Declares the queue.
    let _publisher = world.publisher().await;
    let first = world.tallyd(&["reconcile", "--changed"]);
    assert!(first.status.success(), "{}", super::stderr(&first));
    assert_eq!(world.tallyd(&["reconcile", "--changed", "--dry-run"]).status.code(), Some(0));
    let mut dies = world.command();
    dies.args(["reconcile", "--full"]).env("TALLYD_FAULT_POINT", "reconcile:sampled");
    assert!(!dies.output().unwrap().status.success());
    // Ends its lease.
    world.end_leases().await;
    let again = world.tallyd(&["reconcile", "--changed"]);
    assert!(again.status.success(), "{}", super::stderr(&again));
    let outcomes: Vec<(String, String)> =
        sqlx::query_as("SELECT mode, outcome FROM job_run ORDER BY run").fetch_all(&world.pool).await.unwrap();
    let outcomes: Vec<(&str, &str)> =
        outcomes.iter().map(|(mode, outcome)| (mode.as_str(), outcome.as_str())).collect();
    assert_eq!(outcomes, [("changed", "done"), ("changed", "dry-run"), ("full", "failed"), ("changed", "done")]);

    let daemon = world.daemon();
    let address = address(&daemon).await;
    eventually("the runs are reported", || async {
        let told = get(&address, "/v1/status").await.json();
        let jobs = told["jobs"].as_array().unwrap().clone();
        let last = |mode: &str| jobs.iter().find(|job| job["mode"] == mode).map(|job| job["last"].clone());
        let reason = "its process ended, or could not renew its lease in MySQL; or the run panicked";
        last("changed").is_some_and(|last| last["outcome"] == "done" && last["run"] == 4)
            && last("full").is_some_and(|last| last["outcome"] == "failed" && last["reason"] == reason)
            && told["reconciles"].as_array().unwrap().iter().all(|run| run["run"] != 2)
    })
    .await;
}
