//! Where log lines go and how they look.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::config::{Log, LogFormat};

/// Starts logging to stderr, or to journald. `RUST_LOG` wins over `[log] level`.
///
/// # Errors
/// A filter that doesn't parse, or a journal that isn't there.
pub fn start(log: &Log) -> Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(filter) if !filter.is_empty() => EnvFilter::try_new(&filter).context("read RUST_LOG")?,
        _ => EnvFilter::try_new(&log.level).with_context(|| format!("read [log] level \"{}\"", log.level))?,
    };
    let stderr = std::io::stderr;
    let lines = match resolve(log.format) {
        LogFormat::Journald => tracing_journald::layer().context("open the journal")?.boxed(),
        LogFormat::Json => tracing_subscriber::fmt::layer().json().flatten_event(true).with_writer(stderr).boxed(),
        LogFormat::Text | LogFormat::Auto => tracing_subscriber::fmt::layer()
            .with_ansi(stderr().is_terminal())
            .with_target(false)
            .with_writer(stderr)
            .boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).try_init().context("start logging")
}

fn resolve(format: LogFormat) -> LogFormat {
    match format {
        LogFormat::Auto if std::io::stderr().is_terminal() => LogFormat::Text,
        // Set by systemd when stderr goes to the journal.
        LogFormat::Auto if std::env::var_os("JOURNAL_STREAM").is_some() => LogFormat::Journald,
        LogFormat::Auto => LogFormat::Json,
        format => format,
    }
}
