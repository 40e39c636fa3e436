//! `tallyd admin export`: keeps an old table current after the cut-over.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::config::{self, Export, MOVE_FILE, Moves};
use crate::export::Exporter;
use tallyd_base::cli::{
    EXIT_DONE, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, ended, parse_since, parse_time, print, progress_sink,
};
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, Ended, RunOptions};
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;
use tallyd_core::model::Micros;

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Use this [[export]].
    #[arg(value_name = "NAME")]
    name: String,
    /// Write likes and unlikes since this time: 2h, 7d, 2026-11-21 or 2026-11-21T10:00:00Z.
    #[arg(long, value_name = "TIME", value_parser = parse_since, required_unless_present = "resume", conflicts_with = "resume")]
    since: Option<Micros>,
    /// Continue where the last run ended.
    #[arg(long)]
    resume: bool,
    /// Repeat until SIGTERM or SIGINT, with this pause between passes: 30s, 1m.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    every: Option<Duration>,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub async fn run(path: &Path, config: &Config, args: &ExportArgs) -> Result<u8> {
    let moves = config::load(path, config)?;
    let export = chosen(&moves, &args.name)?;
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let exporter = Exporter::new(config, export, args.since, args.every)?;
    let options = RunOptions { resume: args.resume, ..RunOptions::default() };
    let ran = run::once(&servers, config, &exporter, options, progress_sink(), &stop).await?;
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, args.format)?;
    // With `--every`, a stop is the normal end of the run.
    Ok(if report.head.ended == Ended::Stopped && args.every.is_none() { EXIT_FAILED } else { EXIT_DONE })
}

fn chosen<'a>(moves: &'a Moves, name: &str) -> Result<&'a Export> {
    let names: Vec<&str> = moves.exports.iter().map(|export| export.name.as_str()).collect();
    let found = moves.exports.iter().find(|export| export.name == name);
    let unknown = || match names.as_slice() {
        [] => Usage(format!("there is nothing to export: {MOVE_FILE} beside the configuration has no [[export]]")),
        names => Usage(format!("no [[export]] is named {name}: the configured names are {}", names.join(", "))),
    };
    Ok(found.ok_or_else(unknown)?)
}
