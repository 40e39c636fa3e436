//! Runs of jobs in this process: how far, and what for they wait. How they ended is in MySQL, for all processes.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::locked;
use crate::model::Micros;

/// Why a run waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitsFor {
    /// Events on the way must be in MySQL.
    Fence,
    /// Live traffic goes first: a server has enough to do.
    Pace,
    /// Another process runs the job.
    Lock,
}

impl WaitsFor {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fence, Self::Pace, Self::Lock];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fence => "fence",
            Self::Pace => "pace",
            Self::Lock => "lock",
        }
    }
}

/// A job in this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobRun {
    /// Its run: the mode and since when.
    pub running: Option<(String, Micros)>,
    /// How much of it is done, and of how much.
    pub done: (u64, Option<u64>),
    /// What it waits for, and in words.
    pub waits: Option<(WaitsFor, String)>,
}

/// By the job's name.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<BTreeMap<&'static str, JobRun>>);

impl Jobs {
    /// A run has begun. It has ended when the answer is dropped.
    pub fn begin(&self, job: &'static str, mode: &str) -> Running<'_> {
        let running = Some((mode.to_owned(), Micros::now()));
        locked(&self.0).insert(job, JobRun { running, ..JobRun::default() });
        Running { jobs: self, job }
    }

    /// So much of it is done.
    pub fn progress(&self, job: &'static str, done: (u64, Option<u64>)) {
        self.change(job, |run| run.done = done);
    }

    /// It waits, or no longer.
    pub fn waits(&self, job: &'static str, waits: Option<(WaitsFor, String)>) {
        self.change(job, |run| run.waits = waits);
    }

    /// How the job stands.
    pub fn get(&self, job: &str) -> JobRun {
        locked(&self.0).get(job).cloned().unwrap_or_default()
    }

    fn change(&self, job: &'static str, change: impl FnOnce(&mut JobRun)) {
        change(locked(&self.0).entry(job).or_default());
    }
}

/// A run that is under way.
pub struct Running<'a> {
    jobs: &'a Jobs,
    job: &'static str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        locked(&self.jobs.0).insert(self.job, JobRun::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_has_ended_leaves_nothing() {
        let jobs = Jobs::default();
        let running = jobs.begin("reconcile", "full");
        jobs.progress("reconcile", (3, Some(7)));
        jobs.waits("reconcile", Some((WaitsFor::Fence, "a queue is full".to_owned())));
        let run = jobs.get("reconcile");
        assert_eq!((run.running.map(|(mode, _)| mode), run.done), (Some("full".to_owned()), (3, Some(7))));
        drop(running);
        assert_eq!(jobs.get("reconcile"), JobRun::default());
    }
}
