//! `tallyd config show` and `tallyd config schema`.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use super::EXIT_DONE;
use tallyd_base::config::{self, ConfigError, schema};

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// Print the origin of each setting: a line of the file, an environment variable, or the default.
    #[arg(long)]
    origin: bool,
    /// Print the configuration as TOML or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: ShowFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ShowFormat {
    /// Print the configuration in the format of the file.
    #[default]
    Toml,
    /// Print one JSON object for programs.
    Json,
}

pub(super) fn show(path: &Path, args: &ShowArgs) -> Result<u8> {
    let mut loaded = config::examine(path).map_err(ConfigError::from)?;
    loaded.log_as_the_environment_says();
    let text = match args.format {
        ShowFormat::Toml => loaded.to_toml(args.origin).trim_end().to_owned(),
        ShowFormat::Json => serde_json::to_string(&loaded.to_json(args.origin)).context("write the configuration")?,
    };
    writeln!(std::io::stdout(), "{text}").context("print the configuration")?;
    Ok(EXIT_DONE)
}

pub(super) fn print_schema() -> Result<u8> {
    let text = serde_json::to_string_pretty(schema()).context("write the schema")?;
    writeln!(std::io::stdout(), "{text}").context("print the schema")?;
    Ok(EXIT_DONE)
}
