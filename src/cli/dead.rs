//! `tallyd dead`: shows, replays and deletes messages that could not be applied.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::rules::DEAD_PURGE;
use super::{EXIT_DONE, EXIT_FAILED, Format, Usage, edit, parse_since, parse_time};
use crate::dead_letters::preview::Judge;
use crate::dead_letters::replay::Replay;
use crate::dead_letters::{self, Which, purge, returned};
use crate::letter::text::printable_json;
use tallyd_base::config::Config;
use tallyd_base::runtime::clock;
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;
use tallyd_core::event::Reason;
use tallyd_core::model::Micros;
use tallyd_mysql::letters::Selection;

#[derive(Debug, Subcommand)]
pub(super) enum DeadCommand {
    /// List the newest dead letters, after collecting the messages that RabbitMQ dead-lettered.
    List(ListArgs),
    /// Show all details of dead letters, and whether tallyd would accept them now.
    Show {
        /// Show the dead letters with these numbers.
        #[arg(value_name = "ID", required = true)]
        ids: Vec<u64>,
        /// Print the body of one dead letter, byte by byte.
        #[arg(long, conflicts_with = "format")]
        raw: bool,
        /// Print the dead letters as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Publish dead letters again, as producers do. Skip and report dead letters that would be rejected again.
    Replay(ReplayArgs),
    /// Delete dead letters. Dead letters that were never replayed are deleted only if you give their numbers or --open.
    Purge(PurgeArgs),
}

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    of: OfArgs,
    /// List only dead letters that were never replayed.
    #[arg(long)]
    open: bool,
    /// List at most this many dead letters.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000), conflicts_with = "summary")]
    limit: u64,
    /// Print the number of dead letters for each reason.
    #[arg(long)]
    summary: bool,
    /// Don't collect messages that RabbitMQ dead-lettered. Use this option if the account can't read the queue of these
    /// messages.
    #[arg(long)]
    no_returned: bool,
    /// Print the list as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Args)]
struct OfArgs {
    /// Select only dead letters with this reason.
    #[arg(long, value_parser = PossibleValuesParser::new(Reason::ALL.map(Reason::code)), hide_possible_values = true)]
    reason: Option<String>,
    /// Select only dead letters that were first seen after this time: 30m, 2h or 7d ago, or 2026-11-21T10:00:00Z.
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    since: Option<Micros>,
}

#[derive(Debug, Args)]
pub(super) struct ReplayArgs {
    /// Replay the dead letters with these numbers.
    #[arg(value_name = "ID", conflicts_with_all = ["reason", "since", "all", "limit"])]
    ids: Vec<u64>,
    #[command(flatten)]
    of: OfArgs,
    /// Replay all dead letters that were never replayed.
    #[arg(long)]
    all: bool,
    /// Replay at most this many dead letters, oldest first.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Send nothing. Print which dead letters would be replayed, and which would be rejected again.
    #[arg(long)]
    dry_run: bool,
    /// Open the body of one dead letter in $VISUAL or $EDITOR, and send the edited body.
    #[arg(long, conflicts_with_all = ["reason", "since", "all", "dry_run"])]
    edit: bool,
    /// Also replay dead letters that would be rejected again, and dead letters that were replayed before.
    #[arg(long)]
    force: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Args)]
