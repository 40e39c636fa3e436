//! Access to the admin port, and invalid requests. The log escapes all parts of a request.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::{ANY, address, get, send};
use crate::common::proxy::Proxy;
use crate::common::{Daemon, World, eventually, stderr, stdout};

const TOKEN: &str = "0123456789-of-a-test";

/// The daemon listens on all addresses. Returns the address that a client on this machine uses.
async fn reached(daemon: &Daemon) -> String {
    address(daemon).await.replace("0.0.0.0", "127.0.0.1")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_others_reach_has_a_token_and_answers_nobody_without_it() {
    let all = "[admin]\nlisten = \"0.0.0.0:0\"\n";
    let world = World::new("admin_who", "").await;
    world.write(all);
    let refused = world.tallyd(&[]);
    assert_eq!(refused.status.code(), Some(78), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("which other machines can reach: set token_file"), "{}", stderr(&refused));

    let file = world.folder.path().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    world.write(&format!("{all}token_file = \"{}\"\n", file.display()));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(stderr(&world.tallyd(&["config", "check", "--offline"])).contains("can be read by everyone"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let daemon = world.daemon();
    let port = reached(&daemon).await;
    let basic = BASE64_STANDARD.encode(format!("anybody:{TOKEN}"));
    for (header, status) in [
        (String::new(), 401),
        ("Authorization: Bearer 0123456789-of-a-tesT\r\n".to_owned(), 401),
        (format!("Authorization: Bearer {TOKEN}x\r\n"), 401),
        (format!("Authorization: Bearer {TOKEN}\r\n"), 200),
        (format!("Authorization: Basic {basic}\r\n"), 200),
    ] {
        for path in ["/", "/metrics", "/v1/status", "/v1/history", "/v1/counters/video/42"] {
            let answer = send(&port, &format!("GET {path} HTTP/1.1\r\nHost: {port}\r\n{header}\r\n")).await;
            assert_eq!(answer.status, status, "{header} {path}");
            assert_eq!(answer.head.contains("www-authenticate: basic"), status == 401, "{}", answer.head);
        }
    }
    let url = format!("http://{port}");
    let asked =
        world.tallyd(&["admin", "healthcheck", "--live", "--url", &url, "--token-file", file.to_str().unwrap()]);
    assert!(asked.status.success(), "{}{}", stdout(&asked), stderr(&asked));
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_without_a_token_get_a_status_code_and_no_more() {
    let world = World::new("admin_probes", "").await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    world.write("[admin]\nlisten = \"0.0.0.0:0\"\n[mysql]\nconnect_timeout_ms = 500\n");
    let daemon = world.daemon_with(&[("TALLYD__ADMIN__TOKEN", TOKEN), ("TALLYD__MYSQL__URL", url.as_str())]);
    let port = reached(&daemon).await;
    let asked = async |host: &str, path: &str, header: &str| {
        send(&port, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{header}\r\n")).await
    };
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    eventually("the daemon is ready", || async { asked("10.0.0.7:8255", "/readyz", "").await.status == 200 }).await;
    proxy.hold();
    proxy.cut();
    eventually("the daemon is not ready", || async { asked("10.0.0.7:8255", "/readyz", "").await.status == 503 }).await;
    for (path, status) in [("/livez", 200), ("/readyz", 503)] {
        for header in ["", "Authorization: Bearer another-one-of-a-test\r\n"] {
            let answer = asked("10.0.0.7:8255", path, header).await;
            assert_eq!((answer.status, answer.body.as_str()), (status, ""), "{path} {header}");
            assert!(answer.head.contains("content-length: 0") && !answer.head.contains("mysql"), "{}", answer.head);
        }
        assert!(
            asked("localhost", path, &token).await.json().is_object(),
            "a client with the token can read the reasons"
        );
        assert_eq!(asked("evil.example", path, "").await.status, 403, "a request from a Web page must be rejected");
    }
    assert_eq!(asked("localhost", "/livez/", "").await.status, 401, "without the token, other paths must answer 401");
    let url = format!("http://{port}");
    assert_eq!(world.tallyd(&["admin", "healthcheck", "--live", "--url", &url]).status.code(), Some(0));
    let ready = world.tallyd(&["admin", "healthcheck", "--url", &url]);
    assert!(!ready.status.success() && stdout(&ready).contains("--token-file"), "{}", stdout(&ready));
    proxy.release();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_but_reading_is_answered_and_no_request_writes_into_the_log_or_keeps_others_out() {
    let world = World::new("admin_hostile", &format!("{ANY}[log]\nformat = \"text\"\n")).await;
    let daemon = world.daemon_with(&[("RUST_LOG", "trace")]);
    daemon.logged("the admin port is ").await;
    let log = daemon.log();
    let port = log.split("the admin port is ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"] {
        for path in ["/", "/v1/status", "/v1/counters/video/42", "/nowhere"] {
            let answer =
                send(&port, &format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")).await;
            // CONNECT must name a server.
            assert!(
                matches!((answer.status, method), (405, _) | (400, "CONNECT")),
                "{method} {path}: {}",
                answer.status
            );
        }
    }
    // The path, the query, a header and the Host header contain line ends, escape sequences of a terminal, and invalid
    // UTF-8.
    for request in [
        "GET /%0aforged%0d%1b[2J%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /v1/counters/%0aforged%1b[2J/42?q=%0aforged HTTP/1.1\r\nHost: localhost\r\nX-Forged: \u{9b}2J forged\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: \u{9b}2Jforged\r\n\r\n",
        "GET /\u{1b}[2Jforged HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nX-Forged: \u{1b}[2Jforged\r\n\r\n",
        "\u{1b}[2Jforged\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(&port).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut answer).await.unwrap();
        let answer = String::from_utf8_lossy(&answer);
        assert!(
            ["400", "403", "404"].iter().any(|status| answer.starts_with(&format!("HTTP/1.1 {status}"))),
            "{answer}"
        );
    }
    // The head of this request is too large.
    let large = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX-Large: {}\r\n\r\n", "x".repeat(20_000));
    assert_eq!(send(&port, &large).await.status, 431);

    // The daemon disconnects a client that sends nothing or sends a few bytes from time to time. Other clients get
    // answers.
    let began = Instant::now();
    let mut idle = Vec::new();
    for _ in 0..70 {
        let mut stream = TcpStream::connect(&port).await.unwrap();
        stream.write_all(b"GET / HT").await.unwrap();
        idle.push(stream);
    }
    assert_eq!(get(&port, "/livez").await.status, 200);
    let waited = began.elapsed().as_secs();
    assert!(waited < 30, "{waited} s");
    drop(idle);
    let log = daemon.log();
    assert!(!log.contains("forged\n") && log.chars().all(|letter| letter == '\n' || !letter.is_control()), "{log}");
    // Each line begins with the year.
    assert!(log.lines().all(|line| line.starts_with("20")), "a line was forged: {log}");
}
