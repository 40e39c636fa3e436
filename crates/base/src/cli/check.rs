//! The checks of `config check`, and their results.

use std::fmt;
use std::path::Path;

use anyhow::Error;
use futures_util::future::BoxFuture;
use serde::Serialize;

use super::fate_of;
use crate::config::{Config, ConfigError, Problem};
use crate::servers::Servers;
use tallyd_connect::fate::Fate;
use tallyd_core::model::Micros;

/// If two clocks differ by more than this number of microseconds, `config check` warns.
const CLOCKS_APART_MAX: i64 = 1_000_000;

const UNTRUSTED: &str =
    "correct the certificate or the TLS settings, as docs/operations/security.md says; meanwhile the daemon waits";

pub const MYSQL_AWAY: &str = "start MySQL, or correct [mysql] url; meanwhile the daemon waits";

pub const MYSQL_REFUSED: &str = "correct the password; if the account does not exist, run accounts.sh of `tallyd init`, or CREATE DATABASE, CREATE USER and GRANT as docs/operations/security.md says";

/// The checks. The name of a check is stable. The manual gives advice for each check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    Configuration,
    RabbitmqAnswers,
    RabbitmqPlugin,
    RabbitmqExchanges,
    RabbitmqQueues,
    RabbitmqPermissions,
    MysqlAnswers,
    MysqlVersion,
    MysqlSchema,
    MysqlNames,
    MysqlPartitions,
    MysqlPermissions,
    MysqlWritable,
    MysqlDurability,
    MysqlPacket,
    MysqlClock,
    MysqlReplicas,
    MysqlRecounts,
    MysqlImports,
    RedisAnswers,
    RedisVersion,
    RedisScripts,
    RedisPermissions,
    RedisEviction,
    RedisPersistence,
    RedisClock,
    RedisListpack,
    RedisBuckets,
    AdminPort,
}

impl What {
    pub const ALL: [Self; 29] = [
        Self::Configuration,
        Self::RabbitmqAnswers,
        Self::RabbitmqPlugin,
        Self::RabbitmqExchanges,
        Self::RabbitmqQueues,
        Self::RabbitmqPermissions,
        Self::MysqlAnswers,
        Self::MysqlVersion,
        Self::MysqlSchema,
        Self::MysqlNames,
        Self::MysqlPartitions,
        Self::MysqlPermissions,
        Self::MysqlWritable,
        Self::MysqlDurability,
        Self::MysqlPacket,
        Self::MysqlClock,
        Self::MysqlReplicas,
        Self::MysqlRecounts,
        Self::MysqlImports,
        Self::RedisAnswers,
        Self::RedisVersion,
        Self::RedisScripts,
        Self::RedisPermissions,
        Self::RedisEviction,
        Self::RedisPersistence,
        Self::RedisClock,
        Self::RedisListpack,
        Self::RedisBuckets,
        Self::AdminPort,
    ];

    pub fn name(self) -> String {
        let letters = format!("{self:?}");
        let mut name = String::new();
        for letter in letters.chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.extend(letter.to_lowercase());
        }
        name
    }

    fn server(self) -> String {
        self.name().split('-').next().unwrap_or_default().to_owned()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// tallyd works, but it may lose data or become slow.
    Warning,
    /// tallyd can't work until this is corrected.
    Error,
}

#[derive(Clone, Debug, Serialize)]
pub struct Check {
    #[serde(rename = "check")]
    pub what: What,
    pub server: String,
    pub status: Status,
    pub found: String,
    #[serde(rename = "do", skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Problem>,
    /// True if the error is temporary, so a later check can succeed.
    #[serde(skip)]
    pub passes: bool,
}

/// A question that a satellite, or another part of the daemon, adds to `tallyd config check`.
#[derive(Clone, Copy)]
pub struct Question {
    pub needs: Needs,
    pub ask: for<'a> fn(Asked<'a>) -> BoxFuture<'a, Vec<Check>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The question is also asked with `--offline`.
    Nothing,
    Network,
    /// MySQL has answered.
    Mysql,
}

#[derive(Clone, Copy)]
pub struct Asked<'a> {
    pub path: &'a Path,
    pub config: &'a Config,
    pub servers: &'a Servers,
}

