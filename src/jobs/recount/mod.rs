//! Recounts counters whose true values can be counted in another table (for example comments). Compares the table
//! `counter` with the result of the operator's query, and corrects the table.
//!
//! For each page of targets, the run queries the next ids and reads their rows of `counter` in one snapshot. Targets
//! that differ are *suspects*. The run waits `publish_grace`, sends a fence through every partition, and measures the
//! suspects again. If a target is wrong at both measurements, and did not change in between, the difference is added.
//!
//! An API server writes a comment's row and publishes the comment's event at nearly the same time. So in any snapshot
//! the table and `counter` differ by the events in flight. One measurement cannot distinguish these events from drift.
//! Possible races, each with its outcome:
//!
//! * A: a comment's row is written. B: the first measurement finds -1. C: the comment's event is applied. The fence is
//!   sent `publish_grace` later, so the second measurement comes after C and finds the target right.
//! * A: the first measurement. B: a comment is added. C: the second measurement. The table's count differs between the
//!   two measurements. So the target has *changed*, and the run measures the target again.
//! * Between the two measurements one comment is added and another one is removed, so the true value is unchanged. If
//!   only one of the two events was applied, the counter has a newer `at`, so the target has changed. If both events or
//!   neither were applied, the drift is unchanged.
//! * A: a drift of +1. B: a comment's row is written, and its event is in flight. C: the first measurement finds no
//!   drift. This run does not measure the target again, so a later run finds the drift.
//! * A: two measurements agree. B: an event is applied. C: the correction. The correction adds a difference, so the
//!   effect of B is kept.
//! * A: a run freezes. B: a second run makes corrections. C: the first run resumes. Each correction checks the job's
//!   lock in its own transaction, so the first run writes nothing.
//!
//! A row must be written and its event published within `publish_grace`, in either order. If API servers count, their
//! clocks must also agree within `publish_grace`. If an event's `at` is older than that of the newest applied event,
//! `update_at` stays the same, and the target seems unchanged.
//!
//! A recount never sets a counter, never writes to the queried table, and never corrects after only one measurement.

mod correct;
mod page;
pub mod report;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::config::{Config, Reconcile as Limits, Recount, Rules, Writes};
use crate::jobs::JobError;
use crate::jobs::fence::Fences;
use crate::runtime::fault;
use crate::runtime::progress::{ProgressSink, follow};
use page::{Measured, Recheck, judge, measured};
use report::{End, Progress, Report};
use tallyd_core::job_name::JobName;
use tallyd_core::model::{Kind, Metric, TargetId};
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_core::site_query::{OF_RECOUNT, Query};
use tallyd_mysql::Store;
use tallyd_mysql::jobs::number_of;
use tallyd_mysql::ranges::LAST;
use tallyd_mysql::recounts::Question;
use tallyd_mysql::repairs::{Intent, RedisFollows};
use tallyd_mysql::site_query::{Plan, QueryError, Statement};
use tallyd_rabbitmq::Broker;

/// The points at which a test can end the process, in order.
pub const FAULT_POINTS: [&str; 4] =
    ["recount:looked", "recount:looked-again", "recount:correcting", "recount:corrected"];

/// When there are this many suspects, the run measures them again before the next page.
const SUSPECTS_MAX: usize = 10_000;

/// If a suspect's true value changes all the time, the run measures the suspect again this number of times.
const LOOKS: usize = 4;

/// Maximum number of corrections that wait until all targets are compared. So a run over the safety limit changes
/// nothing. If this many corrections wait, the run makes these corrections before all targets are compared.
const HELD_MAX: usize = 100_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub dry_run: bool,
    /// The run corrects without a safety limit.
    pub force: bool,
}

pub struct Recounter {
    store: Store,
    broker: Broker,
    limits: Limits,
    name: String,
    kind_name: String,
    kind: Kind,
    metric: Metric,
    /// The way in which Redis gets the correction.
    follows: RedisFollows,
    query: Query,
    page_targets: usize,
    query_max: Duration,
}

