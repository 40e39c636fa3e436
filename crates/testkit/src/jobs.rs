//! Runs commands, reads their reports, and waits for runs without a process for each look.

use std::process::Output;
use std::time::Duration;

use super::{World, eventually, eventually_each, stderr};

/// The pause between two tries of a command. A command is a process, so it takes much more CPU time than a look at MySQL.
const TRY_EVERY: Duration = Duration::from_millis(250);

impl World {
    pub fn report(&self, arguments: &[&str]) -> serde_json::Value {
        report_of(&self.tallyd(&[arguments, &["--format", "json"]].concat()))
    }

    pub async fn reconcile(&self, mode: &str) -> serde_json::Value {
        let ended = std::cell::RefCell::new(None);
        eventually_each(TRY_EVERY, "no other run is running", || async {
            let output = self.tallyd(&["reconcile", mode, "--format", "json"]);
            let is_over = output.status.code() != Some(75);
            ended.replace(Some(output));
            is_over
        })
        .await;
        report_of(&ended.into_inner().unwrap())
    }

    /// Ends the leases of all jobs, as if their holders had been dead for thirty seconds.
    pub async fn end_leases(&self) {
        sqlx::query("UPDATE job_lock SET lease_until = NOW(6)").execute(&self.pool).await.unwrap();
    }

    pub async fn no_run(&self) {
        let active = "SELECT COUNT(*) FROM job_lock WHERE lease_until > NOW(6)";
        eventually("no run is active", || async { self.count(active).await == 0 }).await;
    }

    /// Runs a command until it succeeds. The command can fail while a daemon's run holds the lock, and while daemons take
    /// over partitions.
    pub async fn succeeds(&self, arguments: &[&str]) {
        let failure = std::cell::RefCell::new(String::new());
        let succeeded = async || {
            self.no_run().await;
            let output = self.tallyd(arguments);
            if !output.status.success() {
                failure.replace(stderr(&output));
                tokio::time::sleep(TRY_EVERY).await;
            }
            output.status.success()
        };
        let waited = tokio::time::timeout(super::DEADLINE, async { while !succeeded().await {} }).await;
        assert!(waited.is_ok(), "{arguments:?} still fails: {}", failure.into_inner());
    }
}

#[track_caller]
fn report_of(output: &Output) -> serde_json::Value {
    let code = output.status.code();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{code:?}, {error}: {}", stderr(output)))
}
