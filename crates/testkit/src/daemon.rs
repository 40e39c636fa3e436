//! Runs the real daemon as a child process.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{DEADLINE, STARTED, World, eventually};

/// A daemon that runs as a child process. If it still runs when the `Daemon` is dropped, it must stop without an error.
pub struct Daemon {
    pub child: Child,
    pub(super) log_path: PathBuf,
}

impl Daemon {
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status().unwrap();
        assert!(sent.success(), "kill -{name}");
    }

    pub fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with('T')
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn stop(mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let until = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the daemon did not end in time:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
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
        if !std::thread::panicking() && self.child.try_wait().unwrap().is_none() {
            self.signal("TERM");
            let status = self.wait();
            assert!(status.success(), "the daemon stopped with {status}:\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
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
