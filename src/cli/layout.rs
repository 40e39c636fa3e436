//! `tallyd layout`: how counters are laid out in Redis, and how they move to another layout.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;
use tokio_util::sync::CancellationToken;

use super::{EXIT_DONE, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, ended, parse_time, print, to_whom};
use crate::app::Servers;
use crate::cache::Cache;
use crate::cache::keys::KindNames;
use crate::cache::layout::Layout;
use crate::config::{Config, ConfigError, EventClock, Redis};
use crate::layouts;
use crate::reconciler::report::{End, Report};
use crate::reconciler::{Mode, Order};
use crate::runtime::shutdown;

/// Runs until one finds nothing: what API servers count late in the second layout is off at first.
const RUNS_MAX: u32 = 4;

#[derive(Debug, Subcommand)]
pub(super) enum LayoutCommand {
    /// Measures what the counters of today would take in each layout, and says which one to choose.
    Advise {
        /// How it looks.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Brings the counters to the second of the two layouts that the API servers count in, while likes go on, and proves it.
    Migrate {
        /// The layout that they are in, for instance packed:13.
        #[arg(long, value_name = "LAYOUT")]
        from: String,
        /// The layout that they shall be in, for instance packed:16.
        #[arg(long, value_name = "LAYOUT")]
        to: String,
        /// Ends after so long, between two pages: 90s, 30m, 2h. The same command goes on there.
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        run_time: Option<Duration>,
        /// Repairs however much it is: the limits repair_targets_max_percent and repair_abs_max don't hold.
        #[arg(long)]
        force: bool,
        /// How each run's report looks.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Deletes the counters of a layout that nobody uses any more.
    Drop {
        /// The layout, for instance packed:13.
        layout: String,
        /// How its keys are named, where counter_key was set.
        #[arg(long, value_name = "PATTERN", default_value = "")]
        counter_key: String,
        /// Deletes nothing; says how many keys there are.
        #[arg(long)]
        dry_run: bool,
    },
}

pub(super) async fn run(config: &Config, command: LayoutCommand) -> Result<u8> {
    match command {
        LayoutCommand::Advise { format } => {
            let servers = Servers::new(config)?;
            servers.check_schema().await?;
            print(&layouts::advise(config, &servers.store, &servers.cache).await?, format)?;
            Ok(EXIT_DONE)
        }
        LayoutCommand::Migrate { from, to, run_time, force, format } => {
            let order = Order {
                mode: Mode::Layout,
                dry_run: false,
                force,
                resume: true,
                run_time_max: run_time,
                wait_max: None,
            };
            migrate(&target_of(config, &from, &to)?, &order, format).await
        }
        LayoutCommand::Drop { layout, counter_key, dry_run } => {
            drop_layout(config, &layout, &counter_key, dry_run).await
        }
    }
}

/// The configuration with the layout that the counters are brought to.
fn target_of(config: &Config, from: &str, to: &str) -> Result<Config> {
    let Some(moved) = config.redis.moved() else {
        return Err(Usage(
            "the configuration has no [redis.also]: first let tallyd and all API servers count in both layouts \
             (docs/layouts.md)"
                .to_owned(),
        )
        .into());
    };
    let layout = |redis: &Redis| redis.layout().map_err(|error| ConfigError(vec![error]));
    let (first, second) = (layout(&config.redis)?.to_string(), layout(&moved)?.to_string());
    let redis = match (from == first && to == second, from == second && to == first) {
        (true, _) => moved,
        // Back: the first layout is what the daemon compares, too.
        (_, true) => Redis { also: None, ..config.redis.clone() },
        _ => {
            return Err(Usage(format!(
                "the configuration has the layouts {first} and, in [redis.also], {second}: write --from {first} --to {second}"
            ))
            .into());
        }
    };
    let mut config = config.clone();
    config.redis = redis;
    // An API server counts in this layout a moment after it had the `at`, and on a Cluster at another node with its own clock.
    config.reconcile.event_clock = EventClock::Producer;
    Ok(config)
}

async fn migrate(config: &Config, order: &Order, format: Format) -> Result<u8> {
    let stop = CancellationToken::new();
    shutdown::on_signals(&stop)?;
    let servers = Servers::new(config)?;
    servers.check_schema().await?;
    let layout = servers.cache.keys.layout().to_string();
    for _ in 0..RUNS_MAX {
        let ran = servers.reconcile(config, order, to_whom(), &stop).await?;
        let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
        print(&report, format)?;
        match report.ended {
            End::Done if is_proof(&report) => {
                let (targets, undecided) = (report.checked, report.undecided);
                let but = match undecided {
                    0 => String::new(),
                    _ => format!(" ({undecided} of them were clicked on all the time, and not judged)"),
                };
                let text = format!("{layout} has what MySQL has: compared {targets} targets, none differs{but}");
                writeln!(std::io::stderr(), "{text}").context("print")?;
                return Ok(EXIT_DONE);
            }
            End::Done => {}
            End::TimeOver => return Ok(EXIT_TRY_LATER),
            End::Stopped | End::Braked => return Ok(EXIT_FAILED),
        }
    }
    let text = format!(
        "after {RUNS_MAX} runs targets still differ in {layout}: does every API server have [redis.also]? The reports name them; \
         once it is so, the same command goes on"
    );
    anyhow::bail!(text)
}

/// Whether a run has looked at all and found nothing to do.
fn is_proof(report: &Report) -> bool {
    report.resumed_run.is_none() && report.drifted + report.counters_off + report.left + report.unknown == 0
}

async fn drop_layout(config: &Config, name: &str, counter_key: &str, dry_run: bool) -> Result<u8> {
    let layout = Layout::named(name, counter_key).map_err(Usage)?;
    let used = std::iter::once(config.redis.layout()).chain(config.redis.also.as_ref().map(|also| also.layout()));
    // Keys of their own are the same ones with any number of buckets.
    if used
        .flatten()
        .any(|used| used.to_string() == name || (used.template.is_some() && used.template == layout.template))
    {
        return Err(
            Usage(format!("{name} is in the configuration: take it out of [redis] and [redis.also] first")).into()
        );
    }
    let redis = Redis {
        layout: layout.form,
        bucket_bits: layout.bucket_bits,
        counter_key: counter_key.to_owned(),
        also: None,
        ..config.redis.clone()
    };
    let cache = Cache::new(&redis, &config.metrics)?;
    let dropped = cache.drop_layout(&KindNames::new(&config.kinds), &config.metrics.codes(), dry_run).await?;
    let what = if dry_run { "to be deleted" } else { "deleted" };
    writeln!(std::io::stdout(), "{name}: {dropped} keys {what}").context("print")?;
    Ok(EXIT_DONE)
}