/// One page's range of ids and suspects: the targets whose number was wrong at the last measurement.
struct Suspects {
    after: TargetId,
    until: TargetId,
    /// The measurements in order of id.
    measured: Vec<Measured>,
}

struct Run<'a> {
    on: &'a Recounter,
    options: RunOptions,
    fences: Fences<'a>,
    progress: watch::Sender<Progress>,
    number: u64,
    /// How many numbers the run has used for its fences and corrections.
    used: u64,
    stop: &'a CancellationToken,
    /// The suspects of each page, in order of id.
    suspects: Vec<Suspects>,
    intents: Vec<Intent>,
    /// The size of the largest correction so far, without its sign.
    largest: u64,
    report: Report,
}

impl Recounter {
    /// Makes the recounter of one `[[recount]]` block.
    pub fn new(config: &Config, recount: &Recount, store: Store, broker: Broker) -> Result<Self> {
        let kind = config.kinds.named(&recount.kind).context("the kind is not in [kinds]")?;
        let metric = config.metrics.named(&recount.metric).context("the metric is not in [metrics]")?;
        Ok(Self {
            store,
            broker,
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

    /// Returns MySQL's plan for the query. The query is not executed.
    ///
    /// # Errors
    /// Fails with [`JobError::Refused`] and the problem, if the query is wrong. Also fails if MySQL fails.
    pub async fn explain(&self) -> Result<Vec<Plan>, JobError> {
        self.store.explain_recount(&self.question(TargetId(0))).await.map_err(|error| self.job_error(error))
    }

    /// Executes the run `number` of the job and shows its progress. The caller holds the job's lock. If the token
    /// `stop` is cancelled, the run ends immediately, even during a measurement.
    ///
    /// # Errors
    /// Fails with [`JobError::Refused`] if the query has a problem, and with [`JobError::NotNow`] if the run cannot
    /// wait for events in flight. Also fails if a server fails. Corrections that were made before a failure stay.
    pub async fn run(
        &self,
        number: u64,
        options: RunOptions,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report, JobError> {
        let (progress, shown) = watch::channel(Progress { recount: self.name.clone(), ..Progress::default() });
        tokio::select! {
            ran = self.run_showing(number, options, progress, stop) => ran,
            () = follow(to, shown) => Err(JobError::Other(anyhow!("the output of the run is closed, so the run stops"))),
        }
    }

    async fn run_showing(
        &self,
        number: u64,
        options: RunOptions,
        progress: watch::Sender<Progress>,
        stop: &CancellationToken,
    ) -> Result<Report, JobError> {
        let publisher = self.broker.connect_publisher("recount").await.map_err(anyhow::Error::from)?;
        let fences = Fences {
            job: JobName::Recount.name(),
            store: &self.store,
            broker: &self.broker,
            publisher,
            fence_max: self.limits.fence_max.0,
        };
        let report = Report { recount: self.name.clone(), dry_run: options.dry_run, ..Report::default() };
        let mut run = Run {
            on: self,
            options,
            fences,
            progress,
            number,
            used: 0,
            stop,
            suspects: Vec::new(),
            intents: Vec::new(),
            largest: 0,
            report,
        };
        match run.compare_all().await.map_err(JobError::from) {
            Err(JobError::NotNow(_)) if stop.is_cancelled() => run.end(End::Stopped, "it was stopped".to_owned()),
            Err(JobError::LimitExceeded(LimitExceeded(reason))) => {
                let recount = &self.name;
                warn!(
                    event = "recount-braked",
                    recount, reason, "the recount {recount} stopped and corrects nothing more: {reason}"
                );
                run.end(End::LimitExceeded, reason);
            }
            Err(error) if run.report.corrected > 0 => {
                let corrected = run.report.corrected;
                let error = error.into_error();
                return Err(error
                    .context(format!("{corrected} counters were corrected before this failure, and stay corrected"))
                    .into());
            }
            ended => ended?,
        }
        Ok(run.report)
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

impl Run<'_> {
    async fn compare_all(&mut self) -> Result<()> {
        let mut after = TargetId(0);
        while after < LAST {
            if self.stop.is_cancelled() {
                self.end(End::Stopped, "it was stopped".to_owned());
                return Ok(());
            }
            let page = self.measure(after, LAST).await?;
            self.report.checked += page.checked;
            self.report.exact += page.checked - page.off.len() as u64;
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

    /// Measures a page once. Returns the targets that are wrong.
    async fn measure(&mut self, after: TargetId, until: TargetId) -> Result<Page> {
        let began = Instant::now();
        let question = self.on.question(after);
        let asked = self.on.store.ask_recount((self.on.kind, self.on.metric), &question, until);
        // A query can take minutes. If the run is stopped, it drops the connection and does not wait for the query.
        let answer = self.stop.run_until_cancelled(asked).await.ok_or_else(stopped)?;
        let answer = answer.map_err(|error| self.on.job_error(error).into_error())?;
        self.report.pages += 1;
        let mut page = Page { checked: 0, off: Vec::new(), until: answer.until };
        for found in measured(&answer) {
            page.checked += 1;
            if found.drift() != 0 {
                page.off.push(found);
            }
        }
        self.report.look_ms += millis(began.elapsed());
        Ok(page)
    }

    /// Measures the suspects again until each one has a result or has changed too often.
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
                if self.stop.is_cancelled() {
                    return Err(stopped());
                }
                let measured = self.recheck_page(&page).await?;
                if let Some((first, last)) = measured.first().zip(measured.last()) {
                    changed.push(Suspects { after: TargetId(first.id.0 - 1), until: last.id, measured });
                }
            }
            left = changed;
        }
        fault::point("recount:looked-again");
        self.report.busy += left.iter().map(|page| page.measured.len() as u64).sum::<u64>();
        if self.intents.len() >= HELD_MAX { self.correct().await } else { Ok(()) }
    }

    /// Measures a page's suspects again, and decides which of them are wrong. If a suspect's values
    /// have changed since the last measurement, returns the suspect's new measurement.
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
                    None | Some((_, Recheck::Right)) => self.report.transient += 1,
                    Some((second, Recheck::Changed)) => changed.push(second),
                    Some((second, Recheck::Off(added))) => self.note(&second, added),
                }
            }
            after = now.until;
        }
        Ok(changed)
    }

