//! Tests the admin port: the port shows a target's counters, rejects clients without access, and answers while servers
//! are unreachable.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod health;
mod metrics;
mod page;
mod page_rules;
mod socket;
mod watchdog;
mod who;

use std::time::{Duration, Instant};

use crate::common;
use common::proxy::Proxy;
use common::{Daemon, World, body, eventually, stderr, stdout, target};
use serde_json::{Value, json};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// With these settings the daemon uses any free port. The daemon's log contains the port.
const ANY: &str = "[admin]\nlisten = \"127.0.0.1:0\"\nhosts = [\"tallyd.example.com\"]\n";

/// Returns the address of the daemon's admin port.
async fn address(daemon: &Daemon) -> String {
    daemon.logged("\"admin-listening\"").await;
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"admin-listening\"")).unwrap();
    serde_json::from_str::<Value>(line).unwrap()["address"].as_str().unwrap().to_owned()
}

/// An HTTP answer: its status, its head and its body.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    fn error(&self) -> String {
        self.json()["error"].as_str().unwrap().to_owned()
    }
}

/// Sends the request and reads the whole answer.
async fn send(address: &str, request: &str) -> Answer {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_lowercase(), body: body.to_owned() }
}

async fn get(address: &str, path: &str) -> Answer {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n")).await
}

