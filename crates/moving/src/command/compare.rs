//! `tallyd admin compare`: compares an old site's numbers with tallyd's.

use anyhow::Result;
use clap::Args;

use crate::compare::{Comparer, Subject};
use tallyd_base::cli::{EXIT_DONE, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, ended, print, progress_sink};
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, Ended, RunOptions};
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;
use tallyd_core::template::Template;

#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Read the old site's numbers from these keys in Redis, for example like:count:{id}. Write the full names of the
    /// keys, with any prefix.
    #[arg(long, value_name = "PATTERN")]
    keys: String,
    /// Compare targets of this kind [default: the only one of [kinds]].
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// Compare this metric.
    #[arg(long, value_name = "METRIC", default_value = tallyd_base::config::LIKE)]
    metric: String,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub async fn run(config: &Config, args: &CompareArgs) -> Result<u8> {
    let comparer = Comparer { subject: subject(config, args)?, limits: config.reconcile.clone() };
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let ran = run::once(&servers, config, &comparer, RunOptions::default(), progress_sink(), &stop).await?;
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, args.format)?;
    Ok(if report.head.ended == Ended::Done { EXIT_DONE } else { EXIT_FAILED })
}

fn subject(config: &Config, args: &CompareArgs) -> Result<Subject> {
    let kinds = &config.kinds;
    let kind = match (&args.kind, kinds.0.len()) {
        (Some(kind), _) => kind.clone(),
        (None, 1) => kinds.0.keys().cloned().collect(),
        (None, _) => return Err(Usage("[kinds] has several kinds: choose one with --kind".to_owned()).into()),
    };
    let code = kinds.named(&kind).ok_or_else(|| Usage(format!("--kind {kind} is not in [kinds]")))?;
    let metric = args.metric.clone();
    let metric_code =
        config.metrics.named(&metric).ok_or_else(|| Usage(format!("--metric {metric} is not in [metrics]")))?;
    let keys = Template::parse(&args.keys).map_err(|problem| Usage(format!("--keys {} {problem}", args.keys)))?;
    Ok(Subject { keys, kind: (kind, code), metric: (metric, metric_code) })
}
