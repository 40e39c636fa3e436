//! Finds the address of the daemon's admin port, to which commands send their requests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use url::Url;

use super::Usage;
use crate::admin::ask::{Answer, At, Port};
use tallyd_base::config::{self, Listen, NoAddress, Secret};

#[derive(Debug, Args)]
pub(super) struct PortArgs {
    /// Ask the daemon at this admin port: http://HOST:PORT or unix:PATH [default: [admin] listen of the configuration].
    #[arg(long, value_name = "URL", value_parser = parse)]
    url: Option<At>,
    /// Send the token in this file. Use this option if the daemon at --url requires a token ([admin] token_file).
    #[arg(long, value_name = "FILE", requires = "url")]
    token_file: Option<PathBuf>,
}

impl PortArgs {
    pub(super) fn port(&self, config: &Path) -> Result<Port> {
        match &self.url {
            Some(at) => Ok(Port { at: at.clone(), token: self.token()? }),
            None => {
                let admin = config::load_admin(config)?;
                Ok(Port { at: of_listener(admin.address()?)?, token: admin.token })
            }
        }
    }

    fn token(&self) -> Result<Option<Secret>> {
        let Some(file) = &self.token_file else { return Ok(None) };
        let file = std::path::absolute(file).with_context(|| format!("find {}", file.display()))?;
        config::read_token(&file).map(Some).map_err(|problem| Usage(format!("--token-file: {problem}")).into())
    }
}

fn parse(text: &str) -> Result<At, String> {
    let example = "for example http://127.0.0.1:8255";
    match text.parse() {
        Ok(Listen::Socket(path)) => return Ok(At::Socket(path)),
        Err(error @ (NoAddress::Relative | NoAddress::TooLong)) => return Err(error.to_string()),
        _ => {}
    }
    let url = Url::parse(text).map_err(|error| format!("{error}; write an address, {example}"))?;
    match url.scheme() {
        "http" if url.username().is_empty() && url.password().is_none() => Ok(At::Url(url)),
        "http" => {
            Err(format!("write an address without user and password, {example}, and pass the token with --token-file"))
        }
        other => Err(format!("the admin port doesn't support {other}: write an address, {example}")),
    }
}

pub(super) fn of_listener(listens: Option<Listen>) -> Result<At> {
    let address = match listens {
        Some(Listen::Address(address)) => address,
        Some(Listen::Socket(path)) => return Ok(At::Socket(path)),
        None => {
            let problem = "[admin] listen is empty, so the daemon has no admin port: set it, or use --url";
            return Err(Usage(problem.to_owned()).into());
        }
    };
    if address.port() == 0 {
        let problem = "[admin] listen has port 0, so the daemon chose a free port: use --url with the port in its log (admin-listening)";
        return Err(Usage(problem.to_owned()).into());
    }
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Ok(At::Url(Url::parse(&format!("http://{}", SocketAddr::new(ip, address.port())))?))
}

pub(super) fn refusal(port: &Port, answer: &Answer) -> String {
    let at = &port.at;
    let error = serde_json::from_str::<serde_json::Value>(&answer.body).ok();
    let error = error.as_ref().and_then(|error| error["error"].as_str()).unwrap_or("is it tallyd's admin port?");
    format!("{at} answers {}: {}", answer.status, error.replace(char::is_control, " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_listens_everywhere_is_asked_on_this_machine() {
        let asked = |listens: &str| of_listener(Some(listens.parse().unwrap())).unwrap().to_string();
        assert_eq!(asked("0.0.0.0:8255"), "http://127.0.0.1:8255/");
        assert_eq!(asked("[::]:8255"), "http://[::1]:8255/");
        assert_eq!(asked("10.0.0.7:1"), "http://10.0.0.7:1/");
        assert_eq!(asked("unix:/run/tallyd/admin.sock"), "unix:/run/tallyd/admin.sock");
        assert!(of_listener(None).unwrap_err().to_string().contains("[admin] listen is empty"));
        assert!(of_listener(Some("[::]:0".parse().unwrap())).unwrap_err().to_string().contains("port 0"));
    }

    #[test]
    fn only_addresses_of_plain_http_and_sockets_are_taken() {
        assert_eq!(parse("http://tallyd.example.com:8255").unwrap().to_string(), "http://tallyd.example.com:8255/");
        assert_eq!(parse("unix:/run/tallyd/admin.sock").unwrap(), At::Socket("/run/tallyd/admin.sock".into()));
        for (wrong, expected) in [
            ("127.0.0.1:8255", "write an address"),
            ("https://localhost", "doesn't support https"),
            ("unix:admin.sock", "write the absolute path"),
            ("http://user:secret@localhost", "the token with --token-file"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(expected) && !error.contains("secret"), "{error}");
        }
    }
}