fn like(id: u64, user: u64) -> (UserId, Vec<u8>) {
    body(&LikeEvent { target: target(id), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_targets_numbers_are_those_that_show_prints() {
    let world = World::new("admin_counters", &format!("{ANY}[reconcile]\nwatch_every = \"1s\"\n")).await;
    let daemon = world.daemon();
    let address = address(&daemon).await;
    daemon.logged("redis-loaded").await;
    let publisher = world.publisher().await;
    world.publish(&publisher, &[like(42, 1), like(42, 2)]).await;
    world.drained(&publisher).await;
    world.outbox_added().await;
    let answer = get(&address, "/v1/counters/video/42").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.head.contains("content-type: application/json") && !answer.head.contains("access-control"));
    assert_eq!(answer.json(), world.report(&["show", "video:42"]));
    let likes = json!({ "metric": "like", "redis": 2, "counter": 2, "rows": 2 });
    assert_eq!(answer.json(), json!({ "target": "video:42", "numbers": [likes] }));

    // A reload adds a metric and a kind.
    world.write(&format!("{ANY}[kinds]\nvideo = 1\npost = 2\n[metrics]\nlike = 1\nview = 2\n"));
    assert_eq!(get(&address, "/v1/counters/post/42").await.status, 404);
    daemon.signal("HUP");
    daemon.logged("\"reloaded\"").await;
    let posts = get(&address, "/v1/counters/post/42").await.json();
    assert_eq!((&posts["target"], &posts["numbers"][1]["metric"]), (&json!("post:42"), &json!("view")));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_answered_is_refused_with_its_reason() {
    let world = World::new("admin_refused", ANY).await;
    let daemon = world.daemon();
    let address = address(&daemon).await;
    for (path, status, reason) in [
        ("/v1/counters/viedo/42", 404, "unknown kind: use one of video"),
        ("/v1/counters/video/0", 400, "the id must be a number from 1 to 9223372036854775807"),
        ("/v1/counters/video/9223372036854775808", 400, "the id must be a number"),
        ("/v1/counters/video/x%20y", 400, "the id must be a number"),
        ("/v1/counters/video", 404, "unknown path"),
        ("/v1", 404, "unknown path"),
    ] {
        let answer = get(&address, path).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
        assert!(answer.error().contains(reason), "{path}: {}", answer.body);
    }
    let posted =
        send(&address, "POST /v1/counters/video/42 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!((posted.status, posted.error().as_str()), (405, "only GET is supported"));
    for (host, status) in [
        ("Host: localhost\r\n", 200),
        ("Host: tallyd.example.com:80\r\n", 200),
        ("Host: evil.example\r\n", 403),
        ("Host: 127.0.0.1.evil.example:80\r\n", 403),
    ] {
        let answer = send(&address, &format!("GET /v1/counters/video/42 HTTP/1.1\r\n{host}\r\n")).await;
        assert_eq!(answer.status, status, "{host}: {}", answer.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_are_away_are_told_in_time_and_slow_nothing_else() {
    let world = World::new("admin_away", &format!("{ANY}[redis]\ntimeout_ms = 500\n")).await;
    let (mysql, mysql_url) = Proxy::before(world.config.mysql.url.expose()).await;
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let proxies = [("TALLYD__MYSQL__URL", mysql_url.as_str()), ("TALLYD__REDIS__URL", redis_url.as_str())];
    let daemon = world.daemon_with(&proxies);
    let address = address(&daemon).await;
    daemon.logged("\"consuming\"").await;
    let path = "/v1/counters/video/42";
    assert_eq!(get(&address, path).await.status, 200);

    redis.hold();
    let answer = get(&address, path).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(answer.error().starts_with("Redis: "), "{}", answer.body);
    redis.release();
    redis.cut();
    eventually("Redis answers again", || async { get(&address, path).await.status == 200 }).await;

    mysql.hold();
    let asked = Instant::now();
    let answers = futures_util::future::join_all((0..40).map(|_| get(&address, path))).await;
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    assert!(answers.iter().all(|answer| answer.status == 503 && answer.head.contains("retry-after: 1")));
    let many = answers.iter().filter(|answer| answer.error() == "too many requests in flight: retry").count();
    let late = answers.iter().filter(|answer| answer.error().contains("did not answer within 5 s")).count();
    assert!(many + late == 40 && (1..=24).contains(&many), "{many} rejected, {late} timed out");
    mysql.release();
    mysql.cut();
    let publisher = world.publisher().await;
    world.publish(&publisher, &[like(42, 1)]).await;
    eventually("the like is reported", || async {
        let answer = get(&address, path).await;
        answer.status == 200 && answer.json()["numbers"][0]["counter"] == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_port_is_there_while_mysql_is_awaited() {
    let world = World::new("admin_start", &format!("{ANY}[mysql]\nconnect_timeout_ms = 500\n")).await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    proxy.hold();
    let daemon = world.daemon_with(&[("TALLYD__MYSQL__URL", url.as_str())]);
    let address = address(&daemon).await;
    daemon.logged("\"mysql-away\"").await;
    let answer = get(&address, "/v1/counters/video/42").await;
    assert_eq!(answer.status, 503);
    assert!(answer.error().starts_with("MySQL: connect to MySQL"), "{}", answer.body);
    proxy.release();
    daemon.logged("\"started\"").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stop_waits_for_answers_and_not_for_those_who_ask_nothing() {
    let world = World::new("admin_stop", ANY).await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let mut daemon = world.daemon_with(&[("TALLYD__MYSQL__URL", url.as_str())]);
    let address = address(&daemon).await;
    daemon.logged("\"started\"").await;
    let silent = TcpStream::connect(&address).await.unwrap();
    // This request is still incomplete.
    let mut slow = TcpStream::connect(&address).await.unwrap();
    slow.write_all(b"GET /v1/counters/video/42 HTTP/1.1\r\nHost: ").await.unwrap();
    proxy.hold();
    let mut asked = tokio::task::JoinSet::new();
    for _ in 0..17 {
        let address = address.clone();
        asked.spawn(async move { get(&address, "/v1/counters/video/42").await });
    }
    // Sixteen requests are in flight, which is the limit. So the daemon rejects the seventeenth request.
    assert_eq!(asked.join_next().await.unwrap().unwrap().error(), "too many requests in flight: retry");
    daemon.signal("TERM");
    daemon.logged("\"stop-asked\"").await;
    proxy.release();
    for answer in asked.join_all().await {
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let stopping = Instant::now();
    assert!(daemon.wait().success());
    assert!(stopping.elapsed() < Duration::from_secs(20), "{:?}", stopping.elapsed());
    assert!(TcpStream::connect(&address).await.is_err());
    drop((silent, slow));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_go_on_while_another_program_has_the_port() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap();
    let world = World::new("admin_taken", &format!("[admin]\nlisten = \"{port}\"\n")).await;
    let daemon = world.daemon();
    let said = format!("[admin] listen = \\\"{port}\\\": Address already in use");
    daemon.logged(&said).await;
    let checked = world.tallyd(&["config", "check"]);
    assert!(checked.status.success(), "{}", stderr(&checked));
    assert!(stdout(&checked).contains("warning  admin-port"), "{}", stdout(&checked));
    let publisher = world.publisher().await;
    world.publish(&publisher, &[like(42, 1)]).await;
    world.drained(&publisher).await;
    assert_eq!(world.counters().await[&target(42)], 1);

    drop(taken);
    let address = address(&daemon).await;
    assert_eq!(get(&address, "/v1/counters/video/42").await.json()["numbers"][0]["counter"], 1);
    let log = daemon.log();
    let lines = |event: &str| log.lines().filter(|line| line.contains(event) && line.contains("admin port")).count();
    assert_eq!((lines("\"outage-begun\""), lines("\"outage-over\""), lines("\"admin-listening\"")), (1, 1, 1), "{log}");
    let checked = world.tallyd(&["config", "check"]);
    assert!(stdout(&checked).contains(&format!("answers at {port}")), "{}", stdout(&checked));
}
