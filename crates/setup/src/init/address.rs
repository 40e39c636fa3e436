//! Completes typed addresses. Pure.

use percent_encoding::percent_decode_str;
use url::Url;

use super::plan::Server;
use tallyd_base::config::ServerUrl;

/// The daemon's account on each server. `tallyd init` always makes accounts of its own, so it takes over none of the
/// site's.
pub(super) const ACCOUNT: &str = "tallyd";

const VHOST: &str = "%2f";
const DATABASE: &str = "tally";

/// Completes an address that a user typed, for example `db.example.com`.
///
/// # Errors
/// Returns a message that does not show passwords.
pub(super) fn completed(server: Server, text: &str) -> Result<ServerUrl, String> {
    let section = server.section();
    let whole = if text.contains("://") { text.to_owned() } else { format!("{section}://{text}") };
    let mut url = Url::parse(&whole).map_err(|error| format!("[{section}] url is not an address: {error}"))?;
    let schemes: &[&str] = match server {
        Server::Rabbitmq => &["amqp", "amqps"],
        Server::Mysql => &["mysql", "mariadb"],
        Server::Redis => &["redis", "rediss"],
    };
    if !schemes.contains(&url.scheme()) {
        return Err(format!(
            "[{section}] url begins with {}://, allowed is {}://",
            url.scheme(),
            schemes.join(":// or ")
        ));
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(format!("[{section}] url has no host"));
    }
    let path = match server {
        Server::Rabbitmq => VHOST,
        Server::Mysql => DATABASE,
        Server::Redis => "0",
    };
    if matches!(url.path(), "" | "/") {
        url.set_path(path);
    }
    if url.username().is_empty() {
        // `set_username` fails only if the address has no host.
        let _ = url.set_username(ACCOUNT);
    }
    Ok(url.as_str().into())
}

pub(super) fn has_password(url: &ServerUrl) -> bool {
    url.parts().is_ok_and(|parts| parts.password().is_some())
}

pub(super) fn host_and_port(url: &ServerUrl, port: u16) -> String {
    let parts = url.parts().ok();
    let host = parts.as_ref().and_then(|url| url.host_str()).unwrap_or_default();
    format!("{host}:{}", parts.as_ref().and_then(Url::port).unwrap_or(port))
}

pub(super) fn is_here(url: &ServerUrl) -> bool {
    let is_here = |host: &str| {
        host == "localhost" || host.trim_matches(['[', ']']).parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    };
    url.parts().is_ok_and(|url| url.host_str().is_some_and(is_here))
}

pub(super) fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_alone_is_made_a_whole_address_of_the_daemon() {
        for (server, text, expected) in [
            (Server::Rabbitmq, "mq.example.com", "amqp://tallyd@mq.example.com/%2f"),
            (Server::Rabbitmq, "amqps://tallyd@mq:5671/likes", "amqps://tallyd@mq:5671/likes"),
            (Server::Mysql, "mysql://[::1]:3307", "mysql://tallyd@[::1]:3307/tally"),
            (Server::Redis, "cache:6380", "redis://tallyd@cache:6380/0"),
        ] {
            assert_eq!(completed(server, text).unwrap().expose(), expected);
        }
        for text in ["http://h", "mysql://", "mysql://h:port"] {
            assert!(completed(Server::Mysql, text).unwrap_err().starts_with("[mysql] url "), "{text}");
        }
    }
}
