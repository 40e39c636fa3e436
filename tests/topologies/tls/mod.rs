//! Tests TLS connections to all three servers, with accepted and rejected certificates and the messages about them. The
//! test has its own servers and its own CA.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod authority;
mod init;
mod servers;

use crate::common;
use crate::common::scripts::ApiServer;
use authority::Certificate;
use common::{Daemon, World, eventually, redis_likes, stderr, stdout, target};
use servers::Servers;
use tallyd_core::model::UserId;

const NAMES: [(&str, &str); 3] = [("RabbitMQ", "amqp"), ("MySQL", "mysql"), ("Redis", "redis")];

/// Returns the settings of all three servers. tallyd uses the same client certificate, `certificate`, for each server.
fn settings(world: &str, servers: &Servers, certificate: Option<&str>) -> String {
    let file = |name: &str| servers.files.path(name).display().to_string();
    let mut tls = format!("tls_ca_file = \"{}\"\n", file("ca.pem"));
    if let Some(certificate) = certificate {
        tls += &format!("tls_cert_file = \"{}\"\ntls_key_file = \"{}\"\n", file(certificate), file("tallyd.key"));
    }
    let mechanism = if certificate.is_some() { "?auth_mechanism=external" } else { "" };
    format!(
        "[amqp]\nurl = \"amqps://tallyd@{}/%2f{mechanism}\"\ntimeout_ms = 3000\n{tls}[mysql]\nurl = \"mysql://tallyd@{}/{world}\"\n{tls}\
         [redis]\nurl = \"rediss://{}/0\"\n{tls}[reconcile]\nwatch_every = \"1s\"\n",
        servers.amqp_address(),
        servers.mysql_address(),
        servers.redis_address()
    )
}

/// Checks that a wrong certificate of the servers or of tallyd counts as a wrong configuration, not as an outage.
/// `config check` must report it for each server.
fn assert_refused(world: &World, servers: &Servers, expected: [&str; 3]) {
    let checked = world.tallyd(&["config", "check"]);
    let said = stderr(&checked);
    assert_eq!(checked.status.code(), Some(78), "{said}");
    let addresses = [servers.amqp_address(), servers.mysql_address(), servers.redis_address()];
    for (((name, section), address), expected) in NAMES.into_iter().zip(addresses).zip(expected) {
        let expected = format!("{name} at {address} {}", expected.replace("{section}", section));
        assert!(said.contains(&expected), "{expected}\n{said}");
    }
}

async fn has_likes(world: &World, likes: i64) {
    eventually("the likes are in MySQL", || async {
        world.count("SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter").await == likes
    })
    .await;
}

/// Checks that a daemon rejects a server with a wrong certificate, both at its start and later. When the certificate is
/// right again, the daemon must continue automatically.
async fn goes_on_by_itself(world: &World, servers: &mut Servers, client: &ApiServer) {
    let said = "shows a certificate that expired on 2021-05-04T00:00:00Z: renew it";
    let daemon = world.daemon();
    daemon.logged(&format!("MySQL at {} {said}", servers.mysql_address())).await;
    servers.show_mysql(Certificate::Right).await;
    for (name, address) in [("RabbitMQ", servers.amqp_address()), ("Redis", servers.redis_address())] {
        daemon.logged(&format!("{name} at {address} {said}")).await;
    }
    servers.show_others(Certificate::Right).await;
    daemon.logged("\"consuming\"").await;
    client.like(target(1), UserId(8), &[]).await.unwrap();
    has_likes(world, 2).await;
    stop(daemon);
}

/// Connects without a client certificate, and then with a certificate of a CA that the servers don't know. A server
/// sends its TLS alert after the handshake. If the client closes the connection earlier, the alert is lost. So the test
/// retries until an alert arrives.
async fn strangers_are_told(world: &World, servers: &Servers) {
    let ended = "closes the connection immediately: see RabbitMQ's log. Perhaps RabbitMQ requires a client certificate from an authority that it trusts ([amqp] tls_cert_file)";
    let asks = ["asks for a certificate (CertificateRequired): set [", "] tls_cert_file and tls_key_file"];
    let refuses = ["does not accept the certificate in [", "] tls_cert_file (UnknownCA)"];
    for (certificate, [before, after]) in [(None, asks), (Some("stranger.pem"), refuses)] {
        world.write(&settings(&world.name, servers, certificate));
        eventually("each server's alert is received", || async {
            let checked = world.tallyd(&["config", "check"]);
            let said = stderr(&checked);
            assert_eq!(checked.status.code(), Some(78), "{said}");
            let of = |section: &str| said.contains(&format!("{before}{section}{after}"));
            // MySQL does not require a client certificate for each connection, but this account requires a certificate.
            let by_account = certificate.is_none() && said.contains("Access denied for user 'tallyd'");
            (of("amqp") || said.contains(ended)) && (of("mysql") || by_account) && of("redis")
        })
        .await;
    }
    // With a sentinel, tallyd connects to the master that the sentinel reports, and ignores the address in the
    // configuration. This master requires the certificate.
    let elsewhere = settings(&world.name, servers, None)
        .replace(&format!("rediss://{}/0", servers.redis_address()), "rediss://127.0.0.2:1/0");
    world.write(&with_sentinel(&elsewhere, servers));
    let expected = format!("Redis at {} asks for a certificate (CertificateRequired)", servers.redis_address());
    eventually("the master's alert is received", || async {
        let checked = world.tallyd(&["config", "check"]);
        let said = stderr(&checked);
        assert!(!said.contains("127.0.0.2"), "{said}");
        checked.status.code() == Some(78) && said.contains(&expected)
    })
    .await;
}

