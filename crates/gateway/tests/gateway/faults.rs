//! Tests the gateway while servers fail, and while the gateway itself stops.

use std::time::Duration;

use futures_util::future::select_all;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::common::gateway::{Gateway, read};
use super::common::proxy::Proxy;
use super::common::{World, eventually, stderr, stdout};
use super::{PLAIN, count, get, like};

const SHORT: &str = "[amqp]\ntimeout_ms = 1500\n[redis]\ntimeout_ms = 500\n";

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_accepted_that_the_broker_has_not_confirmed() {
    let world = World::new("gw_broker", &format!("{PLAIN}{SHORT}")).await;
    drop(world.publisher().await);
    let (proxy, url) = Proxy::before(world.config.amqp.url.expose()).await;
    let gateway = world.gateway_with(&[("TALLYD__AMQP__URL", url.as_str())]).await;
    assert_eq!(gateway.post(&count(1, "first")).await.status, 202);
    assert_eq!(gateway.get("/readyz").await.status, 200);

    // The broker gets the events, but its confirms are lost.
    proxy.mute();
    let list = format!("[{},{},{{}}]", count(1, "a"), count(2, "b"));
    let lost = gateway.post(&list).await;
    assert_eq!(lost.status, 503, "{lost:?}");
    assert_eq!(lost.verdicts(), ["unconfirmed", "unconfirmed", "refused"]);
    assert!(lost.head.contains("retry-after: 1"));
    assert!(lost.json()["events"][0]["at"].as_i64().unwrap() > 1_700_000_000_000_000, "{lost:?}");

    // Now RabbitMQ is unreachable.
    proxy.fail();
    let gone = gateway.post(&count(1, "a")).await;
    assert_eq!((gone.status, gone.verdicts()), (503, vec!["unconfirmed".to_owned()]));
    let ready = gateway.get("/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(ready.body.contains("RabbitMQ is unavailable"), "{}", ready.body);
    assert!(!ready.body.contains("127.0.0.1"), "an address was exposed: {}", ready.body);

    // Even if the gateway loses its connection between two requests, the next request succeeds.
    let broker = url::Url::parse(world.config.amqp.url.expose()).unwrap();
    proxy.lead(format!("{}:{}", broker.host_str().unwrap(), broker.port().unwrap()));
    eventually("the gateway reaches the broker again", || async { gateway.post(&list).await.status == 400 }).await;
    proxy.cut();
    assert_eq!(gateway.post(&count(1, "a")).await.status, 202);
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_login_is_told_at_once_and_shows_no_password() {
    const SECRET: &str = "hunter2-b64-Zm9v";
    let world = World::new("gw_refused", &format!("{PLAIN}{SHORT}")).await;
    drop(world.publisher().await);
    for (section, server, words) in [("AMQP", "RabbitMQ", "ACCESS_REFUSED"), ("REDIS", "Redis", "AuthenticationFailed")]
    {
        let variable = format!("TALLYD__{section}__PASSWORD");
        let gateway = world.gateway_with(&[(variable.as_str(), SECRET), ("RUST_LOG", "trace")]).await;
        gateway.process.logged("\"outage-begun\"").await;
        let ready = gateway.get("/readyz").await;
        assert_eq!(ready.status, 503, "{ready:?}");
        let unavailable = format!("{server} is unavailable: ");
        assert!(ready.body.contains(&unavailable) && ready.body.contains(words), "{ready:?}");
        let posted = gateway.post(&count(1, section)).await;
        let log = gateway.process.log();
        let begun = log.lines().find(|line| line.contains("\"outage-begun\"")).unwrap();
        assert!(begun.contains(&format!("asking {server} failed")) && begun.contains(words), "{begun}");
        for text in [&ready.body, &posted.body, &log] {
            assert!(!text.contains(SECRET), "the password is shown: {text}");
        }
        assert!(!posted.body.contains(words), "clients must not see the cause: {posted:?}");
        let token = [(variable.as_str(), SECRET), ("TALLYD__GATEWAY__TOKEN", "0123456789-of-a-test")];
        let guarded = world.gateway_with(&token).await;
        let ready = guarded.get("/readyz").await;
        assert!(ready.body.contains(&format!("{unavailable}it refuses the account")), "{ready:?}");
        assert!(!ready.body.contains(words), "without the token the answer must show no cause: {ready:?}");
        assert!(gateway.process.stop().success() && guarded.process.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_no_queue_takes_is_not_confirmed() {
    let world = World::new("gw_unbound", &format!("{PLAIN}{SHORT}")).await;
    let publisher = world.publisher().await;
    let link = world.broker.connect("test").await.unwrap();
    link.channel.queue_delete(world.broker.queue(0).into(), Default::default()).await.unwrap();
    let gateway = world.gateway().await;
    let answer = gateway.post(&count(1, "a")).await;
    assert_eq!(answer.status, 503, "{answer:?}");
    let message = answer.json()["events"][0]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("no queue is bound"), "{message}");
    drop((publisher, link));
    drop(world.publisher().await);
    assert_eq!(gateway.post(&count(1, "a")).await.status, 202, "the next request is accepted");
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stop_answers_requests_in_flight_and_takes_no_more() {
    let world = World::new("gw_stop", PLAIN).await;
    drop(world.publisher().await);
    let (proxy, url) = Proxy::before(world.config.amqp.url.expose()).await;
    let mut gateway = world.gateway_with(&[("TALLYD__AMQP__URL", url.as_str())]).await;
    assert_eq!(gateway.post(&count(1, "first")).await.status, 202);
    proxy.hold();
    let mut flying = TcpStream::connect(&gateway.address).await.unwrap();
    flying.write_all(gateway.posted(&count(1, "flying")).as_bytes()).await.unwrap();
    let idle = TcpStream::connect(&gateway.address).await.unwrap();
    gateway.process.signal("HUP");
    gateway.process.signal("TERM");
    gateway.process.logged("\"stop-asked\"").await;
    let ready = gateway.get("/readyz").await;
    assert_eq!((ready.status, ready.json()["state"].as_str()), (503, Some("draining")), "{ready:?}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(TcpStream::connect(&gateway.address).await.is_err(), "a stopping gateway must not accept connections");
    proxy.release();
    assert_eq!(read(&mut flying).await.status, 202);
    assert!(gateway.process.wait().success());
    drop(idle);
}

/// Sends requests without reading their answers.
async fn sent(gateway: &Gateway, request: &str) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for _ in 0..32 {
        let mut stream = TcpStream::connect(&gateway.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        streams.push(stream);
    }
    streams
}

/// Waits until one of the requests is refused: then the others have all permits. A further request would not show it,
/// because it can get a permit itself and would give it back.
async fn is_full(sent: &[TcpStream]) {
    let answers = sent.iter().map(|stream| Box::pin(async { stream.peek(&mut [0]).await }));
    let first = timeout(Duration::from_secs(4), select_all(answers)).await.expect("no request is refused");
    assert!(first.0.unwrap() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_mysql_stops_no_event_and_a_silent_broker_stops_no_read() {
    let world = World::new("gw_permits", &format!("{PLAIN}[gateway]\nrequests_max = 16\n")).await;
    drop(world.publisher().await);
    let (mysql, mysql_url) = Proxy::before(world.config.mysql.url.expose()).await;
    let (broker, amqp_url) = Proxy::before(world.config.amqp.url.expose()).await;
    let gateway = world.gateway_with(&[("TALLYD__MYSQL__URL", &mysql_url), ("TALLYD__AMQP__URL", &amqp_url)]).await;
    assert_eq!(gateway.post(&count(1, "first")).await.status, 202);
    mysql.hold();
    let mut waiting = sent(&gateway, &get("/v1/likes?user=7&kind=video&ids=1")).await;
    is_full(&waiting).await;
    let posted = timeout(Duration::from_secs(1), gateway.post(&count(1, "second"))).await.unwrap();
    assert_eq!(posted.status, 202, "{posted:?}");
    for stream in &mut waiting {
        assert_eq!(read(stream).await.status, 503);
    }
    // MySQL has failed, so the gateway does not ask it for a while.
    let likes = timeout(Duration::from_secs(1), gateway.get("/v1/likes?user=7&kind=video&ids=1")).await.unwrap();
    assert_eq!((likes.status, likes.code().as_str()), (503, "mysql-unavailable"));
    mysql.clear();
    // A port that refuses connections is no reason to wait.
    let refused = world.gateway_with(&[("TALLYD__MYSQL__URL", "mysql://tallyd_api@127.0.0.1:9/tally")]).await;
    for _ in ["MySQL refuses", "MySQL has refused"] {
        let likes = timeout(Duration::from_secs(2), refused.get("/v1/likes?user=7&kind=video&ids=1")).await.unwrap();
        assert_eq!((likes.status, likes.code().as_str()), (503, "mysql-unavailable"));
        assert!(likes.body.contains("connection refused"), "{likes:?}");
    }
    let log = refused.process.log();
    let line = log.lines().find(|line| line.contains("\"mysql-unasked\"")).unwrap();
    assert!(line.contains("connection refused"), "{line}");
    assert!(refused.process.stop().success());

    broker.hold();
    let mut waiting = sent(&gateway, &gateway.posted(&count(1, "third"))).await;
    is_full(&waiting).await;
    assert_eq!(gateway.get("/v1/counters?kind=video&ids=1").await.status, 200);
    broker.release();
    for stream in &mut waiting {
        assert!(matches!(read(stream).await.status, 202 | 503));
    }
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_is_away_stops_no_event_of_the_daemons() {
    let limits = "[gateway]\nrate_likes_max = 1\nrate_window = \"1h\"\n";
    let world = World::new("gw_redis", &format!("{PLAIN}{SHORT}{limits}")).await;
    drop(world.publisher().await);
    let (proxy, url) = Proxy::before(world.config.redis.url.expose()).await;
    let gateway = world.gateway_with(&[("TALLYD__REDIS__URL", url.as_str())]).await;
    assert_eq!(gateway.get("/readyz").await.status, 200);
    proxy.fail();
    for user in [7, 7, 7] {
        let list = format!("[{},{}]", count(1, "e"), like("like", 1, user));
        assert_eq!(gateway.post(&list).await.verdicts(), ["confirmed", "confirmed"], "no client is limited");
    }
    let likes = gateway.get("/v1/likes?user=7&kind=video&ids=1").await;
    assert_eq!((likes.status, &likes.json()["likes"][0]["source"]), (200, &"mysql".into()), "{likes:?}");
    eventually("/readyz asks Redis again", || async { gateway.get("/readyz").await.status == 503 }).await;
    let read = gateway.get("/v1/counters?kind=video&ids=1").await;
    assert_eq!(read.json()["counters"], json!([{ "id": "1", "source": "mysql", "like": 0 }]), "{read:?}");
    assert!(gateway.process.log().contains("\"gateway-redis-away\""), "{}", gateway.process.log());
    let broken = world.tallyd(&["admin", "healthcheck", "--url", &format!("http://{}", gateway.address)]);
    assert_eq!(broken.status.code(), Some(1), "{}", stderr(&broken));
    assert!(stdout(&broken).contains("Redis is unavailable"), "{}", stdout(&broken));
    let live = world.tallyd(&["admin", "healthcheck", "--live", "--url", &format!("http://{}", gateway.address)]);
    assert_eq!(live.status.code(), Some(0), "{}{}", stdout(&live), stderr(&live));
    assert!(gateway.process.stop().success());
}
