//! `tallyd archive` and `tallyd board`: archive, show, save and restore boards.

use std::io::Write;

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};

use super::rules::{ARCHIVE, BOARD_RESTORE, BOARD_SNAPSHOT};
use super::{EXIT_DONE, EXIT_FAILED, EXIT_TRY_LATER, Format, are_paused, ended, print, progress_sink};
use crate::jobs::archive::{self, Archiver, Scope};
use crate::jobs::snapshots::{Restore, Snapshots};
use tallyd_base::boards::Boards;
use tallyd_base::cli::consent::Consent;
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, Ended, Job as _, RunOptions, RunReport as _};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::clock;
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;
use tallyd_core::archive::Snapshot;
use tallyd_core::model::BoardPeriod;
use tallyd_redis::ranks::Ranking;

#[derive(Debug, Args)]
pub(super) struct ArchiveArgs {
    /// Archive only this board.
    #[arg(long, value_name = "NAME")]
    board: Option<String>,
    /// Archive only this period: 2026-11-21, 2026-W47 or 2026-11.
    #[arg(long)]
    period: Option<String>,
    /// Change nothing. Print which boards would be archived or removed, and why the other boards would not.
    #[arg(long)]
    dry_run: bool,
    /// With --period: don't ask for confirmation. Needed without a terminal.
    #[arg(long)]
    yes: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Subcommand)]
pub(super) enum BoardCommand {
    /// List each board's current period, and the periods that are archived or being archived.
    List {
        /// Print the list as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Print the best members of a board, from Redis or from the archive.
    Top {
        /// Name the board.
        name: String,
        /// Name the period: 2026-11-21, 2026-W47, 2026-11 or total [default: the current one].
        period: Option<String>,
        /// Print this many places.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        count: u64,
        /// Rank equal scores in this way.
        #[arg(long, value_enum, default_value_t)]
        ranking: RankingArg,
        /// Print comma-separated values.
        #[arg(long, conflicts_with = "format")]
        csv: bool,
        /// Print the board as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Take a snapshot of boards that are not archived yet, even if no snapshot is due.
    Snapshot {
        /// Save only this board.
        name: Option<String>,
        /// Save only this period: 2026-11-21, 2026-W47, 2026-11 or total.
        period: Option<String>,
        /// Replace the last snapshot even if Redis has lost the board, or most of it.
        #[arg(long, requires = "period")]
        force: bool,
        /// With --force: change nothing. Print the snapshot that would be replaced.
        #[arg(long, requires = "force")]
        dry_run: bool,
        /// With --force: don't ask for confirmation. Needed without a terminal.
        #[arg(long)]
        yes: bool,
        /// Print the report as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Restore a board into Redis, from its snapshot plus later changes, or from the archive.
    Restore {
        /// Name the board.
        name: String,
        /// Name the period: 2026-11-21, 2026-W47, 2026-11 or total.
        period: String,
        /// Change nothing. Print the board that would be restored.
        #[arg(long)]
        dry_run: bool,
        /// Add the scores that are now in Redis to the scores of the snapshot. Use this option if Redis evicted only
        /// this board.
        #[arg(long)]
        add: bool,
        /// Don't ask for confirmation. Needed without a terminal.
        #[arg(long)]
        yes: bool,
        /// Print the report as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum RankingArg {
    /// Rank equals as 1, 2, 3, 4.
    #[default]
    Ordinal,
    /// Rank equals as 1, 2, 2, 4.
    Competition,
    /// Rank equals as 1, 2, 2, 3.
    Dense,
}

impl From<RankingArg> for Ranking {
    fn from(ranking: RankingArg) -> Self {
        match ranking {
            RankingArg::Ordinal => Self::Ordinal,
            RankingArg::Competition => Self::Competition,
            RankingArg::Dense => Self::Dense,
        }
    }
}

pub(super) async fn archive(config: &Config, args: ArchiveArgs) -> Result<u8> {
    if args.period.is_some()
        && !args.dry_run
        && let Some(code) = ARCHIVE.ends_unlisted(args.yes)?
    {
        return Ok(code);
    }
    let scope = Scope { board: args.board, period: args.period, dry_run: args.dry_run };
    let stop = shutdown::on_signals()?;
    let servers = Servers::checked(config).await?;
    let archiver = Archiver::new(config, scope);
    let ran = run::once(&servers, config, &archiver, RunOptions::default(), progress_sink(), &stop).await?;
    let is_stopped = matches!(&ran, Ran::Ended(report) if report.head.ended == Ended::Stopped);
    let code = report(ran, args.dry_run, args.format)?;
    Ok(if is_stopped && are_paused(&servers, archiver.needs(config))? { EXIT_TRY_LATER } else { code })
}

pub(super) async fn run(config: &Config, command: BoardCommand) -> Result<u8> {
    let servers = Servers::checked(config).await?;
    let boards = Boards { boards: &config.boards, store: &servers.store, cache: &servers.cache };
    match command {
        BoardCommand::List { format } => print(&boards.list(clock::now()).await?, format)?,
        BoardCommand::Top { name, period, count, ranking, csv, format } => {
            let top = boards.top(&name, period.as_deref(), count, ranking.into(), clock::now()).await?;
            match csv {
                true => write!(std::io::stdout(), "{}", top.to_csv()?).context("print the board")?,
                false => print(&top, format)?,
            }
        }
        BoardCommand::Snapshot { name, period, force, dry_run, yes, format } => {
            if force && let Some(code) = replaces(&servers, (&name, &period), &Consent { dry_run, yes }).await? {
                return Ok(code);
            }
            let scope = Scope { board: name, period, dry_run: false };
            let (snapshots, stop) = (Snapshots::new(config, Some(scope), force), shutdown::on_signals()?);
            let ran = run::once(&servers, config, &snapshots, RunOptions::default(), progress_sink(), &stop).await?;
            return report(ran, false, format);
        }
        BoardCommand::Restore { name, period, dry_run, add, yes, format } => {
            if !dry_run && let Some(code) = BOARD_RESTORE.ends_unlisted(yes)? {
                return Ok(code);
            }
            let (restore, stop) = (Restore::new(config, (&name, &period), add)?, shutdown::on_signals()?);
            let options = RunOptions { dry_run, ..RunOptions::default() };
            let ran = run::once(&servers, config, &restore, options, progress_sink(), &stop).await?;
            return report(ran, dry_run, format);
        }
    }
    Ok(EXIT_DONE)
}

/// Asks before a snapshot is replaced. Returns an exit code if the command must end here.
async fn replaces(
    servers: &Servers,
    (name, period): (&Option<String>, &Option<String>),
    consent: &Consent,
) -> Result<Option<u8>> {
    let (Some(board), Some(period)) = (name.clone(), period.clone()) else { return Ok(None) };
    let at = BoardPeriod { board, period };
    let plan = match servers.store.snapshot(&at).await? {
        None => format!("save {at}, which has no snapshot"),
        Some(Snapshot { members, .. }) => format!("replace the snapshot of {at}, which has {members} members"),
    };
    consent.ends(BOARD_SNAPSHOT, &[plan])
}

fn report(ran: Ran<archive::Report>, dry_run: bool, format: Format) -> Result<u8> {
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, format)?;
    Ok(if report.is_done() || dry_run { EXIT_DONE } else { EXIT_FAILED })
}
