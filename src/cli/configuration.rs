//! `tallyd config-schema` and `tallyd show-config`.

use std::io::Write;

use anyhow::{Context, Result};

use super::EXIT_DONE;
use crate::config::schema;

/// Prints the JSON Schema of config.toml.
pub(super) fn print_schema() -> Result<u8> {
    let text = serde_json::to_string_pretty(schema()).context("write the schema")?;
    writeln!(std::io::stdout(), "{text}").context("print the schema")?;
    Ok(EXIT_DONE)
}
