//! Recounts counters whose true values can be counted in another table (for example comments). Compares the table
//! `counter` with the result of the operator's query, and corrects the table.
//!
//! For each page of targets, the run queries the next ids and reads their rows of `counter` in one snapshot. Targets
//! that differ are *suspects*. The run waits `publish_grace`, sends a fence through every partition, and measures the
//! suspects again. If a target is wrong at both measurements, and did not change in between, the difference is added.
//!
//! An API server writes a comment's row and publishes its event at nearly the same time. So in any snapshot the table
//! and `counter` differ by the events in flight, which one measurement cannot distinguish from drift. Possible races,
//! each with its outcome:
//!
//! * A: a comment's row is written. B: the first measurement finds -1. C: the comment's event is applied. The fence is
//!   sent `publish_grace` later, so the second measurement comes after C and finds the target right.
//! * A: the first measurement. B: a comment is added. C: the second measurement. The table's count differs, so the
//!   target has *changed*, and is measured again.
//! * Between the measurements one comment is added and another one is removed, so the true value is unchanged. If only
//!   one event was applied, the counter has a newer `at`, so the target has changed. If both or neither were applied,
//!   the drift is unchanged.
//! * A: a drift of +1. B: a comment's row is written, and its event is in flight. C: the first measurement finds no
//!   drift. A later run finds it.
//! * A: two measurements agree. B: an event is applied. C: the correction. It adds a difference, so the effect of B is
//!   kept.
//! * A: a run freezes. B: a second run makes corrections. C: the first run resumes. Each correction checks the job's
//!   lock in its own transaction, so the first run writes nothing.
//!
//! A row must be written and its event published within `publish_grace`, in either order. If API servers count, their
//! clocks must also agree within `publish_grace`. If an event's `at` is older than that of the newest applied event,
//! `update_at` stays the same, and the target seems unchanged.
//!
//! A recount never sets a counter, never writes to the queried table, and never corrects after only one measurement.

pub mod check;
pub mod command;
mod correct;
mod page;
pub mod report;
mod sql;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::FutureExt;
use tracing::warn;

use page::{Measured, Recheck, judge, measured};
use report::{Progress, Report};
use sql::Question;
use tallyd_base::config::{Config, Reconcile as Limits, Recount, Rules, Writes};
use tallyd_base::jobs::fence::Fences;
use tallyd_base::jobs::run::{Job, Run, RunOptions, millis_since, scheduled};
use tallyd_base::jobs::schedule::RetryAfter;
use tallyd_base::jobs::{FirstRun, JobEntry, JobError, JobSpec, Work};
use tallyd_base::runtime::fault;
use tallyd_core::control::Task;
use tallyd_core::model::{Kind, Metric, TargetId};
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_core::site_query::{OF_RECOUNT, Query};
use tallyd_mysql::Store;
use tallyd_mysql::ranges::LAST;
use tallyd_mysql::repairs::{Intent, RedisFollows};
use tallyd_mysql::site_query::{Plan, QueryError, Statement};

pub const JOB: &str = "recount";

pub const NEEDS: &[Task] = &[Task::Consumer];

pub const FAULT_POINTS: [&str; 4] =
    ["recount:looked", "recount:looked-again", "recount:correcting", "recount:corrected"];

const SUSPECTS_MAX: usize = 10_000;

const LOOKS: usize = 4;

/// Corrections wait until all targets are compared, so that a run over the safety limit changes nothing.
const INTENTS_MAX: usize = 100_000;

pub fn job() -> JobEntry {
    JobEntry { name: JOB, task: "recounter", specs: Arc::new(specs), first: None }
}

fn specs(config: &Config) -> Vec<JobSpec> {
    let row = |(rank, block): (usize, &Recount)| JobSpec {
        first_run: FirstRun::AtItsTime,
        rank,
        ..JobSpec::new(&block.name(), &block.cron, NEEDS, |work| recounted(work).boxed())
    };
    config.recounts.iter().enumerate().map(row).collect()
}

