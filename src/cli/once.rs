//! The small commands: `tallyd show` and `tallyd migrate`.

use std::io::Write;

use anyhow::{Context, Result};

use super::{EXIT_DONE, Format, parse_target, print};
use tallyd_base::config::Config;
use tallyd_base::servers::{Servers, numbers};

pub(super) async fn show(config: &Config, target: &str, format: Format) -> Result<u8> {
    let target = parse_target(target, &config.kinds)?;
    let servers = Servers::checked(config).await?;
    print(&numbers::of(config, &servers.store, &servers.cache, target).await?, format)?;
    Ok(EXIT_DONE)
}

pub(super) async fn migrate(config: &Config) -> Result<u8> {
    let steps = Servers::new(config)?.impatient().store.migrate().await?;
    let text = match steps {
        0 => "the schema is up to date".to_owned(),
        steps => format!("the schema is up to date after {steps} steps"),
    };
    writeln!(std::io::stdout(), "{text}").context("print")?;
    Ok(EXIT_DONE)
}
