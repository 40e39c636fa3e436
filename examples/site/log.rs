//! Reads the daemon's log as it grows. The demo gets its facts about the daemon only from the daemon's log and from
//! MySQL.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

/// The meaning of a line of the log.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A partition's consumer listens.
    Consuming,
    /// A transaction is committed.
    Batch { events: u64, refused: u64, lag_ms: i64 },
    /// A reconcile begins.
    Reconciling,
    /// A reconcile ended. Contains the run's number in `job_run`.
    Reconciled { run: u64, seconds: f64 },
    /// A run of a job failed. Has the message.
    Failed(String),
    /// A closed board is archived and verified.
    Archived { period: String, members: u64 },
    /// A snapshot of a board was taken.
    Saved { board: String },
    /// Redis has lost a board.
    Lost { board: String },
    /// A warning or error for an operator.
    Warning(String),
}

/// The fields that the demo needs from a line.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Line {
    level: String,
    event: String,
    message: String,
    job: String,
    run: u64,
    seconds: f64,
    events: u64,
    refused: u64,
    lag_ms: i64,
    board: String,
    period: String,
    members: u64,
}

/// The log file, and the position up to which it was read.
pub struct Log {
    path: PathBuf,
    file: File,
    /// The beginning of a line that the daemon has not finished yet.
    rest: Vec<u8>,
}

impl Log {
    pub fn open(path: PathBuf) -> Result<Self> {
        let file = File::open(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(Self { path, file, rest: Vec::new() })
    }

    /// Reads the lines that the daemon wrote since the last call. Skips the lines that the demo does not need, and
    /// returns a fact for each other line.
    pub fn read(&mut self) -> Result<Vec<Fact>> {
        self.file.read_to_end(&mut self.rest).with_context(|| format!("read {}", self.path.display()))?;
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let lines: Vec<u8> = self.rest.drain(..whole).collect();
        Ok(lines.split(|byte| *byte == b'\n').filter_map(fact).collect())
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

fn fact(line: &[u8]) -> Option<Fact> {
    if line.is_empty() {
        return None;
    }
    let Ok(line) = serde_json::from_slice::<Line>(line) else {
        // The line is not JSON. It is, for instance, the message of a panic.
        return Some(Fact::Warning(String::from_utf8_lossy(line).into_owned()));
    };
    let Line { events, refused, lag_ms, run, seconds, members, .. } = line;
    match line.event.as_str() {
        "consuming" => Some(Fact::Consuming),
        "batch-committed" => Some(Fact::Batch { events, refused, lag_ms }),
        "job-started" if line.job == "reconcile" => Some(Fact::Reconciling),
        "job-failed" => Some(Fact::Failed(line.message)),
        "job-ended" if line.job == "reconcile" => Some(Fact::Reconciled { run, seconds }),
        "board-saved" => Some(Fact::Saved { board: line.board }),
        "board-lost" => Some(Fact::Lost { board: line.board }),
        "board-archived" => Some(Fact::Archived { period: line.period, members }),
        _ if matches!(line.level.as_str(), "WARN" | "ERROR") => Some(Fact::Warning(line.message)),
        _ => None,
    }
}