async fn recounted(work: Work) -> Result<RetryAfter, JobError> {
    // A reload of the configuration can have removed the recount.
    let Some(recount) = work.config.recounts.iter().find(|recount| recount.name() == work.mode) else {
        return Ok(RetryAfter::NextTime);
    };
    scheduled(&work, &Recounter::new(&work.config, recount)?, RunOptions::default()).await
}

pub struct Recounter {
    limits: Limits,
    name: String,
    kind_name: String,
    kind: Kind,
    metric: Metric,
    follows: RedisFollows,
    query: Query,
    page_targets: usize,
    query_max: Duration,
}

struct Suspects {
    after: TargetId,
    until: TargetId,
    measured: Vec<Measured>,
}

struct Comparison<'a, 'r> {
    on: &'a Recounter,
    run: &'a mut Run<'r, Recounter>,
    fences: Fences<'r>,
    suspects: Vec<Suspects>,
    intents: Vec<Intent>,
    largest: u64,
}

impl Recounter {
    pub fn new(config: &Config, recount: &Recount) -> Result<Self> {
        let kind = config.kinds.named(&recount.kind).context("the kind is not in [kinds]")?;
        let metric = config.metrics.named(&recount.metric).context("the metric is not in [metrics]")?;
        Ok(Self {
            limits: config.reconcile.clone(),
            name: recount.name(),
            kind_name: recount.kind.clone(),
            kind,
            metric,
            follows: match Rules::from(config).of(kind, metric).writer {
                Writes::Daemon => RedisFollows::Outbox,
                Writes::Api => RedisFollows::NextReconcile,
            },
            query: Query::parse(&recount.query, OF_RECOUNT).map_err(anyhow::Error::msg)?,
            page_targets: recount.page_targets,
            query_max: recount.query_max.0,
        })
    }

    /// MySQL's plan; the query is not executed. [`JobError::Refused`] has the problem of a wrong query.
    pub async fn explain(&self, store: &Store) -> Result<Vec<Plan>, JobError> {
        sql::explain(store, &self.question(TargetId(0))).await.map_err(|error| self.job_error(error))
    }

    fn question(&self, after: TargetId) -> Question {
        let limit = self.page_targets;
        let statement = Statement {
            sql: self.query.sql(&[after.0, limit as u64]),
            query_max: self.query_max,
            page_key: "page_targets",
            url_key: "[mysql] url",
        };
        Question { statement, after, limit }
    }

    fn job_error(&self, error: QueryError) -> JobError {
        match error {
            QueryError::Query(sentence) => {
                JobError::Refused(format!("[[recount]] of {}: {sentence}", self.name.replace(':', " ")))
            }
            QueryError::Store(error) => JobError::Other(error.into()),
        }
    }
}

impl Job for Recounter {
    const NAME: &'static str = JOB;
    const SENDS_FENCES: bool = true;
    type Report = Report;
    type Progress = Progress;

    fn needs(&self, _: &Config) -> &'static [Task] {
        NEEDS
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(&self.name)
    }

    fn begin(&self) -> (Report, Progress) {
        let recount = self.name.clone();
        (Report { recount: recount.clone(), ..Report::default() }, Progress { recount, ..Progress::default() })
    }

    /// A stop ends the run even during a measurement.
    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let fences = run.fences(self.limits.fence_max.0).await?;
        let (suspects, intents) = (Vec::new(), Vec::new());
        let compared = Comparison { on: self, run, fences, suspects, intents, largest: 0 }.compare_all().await;
        compared.map_err(|error| match run.report.corrected {
            corrected if corrected > 0 && !error.is::<LimitExceeded>() => {
                error.context(format!("{corrected} counters were corrected before this failure, and stay corrected"))
            }
            _ => error,
        })
    }

    fn log_limit(&self, reason: &str) {
        let recount = &self.name;
        warn!(
            event = "recount-braked",
            recount, reason, "the recount {recount} stopped and corrects nothing more: {reason}"
        );
    }
}

impl Comparison<'_, '_> {
    async fn compare_all(mut self) -> Result<()> {
        let mut after = TargetId(0);
        while after < LAST {
            self.run.check_stop()?;
            let page = self.measure(after, LAST).await?;
            let report = &mut self.run.report;
            report.checked += page.checked;
            report.exact += page.checked - page.off.len() as u64;
            if !page.off.is_empty() {
                self.suspects.push(Suspects { after, until: page.until, measured: page.off });
            }
            after = page.until;
            self.show(after);
            if self.pending() >= SUSPECTS_MAX {
                self.recheck().await?;
            }
        }
        self.recheck().await?;
        self.correct().await
    }

