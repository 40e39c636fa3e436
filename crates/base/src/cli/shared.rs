//! Shared parts of the commands: parsing of times and targets, printing of reports and progress.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use super::Usage;
use crate::config::{self, Kinds};
use crate::jobs::JobError;
use crate::jobs::runner::Ran;
use crate::runtime::clock;
use crate::runtime::progress::ProgressSink;
use crate::servers::Servers;
use tallyd_core::control::Task;
use tallyd_core::event::ID_MAX;
use tallyd_core::model::{Micros, Target, TargetId};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Print text for people.
    #[default]
    Text,
    /// Print one JSON object for programs.
    Json,
}

pub fn print(report: &(impl Serialize + std::fmt::Display), format: Format) -> Result<()> {
    let text = match format {
        Format::Text => format!("{report:#}"),
        Format::Json => serde_json::to_string(report).context("write the report")?,
    };
    writeln!(std::io::stdout(), "{text}").context("print the report")
}

pub fn ended<R>(ran: Ran<R>) -> Result<Option<R>> {
    match ran {
        Ran::Ended(report) => Ok(Some(report)),
        Ran::Held { owner, lease_s } => {
            let text = format!(
                "tallyd: {owner} is already running this job (its lease ends in {lease_s} s unless renewed): try again later"
            );
            writeln!(std::io::stderr(), "{text}").context("print")?;
            Ok(None)
        }
    }
}

/// If one of these tasks is paused, says so and returns true.
pub fn are_paused(servers: &Servers, tasks: &[Task]) -> Result<bool> {
    let Some(order) = servers.control.paused(tasks) else { return Ok(false) };
    writeln!(std::io::stderr(), "tallyd: {}", JobError::Paused(Box::new(order))).context("print")?;
    Ok(true)
}

pub fn progress_sink() -> ProgressSink {
    if std::io::stderr().is_terminal() { ProgressSink::Bar } else { ProgressSink::Log }
}

pub fn parse_time(text: &str) -> Result<Duration, String> {
    config::parse_pause(text).map(|pause| pause.0).map_err(|error| format!("write it as 90s, 30m or 2h ({error})"))
}

/// Parses an age or an instant: `30m`, `2026-11-21` or `2026-11-21T10:00:00Z`.
pub fn parse_since(text: &str) -> Result<Micros, String> {
    if let Ok(age) = parse_time(text) {
        return Ok(clock::now().before(age));
    }
    let day = || text.parse::<jiff::civil::Date>().ok()?.to_zoned(jiff::tz::TimeZone::UTC).ok();
    let instant = text.parse::<jiff::Timestamp>().ok().or_else(|| day().map(|day| day.timestamp()));
    let instant = instant.ok_or("write it as 30m, 2h or 7d, or as 2026-11-21 or 2026-11-21T10:00:00Z")?;
    Ok(Micros(instant.as_microsecond()))
}

pub fn parse_target(text: &str, kinds: &Kinds) -> Result<Target> {
    let target = text.split_once(':').and_then(|(kind, id)| {
        let id = id.parse().ok().filter(|id| (1..=ID_MAX).contains(id))?;
        Some(Target { kind: kinds.named(kind)?, id: TargetId(id) })
    });
    target.ok_or_else(|| {
        let known: Vec<&str> = kinds.0.keys().map(String::as_str).collect();
        Usage(format!(
            "{text} is not a target: write KIND:ID, for example video:42; the kinds are {}",
            known.join(", ")
        ))
        .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_told_as_an_age_or_as_an_instant() {
        let now = clock::now().0;
        let ago = parse_since("2h").unwrap().0;
        assert!((now - 7_200_000_000 - ago).abs() < 60_000_000, "{ago}");
        assert_eq!(parse_since("2026-11-21T08:56:25.004538Z").unwrap(), Micros(1_795_251_385_004_538));
        assert_eq!(parse_since("2026-11-21").unwrap(), Micros(1_795_219_200_000_000));
        for text in ["", "soon", "2026-11", "-2h"] {
            assert!(parse_since(text).is_err(), "{text}");
        }
    }
}
