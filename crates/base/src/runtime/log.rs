//! Sets the destination and format of log lines.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, layer, reload};

use super::lock::locked;

/// These libraries log an error and also return it. The user's log filter can show these lines again.
const QUIET: &str = "lapin=off,sqlx=off,tokio_cron_scheduler=off";

const LOG_EVERY: Duration = Duration::from_secs(10);

/// Logs the first event immediately, and only the count of further events.
#[derive(Default)]
pub struct Flood {
    logged_at: Option<Instant>,
    unlogged: u64,
}

impl Flood {
    /// If it is time for another line, returns the number of events since the last line.
    pub fn note(&mut self, times: u64, now: Instant) -> Option<u64> {
        self.unlogged += times;
        if self.unlogged == 0 || self.logged_at.is_some_and(|logged_at| now.duration_since(logged_at) < LOG_EVERY) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

struct Log {
    bar: Mutex<Option<ProgressBar>>,
    /// From the command line.
    level: OnceLock<&'static str>,
    lines: [(Level, AtomicU64); 5],
    filter: OnceLock<reload::Handle<EnvFilter, Registry>>,
}

/// Global, because a process has one stderr, and `tracing` has one subscriber for all of it.
static LOG: Log = Log {
    bar: Mutex::new(None),
    level: OnceLock::new(),
    lines: [
        (Level::ERROR, AtomicU64::new(0)),
        (Level::WARN, AtomicU64::new(0)),
        (Level::INFO, AtomicU64::new(0)),
        (Level::DEBUG, AtomicU64::new(0)),
        (Level::TRACE, AtomicU64::new(0)),
    ],
    filter: OnceLock::new(),
};

/// Until the returned value is dropped. The progress bar then also disappears.
pub fn under(bar: &ProgressBar) -> impl Drop + use<> {
    *locked(&LOG.bar) = Some(bar.clone());
    Under
}

struct Under;

impl Drop for Under {
    fn drop(&mut self) {
        if let Some(bar) = locked(&LOG.bar).take() {
            bar.finish_and_clear();
        }
    }
}

struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &*locked(&LOG.bar) {
            Some(bar) => bar.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Text on a terminal, journald's fields under systemd, JSON otherwise.
    Auto,
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
    /// Directly to journald, with all fields.
    Journald,
}

impl Format {
    fn resolved(self) -> Self {
        match self {
            Self::Auto if io::stderr().is_terminal() => Self::Text,
            Self::Auto if is_journal(&std::env::var("JOURNAL_STREAM").unwrap_or_default(), io::stderr().as_fd()) => {
                Self::Journald
            }
            Self::Auto => Self::Json,
            chosen => chosen,
        }
    }
}

/// Child processes inherit `JOURNAL_STREAM` (`variable`), even if their stderr goes to a file.
fn is_journal(variable: &str, stream: BorrowedFd<'_>) -> bool {
    let stream = stream.try_clone_to_owned().and_then(|stream| File::from(stream).metadata());
    stream.is_ok_and(|stream| variable == format!("{}:{}", stream.dev(), stream.ino()))
}

pub fn override_level(level: &'static str) {
    let _ = LOG.level.set(level);
}

/// The command line overrides `RUST_LOG`, and `RUST_LOG` overrides the configured `level`.
pub fn filter(level: &str) -> Result<EnvFilter> {
    let (filter, origin) = match (LOG.level.get(), std::env::var("RUST_LOG")) {
        (Some(level), _) => ((*level).to_owned(), "-v or -q"),
        (None, Ok(filter)) if !filter.is_empty() => (filter, "RUST_LOG"),
        _ => (level.to_owned(), "level"),
    };
    EnvFilter::try_new(format!("{QUIET},{filter}")).with_context(|| format!("read {origin} \"{filter}\""))
}

struct Counts;

impl<S: Subscriber> Layer<S> for Counts {
    fn on_event(&self, event: &Event<'_>, _: layer::Context<'_, S>) {
        if let Some((_, count)) = LOG.lines.iter().find(|(level, _)| level == event.metadata().level()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

pub fn logged() -> impl Iterator<Item = (Level, u64)> {
    LOG.lines.iter().map(|(level, count)| (*level, count.load(Ordering::Relaxed)))
}

pub fn change(filter: EnvFilter) {
    if let Some(handle) = LOG.filter.get() {
        // Fails only if logging has already ended.
        let _ = handle.reload(filter);
    }
}

pub fn start(filter: EnvFilter, format: Format) -> Result<()> {
    let (filter, handle) = reload::Layer::new(filter);
    let lines = match format.resolved() {
        Format::Journald => tracing_journald::layer().context("open the journal")?.boxed(),
        Format::Json | Format::Auto => {
            tracing_subscriber::fmt::layer().json().flatten_event(true).with_writer(|| Stderr).boxed()
        }
        Format::Text => tracing_subscriber::fmt::layer()
            .with_ansi(io::stderr().is_terminal())
            .with_target(false)
            .with_writer(|| Stderr)
            .boxed(),
    };
    let lines = lines.and_then(Counts).with_filter(filter_fn(holds_no_secret));
    tracing_subscriber::registry().with(filter).with(lines).try_init().context("start logging")?;
    let _ = LOG.filter.set(handle);
    Ok(())
}

/// Libraries trace each byte that they send, for example lapin the password in its login frame. So their trace lines
/// are never logged, even if the filter enables them.
fn holds_no_secret(line: &Metadata<'_>) -> bool {
    *line.level() != Level::TRACE || is_ours(line.target())
}

fn is_ours(target: &str) -> bool {
    let name = target.split("::").next().unwrap_or_default();
    name.strip_prefix("tallyd").is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_crates_may_log_each_byte() {
        for target in ["tallyd", "tallyd::consumer", "tallyd_mysql", "tallyd_rabbitmq::nodes"] {
            assert!(is_ours(target), "{target}");
        }
        for target in ["", "lapin::connection", "tallydx", "sqlx_mysql", "redis::aio"] {
            assert!(!is_ours(target), "{target}");
        }
    }

    #[test]
    fn only_the_stream_that_systemd_names_is_the_journal() {
        let stream = File::open("/dev/null").unwrap();
        let its = stream.metadata().unwrap();
        assert!(is_journal(&format!("{}:{}", its.dev(), its.ino()), stream.as_fd()));
        for variable in ["", "1:2", &format!("{}:{}", its.dev(), its.ino() + 1)] {
            assert!(!is_journal(variable, stream.as_fd()), "{variable}");
        }
    }

    #[test]
    fn a_flood_is_said_once_and_then_counted() {
        let (mut flood, start) = (Flood::default(), Instant::now());
        assert_eq!(flood.note(0, start), None);
        assert_eq!(flood.note(3, start), Some(3));
        assert_eq!(flood.note(4, start + Duration::from_secs(1)), None);
        assert_eq!(flood.note(0, start + LOG_EVERY), Some(4));
        assert_eq!(flood.note(0, start + 2 * LOG_EVERY), None);
    }
}
