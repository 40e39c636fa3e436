//! `tallyd config check`: prints the configuration, its problems, and the problems of the servers. It changes nothing.
//! If the checks of one server fail, the other servers are still checked.
//!
//! If the account has no right to read a value, the value is reported as not known. This is not an error. A server that
//! stops answering counts as unreachable.

mod mysql;
mod rabbitmq;
mod redis;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use tallyd_base::cli::check::{Asked, Check, Needs, Question, Status, What};
use tallyd_base::cli::{EXIT_CONFIG, EXIT_DONE, EXIT_TRY_LATER, Format, start_log, start_runtime};
use tallyd_base::config::{self, Config, ConfigError, Loaded, Problem, Scheduled};
use tallyd_base::runtime::clock;
use tallyd_base::runtime::cron::Schedule;
use tallyd_base::servers::Servers;

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Connect to no server.
    #[arg(long)]
    offline: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Serialize)]
struct Checked<'a> {
    valid: bool,
    checks: &'a [Check],
}

pub fn run(path: &Path, args: &CheckArgs, questions: &[Question]) -> Result<u8> {
    let (overview, checks) = match look(path, args.offline, questions) {
        Ok((overview, checks)) => (overview, checks),
        Err(problems) => (String::new(), problems.into_iter().map(Check::problem).collect()),
    };
    let errors: Vec<&Check> = checks.iter().filter(|check| check.status == Status::Error).collect();
    match args.format {
        Format::Json => {
            let text = serde_json::to_string(&Checked { valid: errors.is_empty(), checks: &checks });
            writeln!(std::io::stdout(), "{}", text.context("write the checks")?).context("print the checks")?;
        }
        Format::Text => print(&overview, &checks).context("print the checks")?,
    }
    Ok(match errors.as_slice() {
        [] => EXIT_DONE,
        errors if errors.iter().all(|check| check.passes) => EXIT_TRY_LATER,
        _ => EXIT_CONFIG,
    })
}

fn look(path: &Path, offline: bool, questions: &[Question]) -> std::result::Result<(String, Vec<Check>), Vec<Problem>> {
    let Loaded { config, origins } = config::examine(path)?;
    let of = |key: &str, text: String| vec![origins.problem(&[key.into()], text)];
    start_log(&config.log).map_err(|error| of("log.level", format!("[log] {error:#}")))?;
    let servers = |config: &Config| {
        Servers::new(config)
            .map(Servers::impatient)
            .map_err(|ConfigError(texts)| texts.into_iter().flat_map(|text| of("", text)).collect::<Vec<_>>())
    };
    let runtime = start_runtime().map_err(|error| of("", format!("{error:#}")))?;
    runtime.block_on(async {
        let servers = servers(&config)?;
        let overview = overview(&config, &servers);
        let mut checks = shared_boards(&config);
        if !offline {
            checks.extend(ask_servers(&config, &servers).await);
        }
        let has_mysql = checks.iter().any(|check| check.what == What::MysqlAnswers && check.status != Status::Error);
        for question in questions {
            let can_be_asked = match question.needs {
                Needs::Nothing => true,
                Needs::Network => !offline,
                Needs::Mysql => has_mysql,
            };
            if can_be_asked {
                checks.extend((question.ask)(Asked { path, config: &config, servers: &servers }).await);
            }
        }
        Ok((overview, checks))
    })
}

fn shared_boards(config: &Config) -> Vec<Check> {
    let warn = |(board, kinds): (String, BTreeSet<&str>)| {
        let found = format!(
            "the board {board} gets the numbers of several kinds ({}): targets with the same id share a place, which an erase of one of them removes",
            Vec::from_iter(kinds).join(", ")
        );
        Check::warning(
            What::Configuration,
            found,
            "name a board for each kind in [[rule]], unless ids are unique among these kinds",
        )
    };
    config::shared_boards(config).into_iter().map(warn).collect()
}

pub(crate) async fn ask_servers(config: &Config, servers: &Servers) -> Vec<Check> {
    let (rabbitmq, mysql, redis) = tokio::join!(
        rabbitmq::check(config, &servers.broker),
        mysql::check(config, servers),
        redis::check(config, servers)
    );
    [rabbitmq, mysql, redis].concat()
}

fn print(overview: &str, checks: &[Check]) -> std::io::Result<()> {
    let (mut out, mut wrong) = (std::io::stdout().lock(), std::io::stderr().lock());
    write!(out, "{overview}")?;
    let count = |status: Status| checks.iter().filter(|check| check.status == status).count();
    for check in checks {
        match check.status {
            Status::Error => writeln!(wrong, "{check}")?,
            _ => writeln!(out, "{check}")?,
        }
        out.flush()?;
    }
    match (count(Status::Error), count(Status::Warning)) {
        (0, 0) => writeln!(out, "the configuration is valid"),
        (0, warnings) => writeln!(out, "the configuration is valid; warnings: {warnings}"),
        (errors, warnings) => writeln!(wrong, "tallyd: errors: {errors}, warnings: {warnings}"),
    }
}

fn overview(config: &Config, servers: &Servers) -> String {
    let mut text = String::new();
    let mut line = |name: &str, what: String| {
        // Writing to a String can't fail.
        let _ = writeln!(text, "{name:<9} {what}");
    };
    let broker = &servers.broker;
    line(
        "RabbitMQ",
        format!("{} (vhost \"{}\"), partitions: {}", config.amqp.url, broker.vhost(), broker.partitions()),
    );
    line("MySQL", config.mysql.url.to_string());
    line("Redis", config.redis.url.to_string());
    for Scheduled { name, cron, is_on, .. } in config.schedules() {
        let next = if is_on { next_runs(cron, config) } else { None };
        line(name, next.unwrap_or_else(|| "never".to_owned()));
    }
    for board in &config.boards {
        line("board", format!("{} by {}, {}", board.name, board.period, board.time_zone));
    }
    for recount in &config.recounts {
        let next = next_runs(&recount.cron, config).unwrap_or_else(|| "only with `tallyd admin recount`".to_owned());
        line("recount", format!("{} {next}", recount.name()));
    }
    text
}

fn next_runs(cron: &str, config: &Config) -> Option<String> {
    let schedule = Schedule::parse(cron, &config.daemon.time_zone).ok()?;
    Some(schedule.next_runs(clock::now(), 3).join(", "))
}
