//! `tallyd admin recount`: compares the table `counter` with the tables that determine its counters.

use std::fmt;
use std::io::Write;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::Recounter;
use crate::report::Report;
use tallyd_base::cli::consent::{NONE, REPAIR_LIMITS, Rule};
use tallyd_base::cli::{
    EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, are_paused, ended, exit_code, print,
    progress_sink,
};
use tallyd_base::config::{Config, Recount};
use tallyd_base::jobs::run::{self, Ended, Job as _, RunOptions};
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;

pub const FORCE: Rule =
    Rule::new("admin recount --force", "numbers in `counter` that the table lacks", REPAIR_LIMITS, NONE);

#[derive(Debug, Args)]
pub struct RecountArgs {
    /// Run only these recounts, for example video:comment [default: every [[recount]]].
    #[arg(value_name = "KIND:METRIC")]
    names: Vec<String>,
    /// Change nothing. Exit with 2 if a counter has drifted.
    #[arg(long)]
    dry_run: bool,
    /// Ignore the limits repair_targets_max_percent and repair_abs_max of [reconcile].
    #[arg(long)]
    force: bool,
    /// With --force: don't ask for confirmation. Needed without a terminal.
    #[arg(long)]
    yes: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Serialize)]
struct Reports {
    recounts: Vec<Report>,
}

pub async fn run(config: &Config, args: &RecountArgs) -> Result<u8> {
    let chosen = chosen(config, &args.names)?;
    if args.force
        && !args.dry_run
        && let Some(code) = FORCE.ends_unlisted(args.yes)?
    {
        return Ok(code);
    }
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let options = RunOptions { dry_run: args.dry_run, force: args.force, ..RunOptions::default() };
    let (mut recounts, mut codes) = (Vec::new(), Vec::new());
    for recount in chosen {
        if stop.is_cancelled() {
            codes.push(EXIT_FAILED);
            break;
        }
        let recounter = Recounter::new(config, recount)?;
        match run::once(&servers, config, &recounter, options, progress_sink(), &stop).await {
            Ok(ran) => match ended(ran)? {
                Some(report) => {
                    let is_paused =
                        report.head.ended == Ended::Stopped && are_paused(&servers, recounter.needs(config))?;
                    codes.push(if is_paused { EXIT_TRY_LATER } else { code(&report) });
                    recounts.push(report);
                }
                None => codes.push(EXIT_TRY_LATER),
            },
            // An error in one recount doesn't stop the others.
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "tallyd: {error:#}");
                codes.push(exit_code(&error.into(), |_| None));
            }
        }
    }
    if !recounts.is_empty() {
        print(&Reports { recounts }, args.format)?;
    }
    let worst = [EXIT_FAILED, EXIT_TRY_LATER, EXIT_DRIFT].into_iter().find(|code| codes.contains(code));
    Ok(worst.or(codes.into_iter().max()).unwrap_or(EXIT_DONE))
}

fn chosen<'a>(config: &'a Config, names: &[String]) -> Result<Vec<&'a Recount>> {
    let known = || config.recounts.iter().map(Recount::name).collect::<Vec<_>>().join(", ");
    if config.recounts.is_empty() {
        return Err(Usage("there is nothing to recount: the configuration has no [[recount]]".to_owned()).into());
    }
    if names.is_empty() {
        return Ok(config.recounts.iter().collect());
    }
    let find = |name: &String| {
        let found = config.recounts.iter().find(|recount| recount.name() == *name);
        found.ok_or_else(|| {
            Usage(format!("no [[recount]] is named {name}: the configured names are {}", known())).into()
        })
    };
    names.iter().map(find).collect()
}

fn code(report: &Report) -> u8 {
    match report {
        _ if report.head.ended != Ended::Done => EXIT_FAILED,
        _ if report.head.dry_run && report.drifted > 0 => EXIT_DRIFT,
        _ => EXIT_DONE,
    }
}

impl fmt::Display for Reports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, report) in self.recounts.iter().enumerate() {
            let line = if place == 0 { "" } else { "\n" };
            write!(f, "{line}{report:#}")?;
        }
        Ok(())
    }
}
