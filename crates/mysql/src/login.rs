//! The login to MySQL: the address, the account, and the TLS settings.

use std::str::FromStr;

use sqlx::ConnectOptions;
use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::tls::{self, Identity};

use super::{Context, Result};
use crate::config::Mysql;

const PORT: u16 = 3_306;

pub(super) fn unknown_plugin(error: &sqlx::Error) -> Option<String> {
    let text = error.to_string();
    text.split_once("unknown authentication plugin: ")?.1.split(' ').next().map(str::to_owned)
}

pub(super) fn options(config: &Mysql) -> Result<MySqlConnectOptions> {
    const ACTION: &str = "read [mysql] url";
    let Mysql { url, login, .. } = config;
    let tls = &login.tls;
    let options = MySqlConnectOptions::from_str(url.expose()).context(ACTION)?;
    let has_mode =
        url.parts().is_ok_and(|parts| parts.query_pairs().any(|(key, _)| key == "ssl-mode" || key == "sslmode"));
    // The library must not log slow or failed statements, because the caller logs them.
    let mut options = options.disable_statement_logging();
    if let Some(Identity { certificate, key }) = &tls.identity {
        options = options.ssl_client_cert_from_pem(certificate).ssl_client_key_from_pem(key.expose());
    }
    let is_asked_for = tls.authorities.is_some() || tls.identity.is_some();
    let mode = match has_mode {
        true => options.get_ssl_mode(),
        // This mode uses TLS if the server supports TLS, and does not check the server's identity. Without TLS, MySQL
        // accepts the password only if the password is in the server's cache.
        false if is_loopback(url) && !is_asked_for => MySqlSslMode::Preferred,
        // The library's default mode would not verify the server, and could fall back to plain text.
        false => MySqlSslMode::VerifyIdentity,
    };
    let authorities = match (mode, &tls.authorities) {
        // The server's name is not checked, so any certificate from these authorities is accepted.
        (MySqlSslMode::VerifyCa, Some(own)) if webpki_roots::TLS_SERVER_ROOTS.is_empty() => own.clone(),
        (MySqlSslMode::VerifyCa, _) => {
            let text =
                "ssl-mode=VERIFY_CA needs tls_ca_file, and a build of tallyd in which sqlx trusts no other authorities";
            return Err(sqlx::Error::Configuration(text.into())).context(ACTION);
        }
        (MySqlSslMode::VerifyIdentity, own) => tls::authorities(own.as_deref()),
        // No certificate is checked, so reading the system's authorities would only delay the start.
        (MySqlSslMode::Disabled | MySqlSslMode::Preferred | MySqlSslMode::Required, _) => String::new(),
    };
    Ok(options.ssl_mode(mode).ssl_ca_from_pem(authorities.into_bytes()))
}

pub(super) fn address(url: &ServerUrl) -> String {
    let parts = url.parts().ok();
    let host = parts.as_ref().and_then(|url| url.host_str()).unwrap_or_default();
    format!("{host}:{}", parts.as_ref().and_then(url::Url::port).unwrap_or(PORT))
}

fn is_loopback(url: &ServerUrl) -> bool {
    url.parts().is_ok_and(|parts| match parts.host() {
        Some(url::Host::Domain(name)) => {
            name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        }
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_authority_but_the_sites_own_is_left_out_where_names_are_not_checked() {
        assert!(webpki_roots::TLS_SERVER_ROOTS.is_empty());
        let config = Mysql { url: ServerUrl::from("mysql://u@h/t?ssl-mode=VERIFY_CA"), ..Mysql::default() };
        assert!(options(&config).is_err(), "without tls_ca_file");
    }

    #[test]
    fn only_loopback_may_be_plain() {
        for (url, expected) in [
            ("mysql://u@127.0.0.1/t", true),
            ("mysql://u@localhost:3306/t", true),
            ("mysql://u@[::1]/t", true),
            ("mysql://u@db.example.com/t", false),
        ] {
            assert_eq!(is_loopback(&ServerUrl::from(url)), expected, "{url}");
        }
    }
}
