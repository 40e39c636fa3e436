//! Restarts a daemon as systemd would: always, unless a restart would not help.

use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::clock::Clock;
use super::lines::Lines;
use super::stack::signal;

/// After this pause, the run restarts a daemon. systemd waits longer (`RestartSec=`), but a short pause can reveal more
/// errors.
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// Time limit for a clean stop. The limit is longer than `drain_max_s`.
const STOP_MAX: Duration = Duration::from_secs(40);

const SIGTERM: i32 = 15;

/// Exit codes after which the daemon is not restarted, as in `RestartPreventExitStatus=` of the unit.
const FINAL: [i32; 2] = [64, 78];

/// An exit, a panic or an error of a daemon that no fault explains.
#[derive(Clone, Debug)]
pub struct Surprise {
    pub at: SystemTime,
    pub daemon: usize,
    pub what: String,
}

pub struct Daemon {
    pub number: usize,
    pub lines: Lines,
    pub config: PathBuf,
    pub log: PathBuf,
    pub clock: Clock,
    tallyd: PathBuf,
    wanted: watch::Sender<bool>,
    running: watch::Sender<Option<u32>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The value of `TALLYD_FAULTS` for the next start.
    faults: Option<&'static str>,
    /// True if a fault is about to kill the daemon, or has killed it.
    killed: bool,
    surprises: Vec<Surprise>,
}

impl Daemon {
    pub fn new(number: usize, lines: Lines, config: PathBuf, log: PathBuf, tallyd: PathBuf, clock: Clock) -> Arc<Self> {
        let (wanted, running) = (watch::Sender::new(false), watch::Sender::new(None));
        let daemon =
            Arc::new(Self { number, lines, config, log, clock, tallyd, wanted, running, state: Mutex::default() });
        tokio::spawn(Arc::clone(&daemon).keep());
        daemon
    }

    pub fn pid(&self) -> Option<u32> {
        *self.running.borrow()
    }

    /// Starts the daemon, and waits until its process exists.
    pub async fn start(&self) {
        self.wanted.send_replace(true);
        let _ = self.running.subscribe().wait_for(Option::is_some).await;
    }

    /// Sends SIGTERM and waits until the daemon has ended. The daemon is not restarted. Fails if the daemon does not
    /// end in time.
    pub async fn stop(&self) -> Result<()> {
        self.wanted.send_replace(false);
        let mut running = self.running.subscribe();
        let gone = running.wait_for(Option::is_none);
        let Ok(ended) = tokio::time::timeout(STOP_MAX, gone).await else {
            bail!("daemon {} did not end within {STOP_MAX:?} after SIGTERM", self.number);
        };
        ended?;
        Ok(())
    }

    /// Sends SIGKILL. The daemon is restarted a second later, with these faults in its program, which can also kill it.
    pub async fn kill_for(&self, faults: Option<&'static str>) -> Result<()> {
        self.with(|state| state.faults = faults);
        self.kill().await
    }

    /// Sends SIGKILL. The daemon is restarted a second later.
    pub async fn kill(&self) -> Result<()> {
        let Some(pid) = self.pid() else { return Ok(()) };
        self.with(|state| state.killed = true);
        signal(pid, "KILL").await?;
        let mut running = self.running.subscribe();
        running.wait_for(|running| *running != Some(pid)).await?;
        Ok(())
    }

    pub async fn signal(&self, name: &str) -> Result<()> {
        let Some(pid) = self.pid() else { bail!("daemon {} is not running", self.number) };
        signal(pid, name).await
    }

    /// Returns the exits that neither a fault nor the run caused.
    pub fn surprises(&self) -> Vec<Surprise> {
        self.with(|state| state.surprises.clone())
    }

    /// Returns the current length of the log.
    pub fn logged(&self) -> usize {
        std::fs::metadata(&self.log).map_or(0, |log| usize::try_from(log.len()).unwrap_or(usize::MAX))
    }

    /// Returns the log after its first `logged` bytes.
    pub fn log_from(&self, logged: usize) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(log.get(logged..).unwrap_or_default()).into_owned()
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        let faults = self.with(|state| {
            state.killed = state.faults.is_some_and(|faults| faults.contains("death"));
            state.faults
        });
        Command::new(&self.tallyd)
            .arg("--config")
            .arg(&self.config)
            .arg("run")
            .env_remove("NOTIFY_SOCKET")
            .envs(tallyd_testkit::unit_environment())
            .envs(self.clock.environment())
            .envs(faults.map(|faults| ("TALLYD_FAULTS", faults)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
    }

    async fn keep(self: Arc<Self>) {
        let mut wanted = self.wanted.subscribe();
        loop {
            let _ = wanted.wait_for(|wanted| *wanted).await;
            let logged = self.logged();
            let mut child = self.spawn().expect("start tallyd");
            self.running.send_replace(child.id());
            let ended = tokio::select! {
                status = child.wait() => Some(status),
                _ = wanted.wait_for(|wanted| !*wanted) => None,
            };
            let (was_asked, status) = match ended {
                Some(status) => (false, status),
                None => (true, self.end(&mut child).await),
            };
            self.note(logged, was_asked, status.expect("wait for tallyd"));
            self.running.send_replace(None);
            tokio::time::sleep(RESTART_AFTER).await;
        }
    }

    async fn end(&self, child: &mut Child) -> std::io::Result<ExitStatus> {
        if let Some(pid) = child.id() {
            // A frozen daemon gets the SIGTERM when it is resumed. An error is ignored, because the process may have
            // ended at this moment.
            let _ = signal(pid, "TERM").await;
            let _ = signal(pid, "CONT").await;
        }
        child.wait().await
    }

    /// If neither a fault nor the run caused the exit of a process, reports this exit as a [`Surprise`]. `logged` is
    /// the length of the log when the process started.
    fn note(&self, logged: usize, was_asked: bool, status: ExitStatus) {
        let was_killed = self.with(|state| state.killed);
        // Until the process has installed its signal handlers, SIGTERM ends it immediately.
        let was_early = status.signal() == Some(SIGTERM) && !self.log_from(logged).contains(r#""event":"started""#);
        if was_killed || (was_asked && (status.success() || was_early)) {
            return;
        }
        let what = if was_asked { "did not exit cleanly after SIGTERM" } else { "exited without a request" };
        let surprise = Surprise { at: SystemTime::now(), daemon: self.number, what: format!("{what}: {status}") };
        self.with(|state| state.surprises.push(surprise));
        if status.code().is_some_and(|code| FINAL.contains(&code)) {
            self.wanted.send_replace(false);
        }
    }
}
