//! The small commands: `tallyd show`, `migrate` and `rebuild-filters`.

use std::io::Write;

use anyhow::{Context, Result};

use super::{EXIT_DONE, Format, Usage, parse_target, print};
use crate::config::Config;
use crate::jobs::filters;
use crate::servers::{Servers, numbers};
use tallyd_core::job_name::JobName;

pub(super) async fn show(config: &Config, target: &str, format: Format) -> Result<u8> {
    let target = parse_target(target, &config.kinds)?;
    let servers = Servers::checked(config).await?;
    print(&numbers::of(config, &servers.store, &servers.cache, target).await?, format)?;
    Ok(EXIT_DONE)
}

pub(super) async fn migrate(config: &Config) -> Result<u8> {
    let steps = Servers::new(config)?.store.migrate().await?;
    let text = match steps {
        0 => "the schema is up to date".to_owned(),
        steps => format!("the schema is up to date after {steps} steps"),
    };
    writeln!(std::io::stdout(), "{text}").context("print")?;
    Ok(EXIT_DONE)
}

pub(super) async fn rebuild_filters(config: &Config) -> Result<u8> {
    if config.filter.likes_min == 0 {
        return Err(Usage("there are no filters: [filter] likes_min is 0".to_owned()).into());
    }
    let servers = Servers::checked(config).await?;
    // Without one before it the next run trusts no filter.
    servers.store.forget_marks(JobName::Filters.name(), filters::MODE).await?;
    writeln!(std::io::stdout(), "the daemon's next run takes all filters away and builds them anew")
        .context("print")?;
    Ok(EXIT_DONE)
}
