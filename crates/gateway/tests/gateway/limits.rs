//! Tests which clients can use the gateway, and the limits for a request.

use std::time::Instant;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UnixStream};

use super::common::gateway::read;
use super::common::proxy::Proxy;
use super::common::{World, eventually, stderr};
use super::{PLAIN, count, get, like};

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_wrong_is_refused_with_its_code() {
    let world = World::new("gw_wrong", PLAIN).await;
    drop(world.publisher().await);
    let gateway = world.gateway().await;
    let post = |headers: &str, body: &str| {
        format!("POST /v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n{body}")
    };
    let json = "Content-Type: application/json\r\n";
    let many_ids = vec!["7"; 501].join(",");
    for (request, status, code) in [
        (post("Content-Length: 2\r\n", "{}"), 415, "unsupported-media-type"),
        (post(&format!("{json}Transfer-Encoding: chunked\r\n"), "2\r\n{}\r\n0\r\n\r\n"), 411, "length-required"),
        (post(&format!("{json}Content-Length: 1048577\r\n"), ""), 413, "too-large"),
        (gateway.posted("[]"), 400, "no-events"),
        (gateway.posted("[{"), 400, "malformed-json"),
        (gateway.posted(&format!("[{}]", vec!["{}"; 1_001].join(","))), 413, "too-large"),
        (get("/v1/events"), 405, "method-not-allowed"),
        (get("/v2"), 404, "not-found"),
        (get("/v1/counters?kind=viedo&ids=1"), 400, "unknown-kind"),
        (get("/v1/counters?kind=video"), 400, "missing-parameter"),
        (get("/v1/counters?kind=video&ids=1&metrics=like,x"), 400, "unknown-metric"),
        (get("/v1/counters?kind=video&ids=0"), 400, "id-out-of-range"),
        (get(&format!("/v1/counters?kind=video&ids={many_ids}")), 400, "too-many-ids"),
        (get("/v1/likes?kind=video&ids=1"), 400, "missing-parameter"),
        (get("/v1/likes?user=x&kind=video&ids=1"), 400, "id-out-of-range"),
        (get("/v1/likes?user=7&kind=video&ids=1&id=2"), 400, "unknown-parameter"),
        (get("/livez").replace("localhost", "evil.example"), 403, "unknown-host"),
    ] {
        let answer = gateway.send(&request).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{request}: {answer:?}");
    }
    let alone = gateway.post("no json").await;
    assert_eq!((alone.status, alone.verdicts()), (400, vec!["refused".to_owned()]));
    let live = gateway.get("/livez").await;
    assert_eq!((live.status, live.body.as_str()), (200, r#"{"live":true,"stuck":[]}"#));
    let asked = gateway.get("/metrics").await;
    for line in [
        "tallyd_gateway_requests_total{route=\"counters\",status=\"400\"} 5",
        "tallyd_gateway_events_total{verdict=\"refused\"} 1",
        "tallyd_gateway_request_seconds_count{route=\"boards\"} 0",
    ] {
        assert!(asked.body.contains(line), "{line}: {}", asked.body);
    }
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_lacks_the_token_reads_and_publishes_nothing() {
    let world = World::new("gw_token", "[gateway]\nlisten = \"0.0.0.0:0\"\ntoken_file = \"/dev/null\"\n").await;
    drop(world.publisher().await);
    let command = |token: &str| {
        let mut command = world.gateway_command();
        command.env("TALLYD__GATEWAY__TOKEN", token).output().unwrap()
    };
    let refused = command("short");
    assert_eq!(refused.status.code(), Some(78));
    assert!(stderr(&refused).contains("[gateway] token_file must hold 16 or more"), "{}", stderr(&refused));

    let mut gateway = world.gateway_with(&[("TALLYD__GATEWAY__TOKEN", "0123456789-of-a-test")]).await;
    gateway.address = gateway.address.replace("0.0.0.0", "127.0.0.1");
    let with = |request: String, header: &str| request.replace("Connection", &format!("{header}Connection"));
    for request in [gateway.posted(&like("like", 42, 7)), get("/v1/counters?kind=video&ids=1"), get("/v1/x")] {
        for header in ["", "Authorization: Bearer 0123456789-of-a-tesT\r\n"] {
            let answer = gateway.send(&with(request.clone(), header)).await;
            assert_eq!((answer.status, answer.code().as_str()), (401, "unauthorized"), "{request}");
            assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        }
    }
    let token = "Authorization: Bearer 0123456789-of-a-test\r\n";
    assert_eq!(gateway.send(&with(gateway.posted("{}"), token)).await.status, 400);
    for open in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(gateway.get(open).await.status, 200, "{open}");
    }
    assert!(!gateway.process.log().contains("0123456789"), "{}", gateway.process.log());
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_in_the_file_system_takes_events() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("http.sock");
    let listen = format!("[gateway]\nlisten = \"unix:{}\"\n", path.display());
    let world = World::new("gw_socket", &format!("{PLAIN}{listen}")).await;
    drop(world.publisher().await);
    let gateway = world.gateway().await;
    let mut stream = UnixStream::connect(&path).await.unwrap();
    stream.write_all(gateway.posted(&count(1, "e")).as_bytes()).await.unwrap();
    let answer = read(&mut stream).await;
    assert_eq!((answer.status, answer.verdicts()), (202, vec!["confirmed".to_owned()]));
    assert!(gateway.process.stop().success());
    assert!(!path.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_slow_connections_do_not_hold_up_a_fast_one() {
    let world = World::new("gw_slow", PLAIN).await;
    drop(world.publisher().await);
    let gateway = world.gateway().await;
    let request = gateway.posted(&count(1, "slow"));
    let mut slow = Vec::new();
    for number in 0..9_500 {
        let Ok(mut stream) = TcpStream::connect(&gateway.address).await else { break };
        // There are three groups of slow clients. The first group sends nothing. The second group sends the first 20
        // bytes of the head. The third group sends everything except the last 10 bytes of the body.
        let sent = [0, 20, request.len() - 10][number % 3];
        stream.write_all(&request.as_bytes()[..sent]).await.unwrap();
        slow.push(stream);
    }
    // Some machines allow fewer than 9,500 open files, so the test accepts 900 connections.
    assert!(slow.len() >= 900, "{} connections", slow.len());
    let begun = Instant::now();
    for number in 0..20 {
        assert_eq!(gateway.post(&count(1, &format!("fast{number}"))).await.status, 202);
    }
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
    // If a body arrives too slowly, the gateway rejects the request. If a head arrives too slowly, the gateway closes
    // the connection.
    let answer = read(&mut slow[2]).await;
    assert_eq!((answer.status, answer.code().as_str()), (408, "request-timeout"));
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn more_requests_than_the_limit_are_told_to_come_again() {
    let world = World::new("gw_busy", &format!("{PLAIN}[gateway]\nrequests_max = 1\n")).await;
    drop(world.publisher().await);
    let (proxy, url) = Proxy::before(world.config.amqp.url.expose()).await;
    let gateway = world.gateway_with(&[("TALLYD__AMQP__URL", url.as_str())]).await;
    assert_eq!(gateway.post(&count(1, "first")).await.status, 202);
    proxy.hold_from(b"slow");
    let mut slow = TcpStream::connect(&gateway.address).await.unwrap();
    slow.write_all(gateway.posted(&count(1, "slow")).as_bytes()).await.unwrap();
    // The test waits until the first request has arrived, so that the gateway rejects the second request.
    eventually("the posted event is in flight", || async { proxy.holds() }).await;
    let refused = gateway.post(&count(1, "other")).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "busy"), "{refused:?}");
    assert!(refused.head.contains("retry-after: 1"), "{refused:?}");
    assert_eq!(gateway.get("/v1/counters?kind=video&ids=1").await.status, 200);
    assert_eq!(gateway.get("/livez").await.status, 200);
    proxy.release();
    assert_eq!(read(&mut slow).await.status, 202);
    assert_eq!(gateway.post(&count(1, "other")).await.status, 202);
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_clicks_too_often_is_told_how_long_to_wait() {
    let limits = "[gateway]\nrate_likes_max = 2\nrate_window = \"1h\"\n";
    let world = World::new("gw_limit", &format!("{PLAIN}{limits}")).await;
    drop(world.publisher().await);
    let gateway = world.gateway().await;
    let list: Vec<String> = (1..=3).map(|id| like("like", id, 7)).collect();
    let answer = gateway.post(&format!("[{},{}]", list.join(","), like("like", 1, 8))).await;
    assert_eq!(answer.status, 429, "{answer:?}");
    assert_eq!(answer.verdicts(), ["confirmed", "confirmed", "limited", "confirmed"]);
    assert!(answer.json()["events"][2]["wait_ms"].as_u64().unwrap() > 3_000_000, "{answer:?}");
    assert!(answer.head.contains("retry-after: 3"), "{}", answer.head);
    let at = &answer.json()["events"][0]["at"];
    let retried = list[0].replacen('{', &format!("{{\"at\":{at},"), 1);
    assert_eq!(gateway.post(&retried).await.verdicts(), ["confirmed"], "a retry is no further click");
    let other = retried.replacen("\"like\"", "\"unlike\"", 1);
    assert_eq!(gateway.post(&other).await.verdicts(), ["limited"], "an unlike of the same instant is a further click");
    assert!(gateway.process.stop().success());
}
