//! `tallyd admin names`: renames a kind or a metric. Its code stays the same.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};

use super::rules::NAMES_RENAME;
use super::{EXIT_DONE, Usage};
use tallyd_base::cli::consent::{Consent, all_stopped};
use tallyd_base::config::{Config, ConfigError};
use tallyd_base::jobs::JobError;
use tallyd_base::servers::Servers;
use tallyd_mysql::codes::{Of, Registered};

#[derive(Debug, Subcommand)]
pub(super) enum NamesCommand {
    /// Rename a kind or a metric. Its code and meaning stay the same. First stop all daemons.
    Rename {
        /// Rename a kind or a metric.
        #[arg(value_enum, value_name = "kind|metric", hide_possible_values = true)]
        of: Named,
        /// Replace this name.
        from: String,
        /// Use this new name, which the configuration must already have.
        to: String,
        #[command(flatten)]
        consent: Consent,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Named {
    Kind,
    Metric,
}

pub(super) async fn run(config: &Config, command: &NamesCommand) -> Result<u8> {
    let NamesCommand::Rename { of, from, to, consent } = command;
    let (of, configured, word) = match of {
        Named::Kind => (Of::Kinds, &config.kinds.0, "kind"),
        Named::Metric => (Of::Metrics, &config.metrics.0, "metric"),
    };
    // The usual check of names would fail here, because the configuration has the new name and MySQL has the old name.
    let servers = Servers::new(config)?.impatient();
    servers.check_schema().await?;
    let registered = servers.store.registered(of).await?;
    let Some(code) = code_of(&registered, from, to, word)? else {
        writeln!(std::io::stdout(), "the {word} {to} already has this name").context("print")?;
        return Ok(EXIT_DONE);
    };
    is_configured(configured, of, (code, from), to)?;
    all_stopped(&servers).await?;
    let plan = [
        format!("rename the {word} {from} (code {code}) to {to} in MySQL"),
        format!("events that still name {from} become dead letters; keys in Redis that contain {from} remain unused"),
    ];
    if let Some(code) = consent.ends(NAMES_RENAME, &plan)? {
        return Ok(code);
    }
    // The user can answer the question hours later. So the command checks again that all daemons are stopped.
    all_stopped(&servers).await?;
    if !servers.store.rename_code(of, code, from, to).await? {
        return Err(JobError::NotNow(format!("the {word} {from} was changed meanwhile: try again")).into());
    }
    writeln!(std::io::stdout(), "renamed: start the daemons").context("print")?;
    Ok(EXIT_DONE)
}

fn code_of(registered: &[Registered], from: &str, to: &str, word: &str) -> Result<Option<u8>, Usage> {
    let named =
        |name: &str| registered.iter().find(|known| known.name == name && !known.removed).map(|known| known.code);
    match (named(from), named(to)) {
        (Some(code), None) => Ok(Some(code)),
        (None, Some(_)) => Ok(None),
        (Some(_), Some(other)) => {
            Err(Usage(format!("the {word} with the code {other} already has the name {to}: choose another name")))
        }
        (None, None) => {
            let known: Vec<&str> = registered.iter().map(|known| known.name.as_str()).collect();
            Err(Usage(format!("no {word} is named {from} in MySQL: the names are {}", known.join(", "))))
        }
    }
}

/// Checks that the configuration has the new name. After the rename, a daemon with the old name in its configuration
/// would refuse to start.
fn is_configured(configured: &BTreeMap<String, u8>, of: Of, former: (u8, &str), to: &str) -> Result<(), ConfigError> {
    let ((code, from), section) = (former, of.section());
    if configured.get(to) == Some(&code) {
        return Ok(());
    }
    let text = format!("[{section}] has no {to} = {code}: on every host, replace {from} by {to}, then try again");
    Err(ConfigError(vec![text]))
}
