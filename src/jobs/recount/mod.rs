//! Numbers whose truth is another table (comments): `counter` compared with what a query of the operator's says, and corrected.
//!
//! The way of a page of targets: in one snapshot run the query for the next ids, and read their rows of `counter` -> what differs is
//! *suspect* -> wait `publish_grace`, send a fence through every partition, and look again -> what is off both times, and has not
//! changed between the looks, gets the difference added.
//!
//! An API server writes a comment's row and publishes its event, one shortly after the other. So in any snapshot the table and `counter`
//! differ by the events on the way, and no single look tells them from drift. What decides the races:
//!
//! * A: a comment's row. B: the first look. C: its event is applied. The look sees -1. The fence goes out `publish_grace` after it, so C
//!   is before the second look, which finds the target right.
//! * A: the first look. B: a comment. C: the second look. The truth is another one: the target has *changed*, and is looked at again.
//! * The same with one comment more and another one less in between: the truth is what it was. If one of the two events was applied,
//!   the counter has a newer `at`: the target has changed. If neither was, the two make no difference to the drift. If both were,
//!   they don't either.
//! * A: a drift of +1. B: a comment's row, whose event is on its way. C: the first look, which finds the target right. The next run
//!   finds the drift: a target that seems right is not looked at again.
//! * A: two looks agree. B: an event is applied. C: the correction. It adds a difference, and so keeps B.
//! * A: a run is frozen. B: another one corrects. C: the first one wakes up. Each correction holds the job's lock in its own transaction.
//!
//! What this rests on is that a row and its event follow each other within `publish_grace`, whichever is first; and that the clocks that
//! `at` is taken from agree within it too: an event whose `at` is older than the newest one that was applied leaves `update_at` as it was,
//! and the target seems to have rested.
//!
//! What it must never do: set a counter, write to the table that it is told of, judge by one look.

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

/// Where a test may end the process: between any two steps, in their order.
pub const FAULT_POINTS: [&str; 4] =
    ["recount:looked", "recount:looked-again", "recount:correcting", "recount:corrected"];

/// Once so many targets are suspect they are looked at again.
const SUSPECTS_MAX: usize = 10_000;

/// How often a suspect target is looked at again, until it has rested for two looks.
const LOOKS: usize = 4;

/// Corrections that are held until all is compared, so that a run that is too much changes nothing. Of more than that the first ones are
/// made before.
const HELD_MAX: usize = 100_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub dry_run: bool,
    /// Correct however much it is.
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
    /// How Redis gets what is corrected.
    follows: RedisFollows,
    query: Query,
    page_targets: usize,
    query_max: Duration,
}

/// Targets that one look found off, and where they lie.
struct Suspects {
    after: TargetId,
    until: TargetId,
    /// In order of id.
    measured: Vec<Measured>,
}

struct Run<'a> {
    on: &'a Recounter,
    options: RunOptions,
    fences: Fences<'a>,
    progress: watch::Sender<Progress>,
    number: u64,
    /// How many numbers (fences, corrections) the run has used.
    used: u64,
    stop: &'a CancellationToken,
    /// By page, in order.
    suspects: Vec<Suspects>,
    intents: Vec<Intent>,
    /// The largest of all corrections so far, without sign.
    largest: u64,
    report: Report,
}

impl Recounter {
    /// A recounter of that block.
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

    /// How MySQL would run the query; it is not run.
    ///
    /// # Errors
    /// [`JobError::Refused`] with what is wrong with it; MySQL fails.
    pub async fn explain(&self) -> Result<Vec<Plan>, JobError> {
        self.store.explain_recount(&self.question(TargetId(0))).await.map_err(|error| self.job_error(error))
    }

    /// Does the run `number` of the job, which the caller holds the lock of, and shows how far it is. Ends within a look when `stop` is
    /// cancelled.
    ///
    /// # Errors
    /// [`JobError::Refused`]; [`JobError::NotNow`] when events on the way can't be waited for; a server fails. Whatever was corrected stays corrected.
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
            () = follow(to, shown) => Err(JobError::Other(anyhow!("nobody is shown the run any longer"))),
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
            Err(JobError::NotNow(_)) if stop.is_cancelled() => run.end(End::Stopped, "told to stop".to_owned()),
            Err(JobError::LimitExceeded(LimitExceeded(reason))) => {
                let recount = &self.name;
                warn!(event = "recount-braked", recount, reason, "nothing more of {recount} is corrected: {reason}");
                run.end(End::LimitExceeded, reason);
            }
            Err(error) if run.report.corrected > 0 => {
                let corrected = run.report.corrected;
                let error = error.into_error();
                return Err(error
                    .context(format!("{corrected} numbers were corrected until then, and stay so"))
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
                self.end(End::Stopped, "told to stop".to_owned());
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

    /// One look at a page: its targets that are off.
    async fn measure(&mut self, after: TargetId, until: TargetId) -> Result<Page> {
        let began = Instant::now();
        let question = self.on.question(after);
        let asked = self.on.store.ask_recount((self.on.kind, self.on.metric), &question, until);
        // A query may take minutes: a stop drops its connection.
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

    /// Looks again at what is suspect until it is decided, or has changed too often.
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

    /// Judges a page's suspects by another look, and gives those that have changed as that look saw them.
    async fn recheck_page(&mut self, page: &Suspects) -> Result<Vec<Measured>> {
        let (mut after, mut changed) = (page.after, Vec::new());
        let mut suspects = page.measured.iter().peekable();
        // More than one page where targets have come in between.
        while after < page.until {
            let now = self.measure(after, page.until).await?;
            let mut off = now.off.into_iter().peekable();
            while let Some(first) = suspects.next_if(|first| first.id <= now.until) {
                while off.next_if(|found| found.id < first.id).is_some() {}
                // Not among those that are off: it is right by now.
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
        // The daemon's own consumers stop too: then nobody lets the fence pass.
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

/// What one look at a page saw.
struct Page {
    checked: u64,
    off: Vec<Measured>,
    until: TargetId,
}

fn stopped() -> anyhow::Error {
    JobError::NotNow("told to stop".to_owned()).into()
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
