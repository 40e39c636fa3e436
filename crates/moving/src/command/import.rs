//! `tallyd import`: copies and compares old tables.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::config::{self, Import, MOVE_FILE, Moves};
use crate::import::{Importer, Pass};
use tallyd_base::cli::consent::{REPAIR_LIMITS, Rule, all_stopped};
use tallyd_base::cli::{
    EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, ended, parse_time, print, progress_sink,
};
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, Ended, RunOptions};
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;

pub const DELETIONS: Rule =
    Rule::new("import --deletions", "likes that the old table lacks", REPAIR_LIMITS, "import again");

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Use this [[import]] [default: the only one].
    name: Option<String>,
    /// Remove rows that this import wrote and that the old table no longer contains. Keep later events.
    #[arg(long)]
    deletions: bool,
    /// Compare the old table with tallyd's. Exit with 2 if the tables differ. Change nothing.
    #[arg(long, conflicts_with_all = ["deletions", "dry_run", "resume"])]
    verify: bool,
    /// Only read the old table, and report the rows that would be written. Change nothing.
    #[arg(long)]
    dry_run: bool,
    /// With --deletions: ignore the limit repair_targets_max_percent of [reconcile].
    #[arg(long, requires = "deletions")]
    force: bool,
    /// Don't ask for confirmation. Needed without a terminal.
    #[arg(long)]
    yes: bool,
    /// Continue where the last run was stopped or killed, or ran out of time.
    #[arg(long, conflicts_with = "dry_run")]
    resume: bool,
    /// Stop after this time, between two pages: 90s, 30m, 2h.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    run_time: Option<Duration>,
    /// With --deletions: check a missing row again after this time. Choose a time longer than a replica can lag.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "60s", requires = "deletions")]
    look_again: Duration,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub async fn run(path: &Path, config: &Config, args: &ImportArgs) -> Result<u8> {
    let moves = config::load(path, config)?;
    let import = chosen(&moves, args.name.as_deref())?;
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let pass = match args {
        ImportArgs { verify: true, .. } => Pass::Verify,
        ImportArgs { deletions: true, .. } => Pass::Deletions { look_again_after: args.look_again },
        _ => Pass::Rows,
    };
    if !import.is_of_likes() && pass == Pass::Rows && !args.dry_run {
        // The import sets numbers, so it would take back what daemons have counted but not yet added to Redis.
        all_stopped(&servers).await?;
    }
    if args.deletions
        && !args.dry_run
        && let Some(code) = DELETIONS.ends_unlisted(args.yes)?
    {
        return Ok(code);
    }
    let importer = Importer::new(config, import, pass, &servers)?;
    let ImportArgs { dry_run, force, resume, run_time: run_time_max, .. } = *args;
    let options = RunOptions { dry_run, force, resume, run_time_max };
    let ran = run::once(&servers, config, &importer, options, progress_sink(), &stop).await?;
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, args.format)?;
    Ok(match report.head.ended {
        Ended::Stopped | Ended::LimitExceeded => EXIT_FAILED,
        _ if report.differing > 0 => EXIT_DRIFT,
        Ended::TimeOver => EXIT_TRY_LATER,
        Ended::Done => EXIT_DONE,
    })
}

fn chosen<'a>(moves: &'a Moves, name: Option<&str>) -> Result<&'a Import> {
    let known = || moves.imports.iter().map(|import| import.name.as_str()).collect::<Vec<_>>().join(", ");
    let usage = |text: String| Err(Usage(text).into());
    match (name, moves.imports.as_slice()) {
        (_, []) => usage(format!("there is nothing to import: {MOVE_FILE} beside the configuration has no [[import]]")),
        (None, [only]) => Ok(only),
        (None, _) => usage(format!("several [[import]] blocks are configured: name one of {}", known())),
        (Some(name), all) => match all.iter().find(|import| import.name == name) {
            Some(import) => Ok(import),
            None => usage(format!("no [[import]] is named {name}: the configured names are {}", known())),
        },
    }
}
