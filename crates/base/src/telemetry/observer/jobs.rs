//! Reads the results of runs from MySQL. These are runs of all daemons and commands, and include runs that ended before
//! this process started.

use std::collections::{BTreeMap, VecDeque};

use anyhow::Result;
use serde_json::Value;

use crate::runtime::cron::Schedule;
use crate::runtime::progress::Done;
use crate::telemetry::{ActiveRun, EndedRun, Job, Reconciled, ReportedOutcome, telemetry};
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_mysql::run_state::{RunRow, RunningRow};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobMode {
    pub job: &'static str,
    pub mode: String,
    /// The cron pattern of the schedule. The pattern is empty if the mode never starts automatically.
    pub pattern: String,
    pub time_zone: String,
}

/// The job whose runs the status lists.
const RECONCILE: &str = "reconcile";

/// For each job and mode, this number of runs is kept.
const RUNS_MAX: u64 = 50;

#[derive(Default)]
pub(super) struct RecentRuns(BTreeMap<(String, String), Last>);

#[derive(Default)]
struct Last {
    runs: VecDeque<Read>,
    success: Option<Micros>,
    asked: bool,
}

struct Read {
    ended: EndedRun,
    found: Reconciled,
}

impl RecentRuns {
    pub(super) async fn look(&mut self, store: &Store, modes: Vec<JobMode>, now: Micros) -> Result<Vec<Job>> {
        let running = store.running_jobs().await?;
        let mut jobs = Vec::new();
        for JobMode { job: name, mode, pattern, time_zone } in modes {
            let last = self.0.entry((name.to_owned(), mode.clone())).or_default();
            last.read(store, name, &mode).await?;
            let next = Schedule::parse(&pattern, &time_zone).ok().and_then(|schedule| schedule.next(now));
            jobs.push(Job {
                job: name.to_owned(),
                running: running.iter().find(|row| row.job == name && row.mode == mode).map(run),
                last: last.runs.back().map(|read| read.ended.clone()),
                last_success_at: last.success.map(|at| at.0),
                next_at: next.map(|at| at.0),
                mode,
            });
        }
        // Skips runs that only an operator starts, such as a restore or a reconcile of a few targets.
        let rare = running.iter().filter(|row| jobs.iter().all(|job| (&job.job, &job.mode) != (&row.job, &row.mode)));
        let rare: Vec<Job> = rare
            .map(|row| Job { job: row.job.clone(), mode: row.mode.clone(), running: Some(run(row)), ..Job::default() })
            .collect();
        jobs.extend(rare);
        Ok(jobs)
    }

    pub(super) fn last_reconciles(&self) -> Vec<Reconciled> {
        let of = self.0.iter().filter(|((job, _), _)| job == RECONCILE);
        of.filter_map(|(_, last)| Some(last.runs.back()?.found.clone())).collect()
    }

    pub(super) fn reconciles(&self) -> Vec<Reconciled> {
        let of = self.0.iter().filter(|((job, _), _)| job == RECONCILE);
        let mut all: Vec<Reconciled> =
            of.flat_map(|(_, last)| last.runs.iter().map(|read| read.found.clone())).collect();
        all.sort_by_key(|run| (run.ended_at, run.run));
        all.split_off(all.len().saturating_sub(RUNS_MAX as usize))
    }
}

impl Last {
    async fn read(&mut self, store: &Store, job: &str, mode: &str) -> Result<()> {
        // The query includes runs that ended in the same microsecond as the last known run. The loop skips the runs
        // that `self.runs` already contains.
        let since = self.runs.back().map_or(0, |read| read.ended.ended_at);
        let rows = store.ended_runs(job, mode, Micros(since), RUNS_MAX).await?;
        for row in rows.into_iter().rev() {
            if self.runs.iter().any(|read| read.ended.run == row.run) {
                continue;
            }
            if row.outcome == "done" {
                self.success = self.success.max(Some(row.finished_at));
            }
            self.runs.push_back(read(mode, row));
        }
        while self.runs.len() as u64 > RUNS_MAX {
            self.runs.pop_front();
        }
        if self.success.is_none() && !self.asked {
            // No known run has succeeded, so the last successful run is older than all known runs.
            self.success = store.last_success(job, mode).await?;
            self.asked = true;
        }
        Ok(())
    }
}

fn run(row: &RunningRow) -> ActiveRun {
    let here = telemetry().runs.get(&row.job);
    let done = here.running.filter(|(mode, _)| *mode == row.mode).map(|(_, done)| done);
    let (waits, waits_words) = here.waits.filter(|_| done.is_some()).unzip();
    let ratio =
        |(done, total): Done| total.filter(|total| *total > 0).map(|total| (done as f64 / total as f64).min(1.0));
    ActiveRun {
        run: row.run,
        owner: row.owner.clone(),
        started_at: row.started_at.0,
        progress: done.and_then(ratio),
        waits,
        waits_words,
    }
}

fn read(mode: &str, row: RunRow) -> Read {
    // The report of another job or version can have other fields.
    let report: Value = serde_json::from_str(&row.report).unwrap_or_default();
    let reason = ["error", "ended_early"].into_iter().find_map(|field| report[field].as_str()).map(str::to_owned);
    let RunRow { run, owner, started_at, finished_at, outcome, .. } = row;
    let (mode, outcome, ended_at) = (mode.to_owned(), ReportedOutcome::of(&outcome), finished_at.0);
    let found = serde_json::from_value(report).unwrap_or_default();
    Read {
        found: Reconciled { run, mode, ended_at, outcome, ..found },
        ended: EndedRun { run, owner, started_at: started_at.0, ended_at, outcome, reason },
    }
}
