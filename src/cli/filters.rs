//! `tallyd filters`.

use std::io::Write;

use anyhow::{Context, Result};
use clap::Subcommand;

use super::{EXIT_DONE, Usage};
use crate::config::Config;
use crate::jobs::filters;
use crate::servers::Servers;
use tallyd_core::job_name::JobName;

#[derive(Debug, Subcommand)]
pub(super) enum FiltersCommand {
    /// Rebuild all Bloom filters by the daemon's next run, for instance after likes came into MySQL without lua/like.lua.
    Rebuild,
}

pub(super) async fn run(config: &Config, command: &FiltersCommand) -> Result<u8> {
    match command {
        FiltersCommand::Rebuild => rebuild(config).await,
    }
}

async fn rebuild(config: &Config) -> Result<u8> {
    if config.filter.likes_min == 0 {
        return Err(Usage("there are no filters: [filter] likes_min is 0".to_owned()).into());
    }
    let servers = Servers::checked(config).await?;
    // Without one before it the next run trusts no filter.
    servers.store.forget_marks(JobName::Filters.name(), filters::MODE).await?;
    writeln!(std::io::stdout(), "the daemon's next run deletes all filters and builds them again").context("print")?;
    Ok(EXIT_DONE)
}
