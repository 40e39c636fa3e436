//! `tallyd admin erase`: deletes all data of a user or a target.

use std::collections::BTreeSet;

use anyhow::Result;
use clap::Args;

use crate::erase::Eraser;
use crate::sql;
use tallyd_base::cli::consent::{Consent, NONE, Rule};
use tallyd_base::cli::{
    EXIT_DONE, EXIT_FAILED, EXIT_TRY_LATER, Format, Usage, are_paused, ended, parse_target, print, progress_sink,
};
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, Ended, Job, RunOptions};
use tallyd_base::runtime::shutdown;
use tallyd_base::servers::Servers;
use tallyd_core::erase::Subject;
use tallyd_core::event::ID_MAX;
use tallyd_core::model::UserId;

pub const ERASE: Rule = Rule::new("admin erase", "a user or a target", "", NONE);

#[derive(Debug, Args)]
pub struct EraseArgs {
    /// Erase this user.
    #[arg(long, value_name = "ID", required_unless_present = "target", conflicts_with = "target",
        value_parser = clap::value_parser!(u64).range(1..=ID_MAX))]
    user: Option<u64>,
    /// Erase this target, for example video:42.
    #[arg(long, value_name = "KIND:ID")]
    target: Option<String>,
    /// Also remove the id from this board. Repeat the option for more boards. Without this option, the erase removes a
    /// target only from boards that a [[rule]] feeds.
    #[arg(long, value_name = "NAME")]
    board: Vec<String>,
    /// Continue where the last run for the same user or target was stopped or killed.
    #[arg(long, conflicts_with = "dry_run")]
    resume: bool,
    #[command(flatten)]
    consent: Consent,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub async fn run(config: &Config, args: &EraseArgs) -> Result<u8> {
    let subject = match (args.user, &args.target) {
        (Some(user), _) => Subject::User(UserId(user)),
        (None, target) => {
            let target = parse_target(target.as_deref().unwrap_or_default(), &config.kinds)?;
            Subject::Target { target, kind: config.kinds.name(target.kind) }
        }
    };
    let servers = Servers::checked(config).await?;
    for board in &args.board {
        check_board(config, &servers, board).await?;
    }
    let eraser = Eraser { config: config.clone(), subject, boards: args.board.clone() };
    let options = RunOptions { dry_run: args.consent.dry_run, resume: args.resume, ..RunOptions::default() };
    if !options.dry_run {
        let name = eraser.name();
        let plan = [
            format!("undo all likes of {name}, and delete its data in MySQL, Redis and the dead letters"),
            "archived boards keep the place, but replace the member's id by 0".to_owned(),
        ];
        if let Some(code) = args.consent.ends(ERASE, &plan)? {
            return Ok(code);
        }
    }
    let stop = shutdown::on_signals()?;
    let ran = run::once(&servers, config, &eraser, options, progress_sink(), &stop).await?;
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, args.format)?;
    Ok(match report.head.ended {
        Ended::Stopped if are_paused(&servers, eraser.needs(config))? => EXIT_TRY_LATER,
        _ if options.dry_run || report.is_complete() => EXIT_DONE,
        _ => EXIT_FAILED,
    })
}

/// Accepts a board that is configured, or that still has an archive after its removal from the configuration.
async fn check_board(config: &Config, servers: &Servers, board: &str) -> Result<()> {
    let known: BTreeSet<&str> = config.boards.iter().map(|board| board.name.as_str()).collect();
    if known.contains(board) || !sql::erase::boards::known_periods(&servers.store, board).await?.is_empty() {
        return Ok(());
    }
    let known = if known.is_empty() { "none".to_owned() } else { Vec::from_iter(known).join(", ") };
    Err(Usage(format!(
        "no board is named {board}: the configured boards are {known}, and MySQL has no period of {board}"
    ))
    .into())
}
