//! `tallyd reconcile`: compares Redis with MySQL once, and repairs drift.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::rules::RECONCILE;
use super::{
    EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, Format, are_paused, ended, parse_target, parse_time, print,
    progress_sink,
};
use crate::jobs::reconcile::{Mode, Reconciler};
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, Ended, Job as _, RunOptions};
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;

#[derive(Debug, Default, Args)]
pub(super) struct ReconcileArgs {
    /// Compare every target (the default).
    #[arg(long, conflicts_with_all = ["scrub", "changed", "target"])]
    full: bool,
    /// Compare the next slice of all targets ([reconcile] scrub_parts).
    #[arg(long, conflicts_with_all = ["changed", "target"])]
    scrub: bool,
    /// Compare targets that changed since the last run.
    #[arg(long, conflicts_with = "target")]
    changed: bool,
    /// Compare only this target. Repeat the option for more targets.
    #[arg(long, value_name = "KIND:ID")]
    target: Vec<String>,
    /// Change nothing. Exit with 2 if a counter has drifted.
    #[arg(long)]
    dry_run: bool,
    /// Ignore the limits repair_targets_max_percent and repair_abs_max.
    #[arg(long)]
    force: bool,
    /// With --force: don't ask for confirmation. Needed without a terminal.
    #[arg(long)]
    yes: bool,
    /// Stop after this time, between two pages: 90s, 30m, 2h. The report contains the number of remaining targets.
    /// --resume continues with these targets.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    run_time: Option<Duration>,
    /// Continue the last full run that was stopped, was killed, or ran out of time.
    #[arg(long, conflicts_with_all = ["scrub", "changed", "target", "dry_run"])]
    resume: bool,
    /// Mark all counters in Redis as unknown, and load them from MySQL again. Use this option if most counters are
    /// wrong. Until the counters are loaded, readers ask MySQL.
    #[arg(long, conflicts_with_all = ["full", "scrub", "changed", "target", "dry_run", "resume"])]
    reload: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl ReconcileArgs {
    pub(super) fn forced(dry_run: bool, format: Format) -> Self {
        Self { dry_run, force: true, yes: true, format, ..Self::default() }
    }
}

pub(super) async fn run(config: &Config, args: &ReconcileArgs) -> Result<u8> {
    let mode = match (args, args.target.as_slice()) {
        (ReconcileArgs { reload: true, .. }, _) => Mode::Rebuild,
        (ReconcileArgs { changed: true, .. }, _) => Mode::Changed,
        (ReconcileArgs { scrub: true, .. }, _) => Mode::Scrub,
        (_, []) => Mode::Full,
        (_, targets) => {
            Mode::Targets(targets.iter().map(|text| parse_target(text, &config.kinds)).collect::<Result<_>>()?)
        }
    };
    if args.force
        && !args.dry_run
        && let Some(code) = RECONCILE.ends_unlisted(args.yes)?
    {
        return Ok(code);
    }
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let ReconcileArgs { dry_run, force, run_time: run_time_max, resume, reload, .. } = *args;
    let options = RunOptions { dry_run, force, resume, run_time_max };
    let mut reconciler = Reconciler::new(config, &servers, mode)?;
    reconciler.reload = reload;
    let ran = run::once(&servers, config, &reconciler, options, progress_sink(), &stop).await?;
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, args.format)?;
    Ok(match report {
        _ if report.head.ended == Ended::Stopped && are_paused(&servers, reconciler.needs(config))? => EXIT_TRY_LATER,
        _ if matches!(report.head.ended, Ended::Stopped | Ended::LimitExceeded) => EXIT_FAILED,
        // Unknown counters are drift, too: without --dry-run, the run would load them.
        _ if args.dry_run && report.drifted + report.counters_off + report.unknown > 0 => EXIT_DRIFT,
        _ => EXIT_DONE,
    })
}
