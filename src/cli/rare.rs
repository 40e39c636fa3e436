//! The rare commands, under `tallyd admin`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Subcommand;

use super::{after_restore, complete, control, healthcheck, layout, map, names, partitions, start_runtime};
use tallyd_base::config::{self, Config};

/// The rare commands, which `tallyd --help` does not list.
#[derive(Debug, Subcommand)]
pub(super) enum Admin {
    #[command(flatten)]
    Configured(Rare),
    #[command(flatten)]
    Alone(RareAlone),
}

/// Rare commands that need a valid configuration.
#[derive(Debug, Subcommand)]
pub(super) enum Rare {
    /// Compare `counter` with the tables that [[recount]] names, and correct `counter`.
    Recount(tallyd_recount::command::RecountArgs),
    /// Compare the numbers in an old site's keys with `counter`. Change nothing.
    Compare(tallyd_moving::command::compare::CompareArgs),
    /// Write likes to a site's old table, so that the site can return to that table. An [[export]] block defines the
    /// table.
    Export(tallyd_moving::command::export::ExportArgs),
    /// Delete a user or a target: undo all its likes, and delete all its data.
    Erase(tallyd_moving::command::erase::EraseArgs),
    /// Test a map on sample events, or remove a map.
    Map(map::MapArgs),
    /// Rebuild or delete the Bloom filters.
    #[command(subcommand)]
    Filters(tallyd_filters::command::FiltersCommand),
    /// Move counters to another layout in Redis, or delete the old layout.
    #[command(subcommand)]
    Layout(layout::LayoutCommand),
    /// Lower the number of partitions.
    #[command(subcommand)]
    Partitions(partitions::PartitionsCommand),
    /// Rename kinds and metrics.
    #[command(subcommand)]
    Names(names::NamesCommand),
    /// Bring Redis to the state of MySQL after restoring MySQL from a backup.
    AfterRestore(after_restore::AfterRestoreArgs),
}

/// Rare commands that need no valid configuration.
#[derive(Debug, Subcommand)]
pub(super) enum RareAlone {
    #[command(flatten)]
    Control(control::RareControl),
    /// Check whether a daemon is ready. Exit with 0 if it is ready, otherwise with 1.
    Healthcheck(healthcheck::HealthcheckArgs),
    /// Print the completion script for a shell.
    Completions {
        /// Complete for this shell.
        #[arg(value_enum)]
        shell: complete::Shell,
    },
    /// Print the manual page.
    Man {
        /// Write the pages into this folder, one for each command.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

pub(super) async fn run(path: &Path, config: &Config, command: Rare) -> Result<u8> {
    match command {
        Rare::Recount(args) => tallyd_recount::command::run(config, &args).await,
        Rare::Compare(args) => tallyd_moving::command::compare::run(config, &args).await,
        Rare::Export(args) => tallyd_moving::command::export::run(path, config, &args).await,
        Rare::Erase(args) => tallyd_moving::command::erase::run(config, &args).await,
        Rare::Map(args) => map::run(config, &args).await,
        Rare::Filters(command) => tallyd_filters::command::run(config, &command).await,
        Rare::Layout(command) => layout::run(config, command).await,
        Rare::Partitions(command) => partitions::run(config, &command).await,
        Rare::Names(command) => names::run(config, &command).await,
        Rare::AfterRestore(args) => after_restore::run(config, &args).await,
    }
}

pub(super) fn run_alone(command: RareAlone, given: Option<&Path>) -> Result<u8> {
    let path = given.unwrap_or(Path::new(config::DEFAULT_PATH));
    match command {
        RareAlone::Control(command) => start_runtime()?.block_on(control::run(path, command.into())),
        RareAlone::Healthcheck(args) => start_runtime()?.block_on(healthcheck::run(path, &args)),
        RareAlone::Completions { shell } => complete::completions(shell),
        RareAlone::Man { dir } => complete::man(dir.as_deref()),
    }
}
