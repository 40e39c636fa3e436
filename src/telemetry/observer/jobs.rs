//! How runs of jobs ended, from MySQL: of all daemons and shells, also before this process began.

use std::collections::{BTreeMap, VecDeque};

use anyhow::Result;
use serde::Deserialize;

use crate::runtime::cron;
use crate::telemetry::status::{Ended, Job, Outcome, Reconciled, Run};
use crate::telemetry::telemetry;
use tallyd_core::job_name::{JobMode, JobName};
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_mysql::run_state::{RunRow, RunningRow};

/// Runs of one mode that are kept.
const RUNS_MAX: u64 = 50;

/// The last runs of each job and mode, the oldest first. What has ended doesn't change: only what is newer is read.
#[derive(Default)]
pub(super) struct Runs(BTreeMap<(String, String), Last>);

#[derive(Default)]
struct Last {
    runs: VecDeque<Read>,
    success: Option<Micros>,
    asked: bool,
}

struct Read {
    ended: Ended,
    found: Found,
}

/// What of a report is shown; reports of other jobs have other fields.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Found {
    error: Option<String>,
    ended_early: Option<String>,
    checked: u64,
    drifted: u64,
    repaired: u64,
    transient: u64,
    unknown: u64,
    busy: u64,
}

impl Runs {
    /// Reads what is new of these modes, and says how each stands.
    pub async fn look(&mut self, store: &Store, modes: Vec<JobMode>, now: Micros) -> Result<Vec<Job>> {
        let running = store.running_jobs().await?;
        let mut jobs = Vec::new();
        for JobMode { job, mode, pattern } in modes {
            let name = job.name();
            let last = self.0.entry((name.to_owned(), mode.clone())).or_default();
            last.read(store, name, &mode).await?;
            let next = cron::parse(&pattern).ok().and_then(|cron| cron::next_run(&cron, now));
            jobs.push(Job {
                job: name.to_owned(),
                running: running.iter().find(|row| row.job == name && row.mode == mode).map(run),
                last: last.runs.back().map(|read| read.ended.clone()),
                last_success_at: last.success.map(|at| at.0),
                next_at: next.map(|at| at.0),
                mode,
            });
        }
        // What only a person starts: a restore, a few targets.
        let rare = running.iter().filter(|row| jobs.iter().all(|job| (&job.job, &job.mode) != (&row.job, &row.mode)));
        let rare: Vec<Job> = rare
            .map(|row| Job { job: row.job.clone(), mode: row.mode.clone(), running: Some(run(row)), ..Job::default() })
            .collect();
        jobs.extend(rare);
        Ok(jobs)
    }

    pub fn last_reconciles(&self) -> Vec<Reconciled> {
        let of = self.0.iter().filter(|((job, _), _)| job == JobName::Reconcile.name());
        of.filter_map(|((_, mode), last)| last.last(mode)).collect()
    }

    pub fn reconciles(&self) -> Vec<Reconciled> {
        let of = self.0.iter().filter(|((job, _), _)| job == JobName::Reconcile.name());
        let mut all: Vec<Reconciled> =
            of.flat_map(|((_, mode), last)| last.runs.iter().map(|read| reconciled(mode, read))).collect();
        all.sort_by_key(|run| (run.ended_at, run.run));
        all.split_off(all.len().saturating_sub(RUNS_MAX as usize))
    }
}

impl Last {
    fn last(&self, mode: &str) -> Option<Reconciled> {
        self.runs.back().map(|read| reconciled(mode, read))
    }

    async fn read(&mut self, store: &Store, job: &str, mode: &str) -> Result<()> {
        // Of the same microsecond, too: a run that was read already is passed over.
        let since = self.runs.back().map_or(0, |read| read.ended.ended_at);
        let rows = store.ended_runs(job, mode, Micros(since), RUNS_MAX).await?;
        for row in rows.into_iter().rev() {
            if self.runs.iter().any(|read| read.ended.run == row.run) {
                continue;
            }
            if row.outcome == "done" {
                self.success = self.success.max(Some(row.finished_at));
            }
            self.runs.push_back(read(row));
        }
        while self.runs.len() as u64 > RUNS_MAX {
            self.runs.pop_front();
        }
        if self.success.is_none() && !self.asked {
            // All that were read have failed: the last that was done is older.
            self.success = store.last_success(job, mode).await?;
            self.asked = true;
        }
        Ok(())
    }
}

fn run(row: &RunningRow) -> Run {
    let here = telemetry().jobs.get(&row.job);
    let is_here = here.running.as_ref().is_some_and(|(mode, _)| *mode == row.mode);
    let (done, total) = here.done;
    Run {
        run: row.run,
        owner: row.owner.clone(),
        started_at: row.started_at.0,
        progress: total.filter(|total| is_here && *total > 0).map(|total| (done as f64 / total as f64).min(1.0)),
        waits: here.waits.as_ref().filter(|_| is_here).map(|(waits, _)| *waits),
        waits_words: here.waits.filter(|_| is_here).map(|(_, words)| words),
    }
}

fn read(row: RunRow) -> Read {
    // A report of another version may have other fields.
    let found: Found = serde_json::from_str(&row.report).unwrap_or_default();
    let RunRow { run, owner, started_at, finished_at, outcome, .. } = row;
    let outcome = Outcome::of(&outcome);
    let reason = found.error.clone().or_else(|| found.ended_early.clone());
    let ended = Ended { run, owner, started_at: started_at.0, ended_at: finished_at.0, outcome, reason };
    Read { ended, found }
}

fn reconciled(mode: &str, Read { ended, found }: &Read) -> Reconciled {
    Reconciled {
        run: ended.run,
        mode: mode.to_owned(),
        ended_at: ended.ended_at,
        outcome: ended.outcome,
        checked: found.checked,
        drifted: found.drifted,
        repaired: found.repaired,
        transient: found.transient,
        unknown: found.unknown,
        busy: found.busy,
    }
}
