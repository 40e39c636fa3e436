//! `tallyd admin filters`: rebuilds or deletes the Bloom filters.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::{JOB, MODE, lua};
use tallyd_base::cli::consent::{Consent, Rule, not_paused};
use tallyd_base::cli::{EXIT_DONE, Usage};
use tallyd_base::config::{Config, FILTER_GAP_MAX};
use tallyd_base::jobs::JobError;
use tallyd_base::servers::Servers;

#[derive(Debug, Subcommand)]
pub enum FiltersCommand {
    /// Rebuild all Bloom filters with the daemon's next run, for example after writing likes to MySQL without
    /// lua/like.lua.
    Rebuild,
    /// Delete all Bloom filters in Redis. First switch them off: docs/filters.md.
    Drop(Consent),
}

pub const DROP: Rule =
    Rule::new("admin filters drop", "all Bloom filters", "no daemon has filters", "configure `[filter]`");

/// Within this time, a daemon with filters starts and finishes at least one filter run.
const IDLE_MIN: Duration = FILTER_GAP_MAX.saturating_add(Duration::from_mins(5));

pub async fn run(config: &Config, command: &FiltersCommand) -> Result<u8> {
    match command {
        FiltersCommand::Rebuild => rebuild(config).await,
        FiltersCommand::Drop(consent) => drop_all(config, consent).await,
    }
}

async fn rebuild(config: &Config) -> Result<u8> {
    if config.filter.likes_min == 0 {
        return Err(
            Usage("there are no filters, because [filter] likes_min is 0: set likes_min first".to_owned()).into()
        );
    }
    let servers = Servers::checked(config).await?;
    // The next run finds no mark of an earlier run, so it trusts no filter.
    servers.store.forget_marks(JOB, MODE).await?;
    writeln!(std::io::stdout(), "the daemon's next run deletes all filters and rebuilds them").context("print")?;
    Ok(EXIT_DONE)
}

async fn drop_all(config: &Config, consent: &Consent) -> Result<u8> {
    if config.filter.is_on() {
        let advice =
            "set asked = false and reload all daemons, wait two minutes, then remove [filter] and restart them";
        return Err(Usage(format!("[filter] likes_min is {}: {advice}", config.filter.likes_min)).into());
    }
    let servers = Servers::checked(config).await?;
    not_paused(&servers.store).await?;
    let (job, (now, _)) = (JOB, servers.store.clock().await?);
    let since = now.before(IDLE_MIN);
    let last = servers.store.ended_runs(job, MODE, since, 1).await?;
    let running = servers.store.running_jobs().await?.into_iter().find(|run| run.job == job);
    if let Some(owner) = running.map(|run| run.owner).or_else(|| Some(last.first()?.owner.clone())) {
        let text = format!(
            "{owner} updated filters within the last {} minutes: restart this daemon without [filter], then try again after that time",
            IDLE_MIN.as_secs() / 60
        );
        return Err(JobError::NotNow(text).into());
    }
    let keys = lua::drop_all_filters(&servers.cache, true).await?;
    if let Some(code) = consent.ends(DROP, &[format!("delete all Bloom filters in Redis: {keys} keys")])? {
        return Ok(code);
    }
    // A daemon that enables filters again must not trust the deleted filters.
    servers.store.forget_marks(job, MODE).await?;
    let deleted = lua::drop_all_filters(&servers.cache, false).await?;
    writeln!(std::io::stdout(), "{deleted} keys deleted").context("print")?;
    Ok(EXIT_DONE)
}
