//! The running jobs of this process, and the reasons why they wait. The results of all processes' runs are in MySQL.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::{WaitsFor, locked};
use crate::runtime::clock;
use crate::runtime::progress;
use tallyd_core::model::Micros;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobRun {
    pub running: Option<(String, Micros)>,
    pub done: progress::Done,
    pub waits: Option<(WaitsFor, String)>,
}

#[derive(Debug, Default)]
pub struct Jobs(Mutex<BTreeMap<&'static str, JobRun>>);

impl Jobs {
    pub fn begin(&self, job: &'static str, mode: &str) -> Running<'_> {
        let running = Some((mode.to_owned(), clock::now()));
        locked(&self.0).insert(job, JobRun { running, ..JobRun::default() });
        Running { jobs: self, job }
    }

    pub fn waits(&self, job: &'static str, waits: Option<(WaitsFor, String)>) {
        locked(&self.0).entry(job).or_default().waits = waits;
    }

    pub fn get(&self, job: &str) -> JobRun {
        let run = locked(&self.0).get(job).cloned().unwrap_or_default();
        JobRun { done: progress::done(job), ..run }
    }
}

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
        let waits = Some((WaitsFor::Fence, "a queue is full".to_owned()));
        jobs.waits("reconcile", waits.clone());
        let run = jobs.get("reconcile");
        assert_eq!((run.running.map(|(mode, _)| mode), run.waits), (Some("full".to_owned()), waits));
        drop(running);
        assert_eq!(jobs.get("reconcile"), JobRun::default());
    }
}
