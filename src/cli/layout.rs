//! `tallyd admin layout`: moves counters to another layout.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use tokio_util::sync::CancellationToken;

use super::rules::LAYOUT_DROP;
use super::{EXIT_DONE, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, ended, parse_time, print, progress_sink};
use crate::jobs::reconcile::report::Report;
use crate::jobs::reconcile::{Mode, Reconciler};
use tallyd_base::cli::consent::Consent;
use tallyd_base::config::{Also, Config, ConfigError, Redis};
use tallyd_base::jobs::run::{self, Ended, RunOptions};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;
use tallyd_redis::layout::Layout;

/// The maximum number of runs in a migration. A migration repeats its run until a run finds no difference. The first
/// runs find differences, because API servers start to count in the new layout with a delay.
const RUNS_MAX: u32 = 4;

/// While a run of the daemon is active, the command waits for this time, and then tries again to start its own run.
const FREE_EVERY: Duration = Duration::from_secs(2);

const LOST_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub(super) enum LayoutCommand {
    /// Copy the counters to the second layout, in which API servers already count, and verify the copies. Users can
    /// like targets meanwhile.
    Migrate {
        /// Move from this layout, for example packed:13.
        #[arg(long, value_name = "LAYOUT")]
        from: String,
        /// Move to this layout, for example packed:16.
        #[arg(long, value_name = "LAYOUT")]
        to: String,
        /// Stop after this time, between two pages: 90s, 30m, 2h. Run the same command again to continue.
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        run_time: Option<Duration>,
        /// Ignore the limits repair_targets_max_percent and repair_abs_max.
        #[arg(long)]
        force: bool,
        /// Print the report of each run as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Delete the counters of a layout that is no longer used.
    Drop {
        /// Delete this layout, for example packed:13.
        layout: String,
        /// Delete keys with this pattern. Use this option if counter_key was set.
        #[arg(long, value_name = "PATTERN", default_value = "")]
        counter_key: String,
        #[command(flatten)]
        consent: Consent,
    },
}

pub(super) async fn run(config: &Config, command: LayoutCommand) -> Result<u8> {
    match command {
        LayoutCommand::Migrate { from, to, run_time, force, format } => {
            let options = RunOptions { force, resume: true, run_time_max: run_time, ..RunOptions::default() };
            migrate(&target_of(config, &from, &to)?, options, format).await
        }
        LayoutCommand::Drop { layout, counter_key, consent } => {
            drop_layout(config, &layout, &counter_key, &consent).await
        }
    }
}

fn target_of(config: &Config, from: &str, to: &str) -> Result<Config> {
    let Some(moved) = config.redis.moved() else {
        let text = "the configuration has no [redis.also]: first configure tallyd and all API servers to count in both layouts (docs/layouts.md)";
        bail!(Usage(text.to_owned()));
    };
    let layout = |redis: &Redis| redis.layout().map_err(|error| ConfigError(vec![error]));
    let (first, second) = (layout(&config.redis)?.to_string(), layout(&moved)?.to_string());
    let redis = match (from == first && to == second, from == second && to == first) {
        (true, _) => moved,
        // Here, the operator moves the counters back to the first layout, which the daemon still compares with MySQL.
        (_, true) => config.redis.clone(),
        _ => bail!(Usage(format!(
            "[redis] has the layout {first}, and [redis.also] has {second}: write --from {first} --to {second}"
        ))),
    };
    Ok(Config { redis, ..config.clone() })
}

async fn migrate(config: &Config, options: RunOptions, format: Format) -> Result<u8> {
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let first = servers.cache.also(&config.redis, &config.metrics)?.context("there is only one layout")?;
    let (layout, began) = (servers.cache.keys.layout().to_string(), Instant::now());
    for number in 0..RUNS_MAX {
        let options =
            RunOptions { run_time_max: options.run_time_max.map(|max| max.saturating_sub(began.elapsed())), ..options };
        let lost = stop.child_token();
        let run = run_when_free(config, options, &servers, &lost, number > 0);
        tokio::pin!(run);
        let (ran, is_lost) = tokio::select! {
            ran = &mut run => (ran?, false),
            () = until_lost(&first, config) => {
                lost.cancel();
                (run.await?, true)
            }
        };
        let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
        print(&report, format)?;
        if is_lost {
            let text = "Redis has lost counters: wait until the daemon has loaded the counters of the other layout, then run the same command again";
            writeln!(std::io::stderr(), "tallyd: {text}").context("print")?;
            return Ok(EXIT_TRY_LATER);
        }
        match report.head.ended {
            Ended::Done if report.clean && unloaded(&servers.cache, config).await? == 0 => {
                writeln!(std::io::stderr(), "{layout} agrees with MySQL: {}", proof(&report)).context("print")?;
                return Ok(EXIT_DONE);
            }
            Ended::Done => {}
            Ended::TimeOver => return Ok(EXIT_TRY_LATER),
            Ended::Stopped | Ended::LimitExceeded => return Ok(EXIT_FAILED),
        }
    }
    let text = format!(
        "after {RUNS_MAX} runs, targets still differ in {layout}; the reports name them: check that every API server has [redis.also], \
         then run the same command again"
    );
    bail!(text)
}

fn proof(report: &Report) -> String {
    let Report { checked, undecided, .. } = report;
    let judged = checked.saturating_sub(*undecided);
    match undecided {
        0 => format!("compared {judged} targets, found no difference"),
        _ => format!(
            "compared {judged} targets, found no difference; {undecided} more targets changed at each check: a later reconcile \
             compares them"
        ),
    }
}

/// If `waits`, waits for the lock: the daemon can start its own run between two runs of the migration.
async fn run_when_free(
    config: &Config,
    options: RunOptions,
    servers: &Servers,
    stop: &CancellationToken,
    waits: bool,
) -> Result<Ran<Report>> {
    loop {
        let reconciler = Reconciler::new(config, servers, Mode::Layout)?;
        match run::once(servers, config, &reconciler, options, progress_sink(), stop).await? {
            Ran::Held { .. } if waits && !stop.is_cancelled() => {
                stop.run_until_cancelled(tokio::time::sleep(FREE_EVERY)).await;
            }
            ran => return Ok(ran),
        }
    }
}

async fn until_lost(first: &Cache, config: &Config) {
    let mut had_all = false;
    loop {
        // An unreachable Redis has not necessarily lost buckets.
        match unloaded(first, config).await {
            Ok(0) => had_all = true,
            Ok(_) if had_all => return,
            _ => {}
        }
        tokio::time::sleep(LOST_EVERY).await;
    }
}

async fn unloaded(cache: &Cache, config: &Config) -> Result<u64> {
    let mut unloaded = 0;
    for (_, kind) in KindNames::new(&config.kinds).all() {
        unloaded += cache.unloaded(kind, 0..cache.keys.buckets()).await?.lost;
    }
    Ok(unloaded)
}

async fn drop_layout(config: &Config, name: &str, counter_key: &str, consent: &Consent) -> Result<u8> {
    let layout = Layout::named(name, counter_key).map_err(Usage)?;
    let used = std::iter::once(config.redis.layout()).chain(config.redis.also.as_ref().map(Also::layout));
    let kinds: Vec<&str> = config.kinds.0.keys().map(String::as_str).collect();
    let metrics: Vec<&str> = config.metrics.0.keys().map(String::as_str).collect();
    if let Some(used) = used.flatten().find(|used| used.overlaps(&layout, &kinds, &metrics)) {
        let advice = "remove that layout from [redis] and [redis.also] first";
        bail!(Usage(format!("{name} shares keys with the configured layout {used}: {advice}")));
    }
    let redis = Redis {
        layout: layout.form,
        bucket_bits: layout.bucket_bits,
        counter_key: counter_key.to_owned(),
        also: None,
        ..config.redis.clone()
    };
    let cache = Cache::new(&redis, &config.metrics)?;
    let (kinds, metrics) = (KindNames::new(&config.kinds), config.metrics.codes());
    let keys = cache.drop_layout(&kinds, &metrics, true).await?;
    if let Some(code) = consent.ends(LAYOUT_DROP, &[format!("{layout}: {keys} keys to be deleted")])? {
        return Ok(code);
    }
    let dropped = cache.drop_layout(&kinds, &metrics, false).await?;
    writeln!(std::io::stdout(), "{layout}: {dropped} keys deleted").context("print")?;
    Ok(EXIT_DONE)
}
