//! What commands print: reports, and how far a run is.

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::jobs::runner::Ran;
use crate::runtime::progress::ProgressSink;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs: one object.
    Json,
}

pub(super) fn print(report: &(impl Serialize + std::fmt::Display), format: Format) -> Result<()> {
    let text = match format {
        Format::Text => format!("{report:#}"),
        Format::Json => serde_json::to_string(report).context("write the report")?,
    };
    writeln!(std::io::stdout(), "{text}").context("print the report")
}

/// The report of a run that ended; says who holds the lock where another one runs.
pub(super) fn ended<R>(ran: Ran<R>) -> Result<Option<R>> {
    match ran {
        Ran::Ended(report) => Ok(Some(report)),
        Ran::Held { owner, lease_s } => {
            let text =
                format!("tallyd: {owner} is at it (its lease runs for another {lease_s} s unless renewed): try later");
            writeln!(std::io::stderr(), "{text}").context("print")?;
            Ok(None)
        }
    }
}

pub(super) fn progress_sink() -> ProgressSink {
    if std::io::stderr().is_terminal() { ProgressSink::Bar } else { ProgressSink::Log }
}
