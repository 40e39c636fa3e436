//! Runs the real daemon as a child process.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::signal::{is_stopped, signal};
use super::{DEADLINE, STARTED, World, eventually};

/// A daemon that runs as a child process. Unless a test has waited for its end, it must still run when the `Daemon` is dropped,
/// and stop without an error.
pub struct Daemon {
    pub child: Child,
    log_path: PathBuf,
    has_ended: bool,
}

impl Daemon {
    pub(super) fn new(child: Child, log_path: PathBuf) -> Self {
        Self { child, log_path, has_ended: false }
    }

    pub fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    pub fn is_stopped(&self) -> bool {
        is_stopped(&self.child)
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.wait();
    }

    pub fn stop(mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait()
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.has_ended = true;
        self.ended().unwrap_or_else(|| panic!("the daemon did not end in time:\n{}", self.log()))
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + DEADLINE;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    pub fn status_kib(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let value = |line: &str| line.strip_prefix(name)?.strip_prefix(':')?.trim().strip_suffix(" kB")?.parse().ok();
        status.lines().find_map(value).unwrap()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log_path).unwrap()
    }

    pub async fn logged(&self, text: &str) {
        eventually(&format!("the log contains {text}"), || async { self.log().contains(text) }).await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let must_stop = !self.has_ended && !std::thread::panicking();
        let status = must_stop.then(|| {
            // The process gets the signal also if it has died meanwhile.
            self.signal("TERM");
            self.ended()
        });
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(status) = status {
            assert!(
                status.is_some_and(|status| status.success()),
                "the daemon stopped with {status:?}:\n{}",
                self.log()
            );
        }
    }
}

/// After a failure, prints the logs of all daemons. The logs include those of daemons that have ended.
impl Drop for World {
    fn drop(&mut self) {
        let started = if std::thread::panicking() { STARTED.load(Ordering::Relaxed) } else { 0 };
        for number in 0..started {
            if let Ok(log) = fs::read_to_string(self.log_path(number)) {
                eprintln!("--- log of daemon {number} ---\n{log}");
            }
        }
    }
}
