//! The runs of this process: how much they have done, and why they wait. The results of all processes' runs are in MySQL.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{WaitsFor, locked};
use crate::runtime::progress::Done;

type ReadDone = Box<dyn Fn() -> Done + Send>;

type Waits = (WaitsFor, String);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobNow {
    pub running: Option<(String, Done)>,
    pub waits: Option<Waits>,
}

#[derive(Default)]
struct Entry {
    running: Option<(String, ReadDone)>,
    waits: Option<Waits>,
}

#[derive(Default)]
pub struct Runs {
    jobs: Mutex<BTreeMap<&'static str, Entry>>,
    pruned: Mutex<BTreeMap<String, Instant>>,
}

impl Runs {
    /// Until the returned value is dropped.
    pub(crate) fn begin(&self, job: &'static str, mode: &str, done: impl Fn() -> Done + Send + 'static) -> Running<'_> {
        let running: Option<(String, ReadDone)> = Some((mode.to_owned(), Box::new(done)));
        locked(&self.jobs).insert(job, Entry { running, waits: None });
        Running { runs: self, job }
    }

    pub(crate) fn waits(&self, job: &'static str, waits: Option<Waits>) {
        locked(&self.jobs).entry(job).or_default().waits = waits;
    }

    pub(crate) fn waiting(&self, job: &'static str, why: WaitsFor) -> Waiting<'_> {
        Waiting { runs: self, job, why, is_noted: false }
    }

    pub fn get(&self, job: &str) -> JobNow {
        let jobs = locked(&self.jobs);
        let Some(Entry { running, waits }) = jobs.get(job) else { return JobNow::default() };
        let running = running.as_ref().map(|(mode, done)| (mode.clone(), done()));
        JobNow { running, waits: waits.clone() }
    }

    /// Notes that the old rows of `mode` are deleted now, unless this was noted less than `every` ago.
    pub(crate) fn prunes(&self, mode: String, every: Duration) -> bool {
        let mut pruned = locked(&self.pruned);
        let is_due = pruned.get(&mode).is_none_or(|at| at.elapsed() >= every);
        if is_due {
            pruned.insert(mode, Instant::now());
        }
        is_due
    }
}

pub(crate) struct Running<'a> {
    runs: &'a Runs,
    job: &'static str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        locked(&self.runs.jobs).remove(self.job);
    }
}

/// The wait ends when this value is dropped.
pub(crate) struct Waiting<'a> {
    runs: &'a Runs,
    job: &'static str,
    why: WaitsFor,
    is_noted: bool,
}

impl Waiting<'_> {
    pub(crate) fn note(&mut self, reason: String) {
        self.is_noted = true;
        self.runs.waits(self.job, Some((self.why, reason)));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // Another part of the run can be waiting.
        if self.is_noted {
            self.runs.waits(self.job, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_has_ended_leaves_nothing() {
        let runs = Runs::default();
        let running = runs.begin("reconcile", "full", || (3, Some(9)));
        let mut waiting = runs.waiting("reconcile", WaitsFor::Fence);
        waiting.note("a queue is full".to_owned());
        let waits = Some((WaitsFor::Fence, "a queue is full".to_owned()));
        let full = Some(("full".to_owned(), (3, Some(9))));
        assert_eq!(runs.get("reconcile"), JobNow { running: full.clone(), waits });
        drop(runs.waiting("reconcile", WaitsFor::Pace));
        assert!(runs.get("reconcile").waits.is_some(), "who did not wait ends no wait");
        drop(waiting);
        assert_eq!(runs.get("reconcile"), JobNow { running: full, waits: None });
        drop(running);
        assert_eq!(runs.get("reconcile"), JobNow::default());
    }

    #[test]
    fn old_rows_of_a_mode_are_deleted_once_in_a_while() {
        let runs = Runs::default();
        let prunes = |mode: &str, every| runs.prunes(mode.to_owned(), every);
        let hour = Duration::from_secs(3_600);
        assert!(prunes("reconcile full", hour) && !prunes("reconcile full", hour) && prunes("reconcile scrub", hour));
        assert!(prunes("reconcile full", Duration::ZERO));
    }
}
