//! Starts a contender, a child process that consumes the queue, and reads what it logs.

use std::collections::VecDeque;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use chrono::{DateTime, Utc};
use serde::Deserialize;
use tallyd_core::model::Micros;
use tallyd_core::rules::Writes;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};

use super::model::Model;
use super::numbers::likes_in_redis;
use super::peers::Runtime;
use super::wait::until;
use super::world::World;

/// The longest time between two log lines of a contender. A contender that is silent for longer is treated as hung.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// The time between a contender's last commit and its stop.
const ACK_WAIT: Duration = Duration::from_millis(500);

/// After SIGTERM, a contender must end within this time.
const STOP_MAX: Duration = Duration::from_secs(30);

/// The time limit for the daemon to count all committed likes in Redis, and the time between two checks.
const REDIS_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The maximum number of log lines that the error shows if a contender fails.
const LINES_SHOWN: usize = 30;

#[derive(Clone, Copy, Debug)]
pub struct Contender {
    pub name: &'static str,
    pub runs: Runs,
    pub partitions: u16,
    pub keeps: Keeps,
    /// Number of events in a message's body. A body with more than one event is an array.
    pub per_message: usize,
    /// Number of groups of users. A body with more than one event contains events of one group.
    pub groups: u64,
    /// This contender's batch size, if it differs from the batch size of the benchmark.
    pub batch_events_max: Option<usize>,
    /// The writer of the like counters in Redis. Only tallyd has such a writer.
    pub likes_by: Writes,
}

/// The program to start.
#[derive(Clone, Copy, Debug)]
pub enum Runs {
    /// The release binary.
    Tallyd,
    /// The benchmark's own program, started with a role as its argument.
    Role(&'static str),
    /// A peer (a consumer in `benches/peers`). The string selects how the peer writes to MySQL.
    Peer(Runtime, &'static str),
}

/// The tables whose contents are checked at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    Nothing,
    Rows,
    RowsAndCounters,
}

impl Contender {
    pub const fn tallyd(name: &'static str, partitions: u16) -> Self {
        Self { partitions, ..Self::one(name, Runs::Tallyd, Keeps::RowsAndCounters) }
    }

    pub const fn role(name: &'static str, keeps: Keeps) -> Self {
        Self::one(name, Runs::Role(name), keeps)
    }

    pub const fn peer(name: &'static str, runtime: Runtime, way: &'static str, keeps: Keeps) -> Self {
        Self::one(name, Runs::Peer(runtime, way), keeps)
    }

    const fn one(name: &'static str, runs: Runs, keeps: Keeps) -> Self {
        Self {
            name,
            runs,
            partitions: 1,
            keeps,
            per_message: 1,
            groups: 1,
            batch_events_max: None,
            likes_by: Writes::Daemon,
        }
    }

    /// Waits until Redis has every like, if the contender counts there. Then stops the contender, and compares all that
    /// it wrote with the model. Ignores rows of users whose id is above `user_max`.
    pub async fn end(&self, running: Running, world: &World, model: &Model, user_max: u64) -> Result<()> {
        if matches!((self.runs, self.likes_by), (Runs::Tallyd, Writes::Daemon)) {
            let mut redis = world.redis().await?;
            let is_right = async || Ok(model.has(&likes_in_redis(world, &mut redis).await?));
            until("Redis has every like", REDIS_MAX, LOOK_EVERY, is_right).await?;
        }
        running.stop().await?;
        world.assert_drained().await?;
        if self.keeps != Keeps::Nothing {
            model.assert_rows(&world.pool, user_max).await?;
        }
        if self.keeps == Keeps::RowsAndCounters {
            model.assert_counters(&world.pool).await?;
        }
        Ok(())
    }

    /// Starts the contender. `arguments` are passed to the program only if it is a role.
    pub fn start(&self, world: &World, arguments: &[String]) -> Result<Running> {
        let mut command = match self.runs {
            Runs::Tallyd => {
                let mut command = Command::new(tallyd_testkit::program());
                command.arg("run").envs(tallyd_testkit::unit_environment());
                command
            }
            Runs::Role(role) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("--role").arg(role).args(arguments);
                command
            }
            Runs::Peer(runtime, way) => runtime.command(way, world),
        };
        if matches!(self.runs, Runs::Tallyd | Runs::Role(_)) {
            command.arg("--config").arg(world.config_path()).env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
        }
        Running::start(self, command)
    }
}

/// A running contender. The process is killed when this value is dropped.
pub struct Running {
    name: &'static str,
    /// True if the program must exit cleanly after SIGTERM. Only tallyd must do so.
    ends_in_order: bool,
    /// True if the contender must reject events.
    refuses: bool,
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    last: VecDeque<String>,
}