pub(super) struct PurgeArgs {
    /// Delete the dead letters with these numbers, even if they were never replayed.
    #[arg(value_name = "ID", conflicts_with_all = ["reason", "older_than", "replayed", "open"])]
    ids: Vec<u64>,
    /// Delete replayed dead letters with this reason.
    #[arg(long, value_parser = PossibleValuesParser::new(Reason::ALL.map(Reason::code)), hide_possible_values = true)]
    reason: Option<String>,
    /// Delete replayed dead letters that were first seen longer ago than this time: 2h, 30d.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    older_than: Option<Duration>,
    /// Delete all replayed dead letters.
    #[arg(long)]
    replayed: bool,
    /// With --reason or --older-than: also delete dead letters that were never replayed.
    #[arg(long, conflicts_with = "replayed")]
    open: bool,
    /// Delete nothing. Print the number of dead letters that would be deleted.
    #[arg(long)]
    dry_run: bool,
    /// Don't ask for confirmation. Needed without a terminal.
    #[arg(long)]
    yes: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(super) async fn run(config: &Config, command: DeadCommand) -> Result<u8> {
    match &command {
        DeadCommand::Replay(args) => args.check()?,
        DeadCommand::Purge(args) => args.check()?,
        DeadCommand::Show { ids, raw: true, .. } => only_one(ids, "--raw prints one body").map(drop)?,
        _ => {}
    }
    let servers = Servers::new(config)?.impatient();
    match &command {
        // These commands need no codes, so they skip the check of the codes. They must work even with a wrong
        // configuration, which can be the cause of the dead letters.
        DeadCommand::List(_) | DeadCommand::Purge(_) => servers.check_schema().await.map(drop)?,
        DeadCommand::Show { .. } | DeadCommand::Replay(_) => servers.check(config).await?,
    }
    match command {
        DeadCommand::List(args) => list(config, &servers, args).await,
        DeadCommand::Show { ids, raw, format } => show(config, &servers, &ids, raw, format).await,
        DeadCommand::Replay(args) if args.edit => edited(config, &servers, &args).await,
        DeadCommand::Replay(args) => replay(config, &servers, args).await,
        DeadCommand::Purge(args) => purge_them(&servers, args).await,
    }
}

async fn list(config: &Config, servers: &Servers, args: ListArgs) -> Result<u8> {
    let Servers { store, broker, .. } = servers;
    let selection = args.of.selection(args.open.then_some(false));
    let max = config.consumer.dead_letters_max;
    let returned = if args.no_returned { None } else { Some(returned::take_in(store, broker, max).await) };
    match args.summary {
        true => print(&dead_letters::summary(store, &selection, returned).await?, args.format)?,
        false => print(&dead_letters::list(store, &selection, args.limit, returned).await?, args.format)?,
    }
    Ok(EXIT_DONE)
}

async fn show(config: &Config, servers: &Servers, ids: &[u64], raw: bool, format: Format) -> Result<u8> {
    if raw {
        let letter = dead_letters::whole(&servers.store, only_one(ids, "--raw prints one body")?).await?;
        let mut out = std::io::stdout();
        out.write_all(&letter.body).and_then(|()| out.flush()).context("print the body")?;
    } else {
        print(
            &dead_letters::show(&Judge::new(config, &servers.broker), &servers.store, ids, clock::now()).await?,
            format,
        )?;
    }
    Ok(EXIT_DONE)
}

async fn replay(config: &Config, servers: &Servers, args: ReplayArgs) -> Result<u8> {
    let ReplayArgs { ids, of, limit, dry_run, force, format, .. } = args;
    let which = match ids.is_empty() {
        // Replayed letters are excluded, even with --force.
        true => Which::All(of.selection(Some(false))),
        false => Which::Ids(ids),
    };
    let judge = Judge::new(config, &servers.broker);
    let report = sender(config, servers, &judge, force, dry_run).run(&which, limit, &shutdown::on_signals()?).await?;
    print(&report, format)?;
    Ok(if report.is_done() || dry_run { EXIT_DONE } else { EXIT_FAILED })
}

async fn edited(config: &Config, servers: &Servers, args: &ReplayArgs) -> Result<u8> {
    let id = only_one(&args.ids, "--edit opens one body")?;
    let judge = Judge::new(config, &servers.broker);
    let letter = dead_letters::whole(&servers.store, id).await?;
    if letter.replayed_at.is_some() && !args.force {
        return Err(Usage(format!("dead letter {id} was replayed before: add --force to replay it again")).into());
    }
    let Some(body) = edit::edit(&letter, &judge, args.force)? else {
        writeln!(std::io::stderr(), "tallyd: nothing was replayed").context("print")?;
        return Ok(EXIT_FAILED);
    };
    let report = sender(config, servers, &judge, args.force, false).edited(&letter, body).await?;
    print(&report, args.format)?;
    Ok(if report.is_done() { EXIT_DONE } else { EXIT_FAILED })
}

fn sender<'a>(config: &Config, servers: &'a Servers, judge: &'a Judge, force: bool, dry_run: bool) -> Replay<'a> {
    let (store, broker) = (&servers.store, &servers.broker);
    Replay { store, broker, judge, has_filters: config.filter.is_on(), force, dry_run }
}

async fn purge_them(servers: &Servers, args: PurgeArgs) -> Result<u8> {
    let PurgeArgs { mut ids, reason, older_than, open, dry_run, yes, format, .. } = args;
    ids.sort_unstable();
    ids.dedup();
    let before = older_than.map(|age| clock::now().before(age));
    let which = match ids.is_empty() {
        true => Which::All(Selection { reason, since: None, before, replayed: (!open).then_some(true) }),
        false => Which::Ids(ids),
    };
    let store = &servers.store;
    let meant = purge::count(store, &which).await?;
    if dry_run {
        print(&purge::Report::dry(meant), format)?;
        return Ok(EXIT_DONE);
    }
    let open = if meant.open > 0 { format!(", {} of which were never replayed", meant.open) } else { String::new() };
    let plan = [format!("delete {} dead letters{open}", meant.all)];
    if meant.all > 0
        && let Some(code) = DEAD_PURGE.ends(&plan, yes)?
    {
        return Ok(code);
    }
    let report = purge::purge(store, &which, meant, &shutdown::on_signals()?).await?;
    print(&report, format)?;
    Ok(if report.stopped { EXIT_FAILED } else { EXIT_DONE })
}

fn only_one(ids: &[u64], why: &str) -> Result<u64, Usage> {
    match ids {
        [id] => Ok(*id),
        _ => Err(Usage(format!("{why}: name one dead letter"))),
    }
}

impl ReplayArgs {
    fn check(&self) -> Result<(), Usage> {
        if self.edit {
            return only_one(&self.ids, "--edit opens one body").map(drop);
        }
        let is_limited = !self.ids.is_empty() || self.all || self.of.reason.is_some() || self.of.since.is_some();
        is_limited
            .then_some(())
            .ok_or_else(|| Usage("select dead letters by number, --reason, --since, or --all".to_owned()))
    }
}

impl PurgeArgs {
    fn check(&self) -> Result<(), Usage> {
        let is_limited = !self.ids.is_empty() || self.replayed || self.reason.is_some() || self.older_than.is_some();
        is_limited
            .then_some(())
            .ok_or_else(|| Usage("select dead letters by number, --reason, --older-than, or --replayed".to_owned()))
    }
}

impl OfArgs {
    fn selection(self, replayed: Option<bool>) -> Selection {
        Selection { reason: self.reason, since: self.since, before: None, replayed }
    }
}

/// Escapes control characters, because text from unknown producers could change the terminal's state.
fn print(report: &(impl Serialize + std::fmt::Display), format: Format) -> Result<()> {
    let text = match format {
        Format::Text => report.to_string(),
        Format::Json => printable_json(&serde_json::to_string(report).context("write the report")?),
    };
    writeln!(std::io::stdout(), "{text}").context("print the report")
}