impl Check {
    fn new(what: What, status: Status, found: impl Into<String>) -> Self {
        Self { what, server: what.server(), status, found: found.into(), advice: None, at: None, passes: false }
    }

    pub fn ok(what: What, found: impl Into<String>) -> Self {
        Self::new(what, Status::Ok, found)
    }

    pub fn unknown(what: What, why: impl fmt::Display) -> Self {
        Self::new(what, Status::Ok, format!("not known: {why}"))
    }

    pub fn warning(what: What, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..Self::new(what, Status::Warning, found) }
    }

    pub fn error(what: What, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..Self::new(what, Status::Error, found) }
    }

    pub fn failed(what: What, error: impl Into<Error>, away: &str, refused: &str) -> Self {
        let error = error.into();
        let (passes, advice) = match fate(&error) {
            Fate::Untrusted => (false, UNTRUSTED),
            Fate::Refused | Fate::Misconfigured => (false, refused),
            Fate::Passing | Fate::Item => (true, away),
        };
        Self { passes, ..Self::error(what, format!("{error:#}"), advice) }
    }

    pub fn unanswered(what: What, error: impl Into<Error>, away: &str) -> Self {
        let error = error.into();
        match fate(&error) {
            Fate::Refused | Fate::Untrusted | Fate::Misconfigured => Self::unknown(what, format_args!("{error:#}")),
            Fate::Passing | Fate::Item => Self { passes: true, ..Self::error(what, format!("{error:#}"), away) },
        }
    }

    pub fn problem(problem: Problem) -> Self {
        let found = problem.to_string();
        Self { at: Some(problem), ..Self::new(What::Configuration, Status::Error, found) }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Error => "error",
        };
        write!(f, "{status:<8} {:<21} {}", self.what.name(), self.found)?;
        self.advice.as_ref().map_or(Ok(()), |advice| write!(f, "\n{:<30} do: {advice}", ""))
    }
}

/// A configuration error among the causes decides; otherwise the server's error.
fn fate(error: &Error) -> Fate {
    let of_configuration = error.chain().any(|cause| cause.is::<ConfigError>()).then_some(Fate::Misconfigured);
    of_configuration.or_else(|| error.chain().find_map(fate_of)).unwrap_or(Fate::Passing)
}

/// Compares a server's clock with this machine's. The server's clock showed `clock` between `before` and `after`.
pub fn clock(what: What, clock: Micros, before: Micros, after: Micros) -> Check {
    let apart = if clock < before { clock.0 - before.0 } else { (clock.0 - after.0).max(0) };
    let seconds = apart.unsigned_abs() as f64 / 1e6;
    match apart {
        0 => Check::ok(what, "the server's clock equals this machine's"),
        _ if apart.abs() <= CLOCKS_APART_MAX => {
            Check::ok(what, format!("the server's clock differs by {seconds:.3} s from this machine's"))
        }
        _ => {
            let side = if apart < 0 { "behind" } else { "ahead of" };
            Check::warning(
                what,
                format!("the server's clock is {seconds:.1} s {side} this machine's"),
                "synchronize both clocks with NTP (timedatectl, chronyc tracking)",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_programs_see() {
        for what in What::ALL {
            assert_eq!(serde_json::to_value(what).unwrap(), what.name());
        }
        assert_eq!(
            (What::MysqlRecounts.server().as_str(), What::Configuration.server().as_str()),
            ("mysql", "configuration")
        );
    }

    #[test]
    fn clocks_are_compared_but_for_the_time_that_asking_takes() {
        let check = |at: i64| clock(What::RedisClock, Micros(at), Micros(10_000_000), Micros(10_200_000));
        assert_eq!(check(10_100_000).found, "the server's clock equals this machine's");
        assert_eq!(check(10_700_000).found, "the server's clock differs by 0.500 s from this machine's");
        assert_eq!(
            (check(8_000_000).status, check(8_000_000).found.as_str()),
            (Status::Warning, "the server's clock is 2.0 s behind this machine's")
        );
        assert_eq!(check(13_200_000).found, "the server's clock is 3.0 s ahead of this machine's");
    }
}
