//! Runs tallyd as child processes: the daemon, and the commands that the demo calls.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use tallyd_core::model::Target;
use tokio_util::sync::CancellationToken;

use crate::log::{Fact, Log};
use crate::traffic::name;

/// The time within which the daemon must start.
const START_MAX: Duration = Duration::from_secs(120);

/// The time within which the daemon must stop. This time is longer than the daemon's `[daemon] drain_max_s`.
const STOP_MAX: Duration = Duration::from_secs(40);

/// If the daemon holds the lock of the command's job, the command ends with this exit code.
const TRY_LATER: i32 = 75;

/// How long a command is retried while the daemon holds the job's lock.
const RUN_MAX: Duration = Duration::from_secs(120);

const LOOK: Duration = Duration::from_millis(50);

/// The program and its configuration.
pub struct Tallyd {
    program: PathBuf,
    config: PathBuf,
    folder: PathBuf,
}

/// The running daemon. Dropping this value stops the process.
pub struct Daemon {
    child: Child,
    pub log: Log,
    pid_file: PathBuf,
}

/// The part of a reconcile's report that the demo reads.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Reconciled {
    pub checked: u64,
    pub drifted: u64,
    pub repaired: u64,
    pub counters_off: u64,
    pub unknown: u64,
}

impl Tallyd {
    /// The folder of the configuration also contains the daemon's log and pid file.
    pub fn new(program: &Path, config: &Path) -> Result<Self> {
        let folder = config.parent().context("the path of the configuration has no folder")?.to_owned();
        Ok(Self { program: program.to_owned(), config: config.to_owned(), folder })
    }

    /// Prepares a command in a separate process group, so that Ctrl-C reaches only the demo. The demo then stops the
    /// daemon cleanly.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // The systemd unit sets the same variables.
        command.env("RUST_MIN_STACK", "134217728").env("MALLOC_ARENA_MAX", "2");
        command.arg("--config").arg(&self.config).stdin(Stdio::null()).process_group(0);
        command
    }

    pub fn migrate(&self) -> Result<()> {
        let output = self.command().arg("migrate").output().context("run tallyd migrate")?;
        ensure!(output.status.success(), "tallyd migrate failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Starts the daemon and waits until it listens on all queues and has loaded the empty Redis. A drift of a counter
    /// that is not loaded yet would need no repair.
    pub async fn start(&self, partitions: u16, stop: &CancellationToken) -> Result<Daemon> {
        let path = self.folder.join("tallyd.log");
        let stderr = File::create(&path).with_context(|| format!("write {}", path.display()))?;
        let child = self.command().arg("run").stdout(Stdio::null()).stderr(stderr).spawn().context("start tallyd")?;
        let pid_file = self.folder.join("tallyd.pid");
        let mut daemon = Daemon { child, log: Log::open(path)?, pid_file };
        fs::write(&daemon.pid_file, daemon.child.id().to_string()).context("write the daemon's pid file")?;
        let (until, mut listening, mut is_loaded) = (Instant::now() + START_MAX, 0, false);
        while listening < partitions || !is_loaded {
            ensure!(!stop.is_cancelled(), "interrupted");
            ensure!(
                Instant::now() < until,
                "tallyd did not start within {} s: see {}",
                START_MAX.as_secs(),
                daemon.log
            );
            daemon.check()?;
            for fact in daemon.log.read()? {
                listening += u16::from(matches!(fact, Fact::Consuming));
                is_loaded |= matches!(fact, Fact::Reconciled { .. });
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(daemon)
    }

    /// Runs `tallyd reconcile --full` and returns its report.
    pub async fn reconcile(&self, dry_run: bool) -> Result<Reconciled> {
        let arguments = ["--full", "--format", "json"].into_iter().chain(dry_run.then_some("--dry-run"));
        let report = self.run("reconcile", arguments.map(str::to_owned).collect()).await?;
        serde_json::from_slice(&report).context("read the reconcile's report")
    }

    /// Returns the output of `tallyd reconcile --dry-run` for one target.
    pub async fn explain(&self, target: Target) -> Result<String> {
        let arguments =
            vec!["--dry-run".to_owned(), "--target".to_owned(), format!("{}:{}", name(target.kind), target.id)];
        Ok(String::from_utf8_lossy(&self.run("reconcile", arguments).await?).into_owned())
    }

    /// Returns the output of `tallyd board restore`.
    pub async fn restore(&self, board: &str) -> Result<String> {
        let arguments = ["restore", board, "total", "--yes"].map(str::to_owned).to_vec();
        Ok(String::from_utf8_lossy(&self.run("board", arguments).await?).into_owned())
    }

    /// Runs a command and returns its output. If the daemon is running the same job, the call waits.
    async fn run(&self, name: &str, arguments: Vec<String>) -> Result<Vec<u8>> {
        let until = Instant::now() + RUN_MAX;
        loop {
            let mut command = self.command();
            command.arg(name).args(&arguments);
            let output = tokio::task::spawn_blocking(move || command.output()).await?.context("run tallyd")?;
            if !output.stdout.is_empty() {
                return Ok(output.stdout);
            }
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let last = said.lines().last().unwrap_or_default();
            if output.status.code() != Some(TRY_LATER) || Instant::now() > until {
                bail!("tallyd {name} failed ({}): {last}", output.status);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

impl Daemon {
    /// Fails if the daemon has ended unexpectedly.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait().context("check whether tallyd runs")? {
            None => Ok(()),
            Some(status) => bail!("tallyd ended unexpectedly ({status}): see {}", self.log),
        }
    }

    /// Sends SIGTERM, and waits until the daemon ends.
    pub async fn stop(mut self) -> Result<ExitStatus> {
        self.terminate();
        let until = Instant::now() + STOP_MAX;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().context("wait for tallyd")? {
                return Ok(status);
            }
            tokio::time::sleep(LOOK).await;
        }
        bail!("tallyd did not end within {} s of SIGTERM: see {}", STOP_MAX.as_secs(), self.log)
    }

    /// Uses the shell's `kill`, because not every machine has the program `kill`.
    fn terminate(&self) {
        let _ = Command::new("sh").args(["-c", "kill -TERM \"$1\"", "sh"]).arg(self.child.id().to_string()).status();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.terminate();
            let until = Instant::now() + STOP_MAX;
            while Instant::now() < until && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(LOOK);
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let _ = fs::remove_file(&self.pid_file);
    }
}
