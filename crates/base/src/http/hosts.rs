//! Allowed `Host` names. A web page can make its own host name point to this port (DNS rebinding) and read the answers.
//! The browser sends the page's host name in `Host`, so this check finds such a page. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Returns true if `Host` is an address, `localhost` or one of `names`. Accepts a missing `Host`, because only browsers
/// need the check, and a browser always sends `Host`.
pub fn may_be_called(host: Option<&str>, names: &[String]) -> bool {
    let Some(host) = host else { return true };
    if let Some((address, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let known = |known: &str| name.eq_ignore_ascii_case(known);
    name.parse::<Ipv4Addr>().is_ok() || known("localhost") || names.iter().any(|name| known(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_nobody_has_given_is_refused() {
        let names = ["tallyd.example.com".to_owned()];
        for host in ["127.0.0.1", "10.0.0.7:8255", "[::1]:8255", "[::1]", "LocalHost:8255", "Tallyd.example.com:8255"] {
            assert!(may_be_called(Some(host), &names), "{host}");
        }
        assert!(may_be_called(None, &names));
        for host in
            ["evil.example", "evil.example:8255", "localhost.evil.example", "1.2.3.4.evil.example", "", "?", "[x]"]
        {
            assert!(!may_be_called(Some(host), &names), "{host}");
        }
    }
}