/// A log line of a contender.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Said {
    /// The contender logged that it now consumes messages.
    Consuming,
    /// The contender has committed this number of events. A contender that writes nothing has only acknowledged these
    /// events. tallyd also logs the duration of the write. The roles of the benchmarks log no time.
    Committed { events: u64, write_ms: f64, at: Option<Micros> },
}

/// The fields of tallyd's log lines that the benchmarks read.
#[derive(Deserialize)]
struct Line {
    event: String,
    #[serde(default)]
    events: u64,
    #[serde(default)]
    refused: u64,
    #[serde(default)]
    write_ms: f64,
    timestamp: Option<DateTime<Utc>>,
    at_us: Option<i64>,
}

impl Line {
    fn at(&self) -> Option<Micros> {
        self.at_us.or(self.timestamp.map(|at| at.timestamp_micros())).map(Micros)
    }
}

impl Running {
    fn start(contender: &Contender, mut command: Command) -> Result<Self> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("start {}", contender.name))?;
        let stderr = child.stderr.take().context("no pipe for the child's log")?;
        Ok(Self {
            name: contender.name,
            ends_in_order: matches!(contender.runs, Runs::Tallyd),
            refuses: false,
            child,
            lines: BufReader::new(stderr).lines(),
            last: VecDeque::new(),
        })
    }

    /// Starts a contender on a queue with events that it must reject.
    pub fn refusing(self) -> Self {
        Self { refuses: true, ..self }
    }

    pub fn pid(&self) -> Result<u32> {
        self.child.id().ok_or_else(|| anyhow!("{} has ended", self.name))
    }

    /// Waits for the contender's next log line.
    pub async fn next(&mut self) -> Result<Said> {
        loop {
            let line = tokio::time::timeout(SILENCE_MAX, self.lines.next_line())
                .await
                .map_err(|_| anyhow!("{} logged nothing for {} s", self.name, SILENCE_MAX.as_secs()))??;
            let Some(line) = line else {
                let shown: Vec<String> = std::mem::take(&mut self.last).into();
                bail!("{} ended too early:\n{}", self.name, shown.join("\n"));
            };
            let said = serde_json::from_str::<Line>(&line).ok();
            if self.last.len() == LINES_SHOWN {
                self.last.pop_front();
            }
            self.last.push_back(line);
            let Some(said) = said else { continue };
            ensure!(said.refused == 0 || self.refuses, "{} refused {} events", self.name, said.refused);
            match said.event.as_str() {
                "consuming" => return Ok(Said::Consuming),
                "batch-committed" => {
                    return Ok(Said::Committed { events: said.events, write_ms: said.write_ms, at: said.at() });
                }
                _ => {}
            }
        }
    }

    /// Waits until the contender consumes each of `partitions`.
    pub async fn consuming(&mut self, partitions: u16) -> Result<()> {
        for _ in 0..partitions {
            while self.next().await? != Said::Consuming {}
        }
        Ok(())
    }

    /// Waits until `wanted` events are committed. Returns the number of transactions, and the sum of their durations in
    /// milliseconds.
    pub async fn committed(&mut self, wanted: u64) -> Result<(u64, f64)> {
        let (mut committed, mut batches, mut writing_ms) = (0, 0, 0.0);
        while committed < wanted {
            if let Said::Committed { events, write_ms, .. } = self.next().await? {
                committed += events;
                batches += 1;
                writing_ms += write_ms;
            }
        }
        Ok((batches, writing_ms))
    }

    /// Sends SIGTERM and waits for the end.
    pub async fn stop(mut self) -> Result<()> {
        let pid = self.pid()?.to_string();
        // Reads the remaining log, because a full pipe would block the process.
        let silence = async { while let Ok(Some(_)) = self.lines.next_line().await {} };
        let ending = async {
            // Waits a moment, because the last acknowledgement can still be in the contender's buffers.
            tokio::time::sleep(ACK_WAIT).await;
            let killed = Command::new("kill").args(["-TERM", &pid]).status().await?.success();
            ensure!(killed, "kill {}", self.name);
            let ended = tokio::time::timeout(STOP_MAX, self.child.wait()).await;
            Ok(ended.map_err(|_| anyhow!("{} did not stop", self.name))??)
        };
        let (status, ()) = tokio::join!(ending, silence);
        let status = status?;
        ensure!(status.success() || !self.ends_in_order, "{} stopped with {status}", self.name);
        Ok(())
    }
}
