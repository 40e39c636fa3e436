//! `tallyd board`: shows boards.

use std::io::Write;

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};

use super::{EXIT_DONE, Format, print};
use crate::app::Servers;
use crate::boards::Boards;
use crate::cache::ranks::Ranking;
use crate::config::Config;
use crate::model::Micros;

#[derive(Debug, Subcommand)]
pub(super) enum BoardCommand {
    /// Every board's current period, and those that are archived or on their way there.
    List {
        /// How the list looks.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// The best of a board, from Redis or from the archive.
    Top {
        /// The board's name.
        name: String,
        /// 2026-11-21, 2026-W47, 2026-11 or total; the current period where it is left out.
        period: Option<String>,
        /// How many places.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        count: u64,
        /// How equals are placed.
        #[arg(long, value_enum, default_value_t)]
        ranking: RankingArg,
        /// As comma-separated values.
        #[arg(long, conflicts_with = "format")]
        csv: bool,
        /// How the board looks.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum RankingArg {
    /// 1, 2, 3, 4.
    #[default]
    Ordinal,
    /// 1, 2, 2, 4.
    Competition,
    /// 1, 2, 2, 3.
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

/// Runs the command.
pub(super) async fn run(config: &Config, command: BoardCommand) -> Result<u8> {
    let servers = Servers::new(config)?;
    servers.check_schema().await?;
    let boards = Boards { boards: &config.boards, store: &servers.store, cache: &servers.cache };
    match command {
        BoardCommand::List { format } => print(&boards.list(Micros::now()).await?, format)?,
        BoardCommand::Top { name, period, count, ranking, csv, format } => {
            let top = boards.top(&name, period.as_deref(), count, ranking.into(), Micros::now()).await?;
            match csv {
                true => write!(std::io::stdout(), "{}", top.to_csv()?).context("print the board")?,
                false => print(&top, format)?,
            }
        }
    }
    Ok(EXIT_DONE)
}
