//! Reads answers from the environment, or asks on a terminal.

use std::io::{IsTerminal, stdin};

use anyhow::{Context, Result, bail};
use console::Term;

use super::address::{ACCOUNT, completed, has_password, host_and_port, is_here};
use super::plan::Server;
use tallyd_base::cli::Usage;
use tallyd_base::config::{Config, Secret, ServerUrl};

pub(super) fn variable(server: Server) -> String {
    format!("TALLYD__{}__URL", server.section().to_uppercase())
}

fn admin_variable(server: Server) -> String {
    format!("TALLYD_INIT_{}_URL", server.section().to_uppercase())
}

pub(super) struct Addresses {
    pub daemon: ServerUrl,
    pub admin: Option<ServerUrl>,
}

pub(super) fn given(server: Server) -> Option<String> {
    let name = variable(server);
    [format!("{name}_FILE"), name].into_iter().find(|name| std::env::var(name).is_ok())
}

pub(super) fn from_environment(server: Server, loaded: &Config) -> Result<Option<Addresses>> {
    if given(server).is_none() {
        return Ok(None);
    }
    let daemon = address(server, server.url(loaded).expose()).map_err(Usage)?;
    let admin = std::env::var(admin_variable(server)).ok().filter(|text| !text.is_empty());
    let admin = admin.map(|text| administrator(server, &daemon, &text)).transpose().map_err(Usage)?;
    Ok(Some(Addresses { daemon, admin }))
}

/// Parses the daemon's address. The address must not have another account or a password, because `tallyd init` creates
/// both.
fn address(server: Server, text: &str) -> Result<ServerUrl, String> {
    let url = completed(server, text)?;
    let account = url.parts()?.username().to_owned();
    if account != ACCOUNT {
        return Err(format!(
            "[{}] url has the account {account}: remove it, because `tallyd init` creates the accounts {ACCOUNT}, {ACCOUNT}_migrate \
             and {ACCOUNT}_api",
            server.section()
        ));
    }
    if has_password(&url) {
        return Err(format!(
            "[{}] url, or a variable for it, has a password: remove it, because `tallyd init` creates a new account. Put an administrator's login into {}",
            server.section(),
            admin_variable(server)
        ));
    }
    Ok(url)
}

fn administrator(server: Server, daemon: &ServerUrl, text: &str) -> Result<ServerUrl, String> {
    let mut url = daemon.parts()?;
    let refused = |()| "the address can't have a user".to_owned();
    let password = if text.contains("://") {
        let given = completed(server, text)?.parts()?;
        url.set_username(given.username()).and_then(|()| url.set_password(given.password())).map_err(refused)?;
        None
    } else {
        let (user, password) = text.split_once(':').ok_or("write USER:PASSWORD, or an address")?;
        url.set_username(user).map_err(refused)?;
        Some(Secret::new(password.to_owned()))
    };
    if server == Server::Mysql {
        // Without a database name, the login works even if the daemon's database does not exist yet.
        url.set_path("/");
    }
    let mut url = ServerUrl::from(url.as_str());
    password.map_or(Ok(()), |password| url.set_password(&password))?;
    Ok(url)
}

fn plain_text(server: Server, url: &ServerUrl) -> Option<String> {
    let tls = match (server, url.parts().ok()?.scheme()) {
        (Server::Rabbitmq, "amqp") => "amqps://",
        (Server::Redis, "redis") => "rediss://",
        _ => return None,
    };
    let text =
        "This address sends logins as plain text. For TLS leave the next answer empty, and begin the address with";
    (!is_here(url)).then(|| format!("{text} {tls}."))
}

pub(super) struct Terminal(Term);

impl Terminal {
    pub(super) fn open() -> Result<Self> {
        let term = Term::stderr();
        if !stdin().is_terminal() || !term.is_term() {
            let names = Server::ALL.map(variable).join(", ");
            bail!(Usage(format!("there is no terminal for questions: set {names}")));
        }
        Ok(Self(term))
    }

    pub(super) fn print(&self, text: &str) -> Result<()> {
        self.0.write_line(text).context("write to the terminal")
    }

