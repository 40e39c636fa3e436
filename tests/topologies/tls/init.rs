//! Tests `tallyd init` with servers that require TLS. RabbitMQ takes the user's name from the client certificate.

use std::fs;

use tallyd_base::config::{Amqp, Config};

use super::authority::Certificate;
use super::common::first_day::FirstDay;
use super::common::stderr;
use super::servers::Servers;

#[tokio::test(flavor = "multi_thread")]
async fn init_and_all_after_it_go_through_tls_to_every_server() {
    if !crate::engines::servers::are_here() {
        return;
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let servers = Servers::start().await;
    let day = FirstDay::new("tls");
    let file = |name: &str| servers.files.path(name).display().to_string();
    let mut environment = vec![
        ("TALLYD__AMQP__URL", format!("amqps://tallyd@{}/%2f?auth_mechanism=external", servers.amqp_address())),
        ("TALLYD__MYSQL__URL", format!("mysql://{}/{}", servers.mysql_address(), day.name)),
        ("TALLYD__REDIS__URL", format!("rediss://{}", servers.redis_address())),
        ("TALLYD_INIT_MYSQL_URL", servers.mysql_admin_url()),
        ("TALLYD__AMQP__TLS_CERT_FILE", file("tallyd.pem")),
        ("TALLYD__AMQP__TLS_KEY_FILE", file("tallyd.key")),
        ("TALLYD__REDIS__TLS_CERT_FILE", file("tallyd.pem")),
        ("TALLYD__REDIS__TLS_KEY_FILE", file("tallyd.key")),
        ("TALLYD__REDIS__TLS_CA_FILE", file("ca.pem")),
        ("TALLYD__MYSQL__TLS_CA_FILE", file("ca.pem")),
    ];
    // The system does not trust the CA of these servers.
    let refused = day.init(&environment, &[]);
    assert!(stderr(&refused).contains("set [amqp] tls_ca_file to a file"), "{}", stderr(&refused));
    environment.push(("TALLYD__AMQP__TLS_CA_FILE", file("ca.pem")));

    // tallyd must reject a certificate for another name, even if the right CA signed it. Otherwise the owner of such a
    // certificate could pretend to be MySQL.
    servers.show_mysql(Certificate::OtherName).await;
    let refused = stderr(&day.init(&environment, &[]));
    assert!(
        refused.contains("for other names (elsewhere.example), not for 127.0.0.1: write one of these names"),
        "{refused}"
    );

    // The certificate that MySQL makes itself has no name. So tallyd accepts this certificate if the right CA signed
    // it.
    servers.show_mysql(Certificate::NoName).await;
    let other = FirstDay::new("tlsname");
    assert!(other.initialized(&environment, &[]).contains("?ssl-mode=VERIFY_CA\"\n"));
    servers.show_mysql(Certificate::Right).await;

    let config = day.initialized(&environment, &[]);
    assert!(!config.contains("ssl-mode"), "{config}");
    assert_eq!(config.matches("certificate and name are verified.").count(), 3, "{config}");
    // RabbitMQ already has the account, with the name from the certificate.
    day.accounts(&["mysql", "redis"], &servers.mysql_admin_url(), &["--ssl", &format!("--ssl-ca={}", file("ca.pem"))]);
    day.done("migrate.toml", &["migrate"]);
    day.done("config.toml", &["config", "check"]);
    let daemon: Config = tallyd_base::config::load(&day.path("config.toml")).unwrap();
    day.likes(&Amqp { ..daemon.amqp }).await;
    assert!(!fs::read_to_string(day.path("accounts.sh")).unwrap().contains("tallyd.amqp-password"));
}