    /// Waits `publish_grace`, and then until every event that was published by then is in MySQL.
    async fn fence(&mut self) -> Result<()> {
        let (number, began) = (self.next_number(), Instant::now());
        let passed = async {
            tokio::time::sleep(self.on.limits.publish_grace.0).await;
            self.fences.pass(number).await
        };
        // At the stop the daemon's own consumers stop, too, so no consumer would commit the fence.
        let passed = self.stop.run_until_cancelled(passed).await.unwrap_or_else(|| Err(stopped()));
        self.report.fence_ms += millis(began.elapsed());
        passed
    }

    fn next_number(&mut self) -> u64 {
        self.used += 1;
        number_of(self.number, self.used)
    }

    fn end(&mut self, ended: End, why: String) {
        self.report.ended = ended;
        self.report.ended_early = Some(why);
    }

    fn pending(&self) -> usize {
        self.suspects.iter().map(|page| page.measured.len()).sum()
    }

    fn show(&self, reached: TargetId) {
        let Report { checked, drifted, .. } = self.report;
        let pending = self.pending() as u64;
        self.progress.send_modify(|progress| {
            let recount = std::mem::take(&mut progress.recount);
            *progress = Progress { recount, checked, drifted, pending, reached: reached.0 };
        });
    }
}

/// The result of measuring a page once.
struct Page {
    checked: u64,
    off: Vec<Measured>,
    until: TargetId,
}

fn stopped() -> anyhow::Error {
    JobError::NotNow("the run was stopped".to_owned()).into()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        crate::jobs::assert_fault_points(&FAULT_POINTS, &[include_str!("mod.rs"), include_str!("correct.rs")]);
    }
}
