//! `tallyd archive`: archives the boards of closed periods once.

use anyhow::Result;
use clap::Args;
use tokio_util::sync::CancellationToken;

use super::{Format, board, progress_sink};
use crate::config::Config;
use crate::jobs::archive::Scope;
use crate::jobs::runs;
use crate::runtime::shutdown;
use crate::servers::Servers;

#[derive(Debug, Args)]
pub(super) struct ArchiveArgs {
    /// Only this board.
    #[arg(long, value_name = "NAME")]
    board: Option<String>,
    /// Only this period: 2026-11-21, 2026-W47 or 2026-11.
    #[arg(long)]
    period: Option<String>,
    /// Changes nothing; says what would be archived and ended, and why the others not.
    #[arg(long)]
    dry_run: bool,
    /// How the report looks.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(super) async fn run(config: &Config, args: ArchiveArgs) -> Result<u8> {
    let scope = Scope { board: args.board, period: args.period, dry_run: args.dry_run };
    let stop = CancellationToken::new();
    shutdown::on_signals(&stop)?;
    let servers = Servers::new(config)?;
    servers.check(config).await?;
    let ran = runs::archive(&servers, config, &scope, progress_sink(), &stop).await?;
    board::report(ran, args.dry_run, args.format)
}