/// Adds a sentinel for Redis' master to the settings.
fn with_sentinel(settings: &str, servers: &Servers) -> String {
    settings.replace("[reconcile]", &format!("sentinels = [\"127.0.0.1:{}\"]\n[reconcile]", servers.sentinel_port))
}

fn stop(daemon: Daemon) {
    let log = daemon.log();
    assert!(daemon.stop().success(), "{log}");
}

/// With `VERIFY_CA` a certificate can have any name, but the CA in `tls_ca_file` must have signed it. tallyd does not
/// use the system's CAs for this check.
async fn a_stock_mysql_is_known_by_its_own_authority_alone(world: &World, servers: &Servers, client: &ApiServer) {
    let by_name = settings(&world.name, servers, Some("tallyd.pem"));
    let by_authority = by_name.replace(&format!("/{}\"", world.name), &format!("/{}?ssl-mode=VERIFY_CA\"", world.name));
    assert_ne!(by_name, by_authority);
    // The system trusts only the CA in other-ca.pem.
    let system = [("SSL_CERT_FILE", servers.files.path("other-ca.pem").display().to_string())];
    let said = |settings: &str| {
        world.write(settings);
        let checked = world.command().args(["config", "check"]).envs(system.clone()).output().unwrap();
        format!("{}{}", stdout(&checked), stderr(&checked))
    };
    let (right, own_ca) =
        ("ok       mysql-answers", "ca.pem /etc/tallyd/mysql-ca.pem, set tls_ca_file to that file, and end url");
    for (shown, with_name, with_authority) in [
        (Certificate::Right, right, right),
        (Certificate::OtherAuthority, right, own_ca),
        (Certificate::OtherName, "for other names (elsewhere.example)", right),
        (
            Certificate::NoName,
            "that names no server, like the ones MySQL generates: end [mysql] url with ?ssl-mode=VERIFY_CA",
            right,
        ),
        (Certificate::Expired, "expired on 2021", "expired on 2021"),
    ] {
        servers.show_mysql(shown).await;
        for (settings, expected) in [(&by_name, with_name), (&by_authority, with_authority)] {
            let said = said(settings);
            assert!(said.contains(expected), "{shown:?}: {expected}\n{said}");
        }
    }
    servers.show_mysql(Certificate::NoName).await;
    world.write(&by_authority);
    let daemon = world.daemon_with(&system.each_ref().map(|(name, file)| (*name, file.as_str())));
    client.like(target(1), UserId(9), &[]).await.unwrap();
    has_likes(world, 3).await;
    stop(daemon);
    servers.show_mysql(Certificate::Right).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_go_through_tls_and_no_server_with_another_certificate_is_believed() {
    if !crate::engines::servers::are_here() {
        return;
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut servers = Servers::start().await;
    let mut world = World::on(servers.mysql_admin_url(), "tls", "").await;
    servers.mysql_account(&world.name).await;
    let right = settings(&world.name, &servers, Some("tallyd.pem"));
    world.set(&right);

    // The test sends all types of requests through TLS: a client sends a like, the daemon writes the like, and a
    // reconcile runs.
    let daemon = world.daemon_with(&[("RUST_LOG", "trace")]);
    daemon.logged("\"consuming\"").await;
    let checked = world.tallyd(&["config", "check"]);
    assert!(checked.status.success(), "{}", stderr(&checked));
    // The daemon can be loading missing data into an empty Redis. Then the command exits with 75, so the test retries.
    eventually("a reconcile runs", async || {
        let ran = world.tallyd(&["reconcile"]);
        assert!(matches!(ran.status.code(), Some(0 | 75)), "{}", stderr(&ran));
        ran.status.success()
    })
    .await;
    let client = world.api_server();
    client.like(target(1), UserId(7), &[]).await.unwrap();
    has_likes(&world, 1).await;
    world.outbox_added().await;
    assert_eq!(redis_likes(&client, &[target(1)]).await, [Some(1)]);
    let key = std::fs::read_to_string(servers.files.path("tallyd.key")).unwrap();
    let (log, configured) = (daemon.log(), format!("{:?}", world.config));
    for line in key.lines().filter(|line| !line.starts_with("---")) {
        assert!(!log.contains(line) && !configured.contains(line), "the output contains a key");
    }
    stop(daemon);

    // tallyd also uses TLS for its connections to the sentinels.
    world.write(&with_sentinel(&right, &servers));
    let shown = world.tallyd(&["show", "video:1"]);
    assert!(shown.status.success(), "{}", stderr(&shown));

    strangers_are_told(&world, &servers).await;

    world.write(&right);
    for (shown, expected) in [
        (Certificate::OtherName, "shows a certificate for other names (elsewhere.example), not for 127.0.0.1: write"),
        (
            Certificate::OtherAuthority,
            "shows a certificate from an authority that is not trusted here: set [{section}] tls_ca_file to a file with that authority's certificate",
        ),
        (
            Certificate::Early,
            "shows a certificate that is not valid before 2091-05-04T00:00:00Z: correct this machine's clock",
        ),
        (Certificate::Expired, "shows a certificate that expired on 2021-05-04T00:00:00Z: renew it"),
    ] {
        servers.show(shown).await;
        assert_refused(&world, &servers, [expected; 3]);
    }
    // This exit code means that a retry can succeed, because the certificate can be renewed.
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(75));
    goes_on_by_itself(&world, &mut servers, &client).await;
    a_stock_mysql_is_known_by_its_own_authority_alone(&world, &servers, &client).await;
}