    async fn measure(&mut self, after: TargetId, until: TargetId) -> Result<CheckedPage> {
        let began = Instant::now();
        let question = self.on.question(after);
        let asked = sql::ask(&self.run.servers.store, (self.on.kind, self.on.metric), &question, until);
        // A query can take minutes. If the run is stopped, it drops the connection and does not wait for the query.
        let answer = self.run.unless_stopped(asked).await?;
        let answer = answer.map_err(|error| self.on.job_error(error).into_error())?;
        self.run.report.pages += 1;
        let mut page = CheckedPage { checked: 0, off: Vec::new(), until: answer.until };
        for found in measured(&answer) {
            page.checked += 1;
            if found.drift() != 0 {
                page.off.push(found);
            }
        }
        self.run.report.look_ms += millis_since(began);
        Ok(page)
    }

    async fn recheck(&mut self) -> Result<()> {
        let mut left = std::mem::take(&mut self.suspects);
        fault::point("recount:looked");
        for _ in 0..LOOKS {
            if left.is_empty() {
                break;
            }
            self.fence().await?;
            let mut changed = Vec::new();
            for page in left {
                self.run.check_stop()?;
                let measured = self.recheck_page(&page).await?;
                if let Some((first, last)) = measured.first().zip(measured.last()) {
                    changed.push(Suspects { after: TargetId(first.id.0 - 1), until: last.id, measured });
                }
            }
            left = changed;
        }
        fault::point("recount:looked-again");
        self.run.report.busy += left.iter().map(|page| page.measured.len() as u64).sum::<u64>();
        if self.intents.len() >= INTENTS_MAX { self.correct().await } else { Ok(()) }
    }

    /// Returns new measurements of the suspects whose values have changed since the last one.
    async fn recheck_page(&mut self, page: &Suspects) -> Result<Vec<Measured>> {
        let (mut after, mut changed) = (page.after, Vec::new());
        let mut suspects = page.measured.iter().peekable();
        // There is more than one page if targets were added between the two measurements.
        while after < page.until {
            let now = self.measure(after, page.until).await?;
            let mut off = now.off.into_iter().peekable();
            while let Some(first) = suspects.next_if(|first| first.id <= now.until) {
                while off.next_if(|found| found.id < first.id).is_some() {}
                // A suspect that is not in the list of wrong targets is now right.
                let recheck = off.next_if(|found| found.id == first.id).map(|second| (second, judge(first, &second)));
                match recheck {
                    None | Some((_, Recheck::Right)) => self.run.report.transient += 1,
                    Some((second, Recheck::Changed)) => changed.push(second),
                    Some((second, Recheck::Off(added))) => self.note(&second, added),
                }
            }
            after = now.until;
        }
        Ok(changed)
    }

    async fn fence(&mut self) -> Result<()> {
        let (number, began) = (self.run.next_number(), Instant::now());
        let passed = async {
            tokio::time::sleep(self.on.limits.publish_grace.0).await;
            self.fences.pass(number).await
        };
        // At the stop the daemon's own consumers stop, too, so no consumer would commit the fence.
        let passed = self.run.unless_stopped(passed).await;
        self.run.report.fence_ms += millis_since(began);
        passed?
    }

    fn pending(&self) -> usize {
        self.suspects.iter().map(|page| page.measured.len()).sum()
    }

    fn show(&self, reached: TargetId) {
        let Report { checked, drifted, .. } = self.run.report;
        let pending = self.pending() as u64;
        self.run.show(|progress| {
            let recount = std::mem::take(&mut progress.recount);
            *progress = Progress { recount, checked, drifted, pending, reached: reached.0 };
        });
    }
}

struct CheckedPage {
    checked: u64,
    off: Vec<Measured>,
    until: TargetId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        fault::assert_points(&FAULT_POINTS, &[include_str!("lib.rs"), include_str!("correct.rs")]);
    }
}