    pub(super) fn ask(&self, question: &str, default: &str) -> Result<String> {
        let shown = if default.is_empty() { String::new() } else { format!(" [{default}]") };
        self.0.write_str(&format!("{question}{shown}: ")).context("write to the terminal")?;
        let answer = self.0.read_line().context("read the answer")?;
        let answer = answer.trim();
        Ok(if answer.is_empty() { default.to_owned() } else { answer.to_owned() })
    }

    fn ask_secret(&self, question: &str) -> Result<String> {
        self.0.write_str(&format!("{question}: ")).context("write to the terminal")?;
        Ok(self.0.read_secure_line().context("read the answer")?.trim().to_owned())
    }

    pub(super) fn number<T: std::str::FromStr + std::fmt::Display>(&self, question: &str, default: T) -> Result<T> {
        loop {
            match self.ask(question, &default.to_string())?.replace(['_', ',', ' '], "").parse() {
                Ok(number) => return Ok(number),
                Err(_) => self.print("Write a number.")?,
            }
        }
    }

    pub(super) fn addresses(&self, server: Server) -> Result<Addresses> {
        let (name, default) = (server.name(), Config::default());
        let default = host_and_port(server.url(&default), 0);
        loop {
            let text = self.ask(&format!("{name}, as tallyd will reach it (HOST:PORT or a full address)"), &default)?;
            let daemon = match address(server, &text) {
                Ok(daemon) => daemon,
                Err(problem) => {
                    self.print(&problem)?;
                    continue;
                }
            };
            if let Some(warning) = plain_text(server, &daemon) {
                self.print(&warning)?;
            }
            let question = format!("Administrator of {name}, used once, never stored (USER:PASSWORD, or empty)");
            let text = self.ask_secret(&question)?;
            let admin = (!text.is_empty()).then(|| administrator(server, &daemon, &text)).transpose();
            match admin {
                Ok(admin) => return Ok(Addresses { daemon, admin }),
                Err(problem) => self.print(&problem)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_administrator_logs_in_where_the_daemon_does() {
        let daemon = completed(Server::Mysql, "db:3307").unwrap();
        let of = |text: &str| administrator(Server::Mysql, &daemon, text).map(|url| url.expose().to_owned());
        assert_eq!(of("root:p@ss").unwrap(), "mysql://root:p%40ss@db:3307/");
        assert_eq!(of("mysql://root:%25x@127.0.0.1/mysql").unwrap(), "mysql://root:%25x@db:3307/");
        assert_eq!(of("mysql://root@h").unwrap(), "mysql://root@db:3307/");
        assert_eq!(of("root").unwrap_err(), "write USER:PASSWORD, or an address");
    }

    #[test]
    fn a_login_as_plain_text_over_the_network_is_warned_of() {
        for (server, text, warned) in [
            (Server::Rabbitmq, "mq.example.com", Some("amqps://.")),
            (Server::Rabbitmq, "127.0.0.1", None),
            (Server::Redis, "cache", Some("rediss://.")),
            (Server::Redis, "rediss://cache", None),
            (Server::Mysql, "db", None),
        ] {
            let warning = plain_text(server, &completed(server, text).unwrap());
            assert_eq!(warning.is_some(), warned.is_some(), "{text}");
            assert!(warning.is_none_or(|warning| warning.ends_with(warned.unwrap())), "{text}");
        }
    }

    #[test]
    fn an_account_or_a_password_in_the_daemons_address_is_refused() {
        for (server, text) in [(Server::Redis, "redis://default@cache"), (Server::Mysql, "mysql://root@db/site")] {
            let problem = address(server, text).unwrap_err();
            assert!(problem.contains("creates the accounts tallyd, tallyd_migrate and tallyd_api"), "{problem}");
        }
        let problem = address(Server::Redis, "redis://:s3cr3t@cache").unwrap_err();
        assert!(problem.contains("remove it") && problem.contains("TALLYD_INIT_REDIS_URL"), "{problem}");
        assert!(!problem.contains("s3cr3t"));
    }
}
