//! Sends signals to processes.

use std::fs;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use super::DEADLINE;

/// Sends a signal, such as `TERM`. A process that gets `STOP` stops only when one of its threads runs again, which takes
/// a while on a busy machine; this call returns when all its threads have stopped.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status().unwrap();
    assert!(sent.success(), "kill -{name}");
    let until = Instant::now() + DEADLINE;
    while name == "STOP" && !is_stopped(child) {
        assert!(Instant::now() < until, "process {} does not stop", child.id());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether all threads of the process have stopped.
pub fn is_stopped(child: &Child) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    // A thread that has ended since then has no file.
    let states = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("stat")).ok());
    states.into_iter().all(|stat| {
        let state = stat.rsplit(") ").next().unwrap().chars().next();
        assert_ne!(state, Some('Z'), "process {} has ended", child.id());
        state == Some('T')
    })
}
