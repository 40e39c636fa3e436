//! `tallyd admin export` exports the likes and unlikes that users made after the cut-over. The command writes them into the
//! site's old table, so that the site can return to this table.
//!
//! A pass lists the targets whose counter changed since the last pass, and reads their rows of `like_record` that
//! changed since then. It writes the current state of these rows with the site's own statements, in key order, up to
//! 500 rows in a transaction. A repeated pass writes the same states again.
//!
//! Races:
//!
//! * A: a pass reads a row. B: the user likes again. C: the pass writes the old state. The next pass begins to read
//!   `overlap` before the start of this pass, so it reads the row that B has changed.
//! * A: a pass lists changed targets. B: a target changes again before the pass reaches it, and moves to a part of the
//!   list that the pass has already read (`update_span`). C: the pass misses the target. So the pass makes another
//!   list, of the changes since its start. The list is ordered by spans of five minutes, and a second change in a span
//!   does not move a target. So the pass is complete if it begins and ends two consecutive lists in the same span.
//! * A: a run reads rows, and freezes until its lease has expired. B: another run writes newer states. C: the first run
//!   wakes up. Before each transaction, a run checks that it still holds the job's lock, because the site's server
//!   can't.
//!
//! A pass misses an event that a daemon writes to MySQL more than `overlap` after the event's `at`. `tallyd import
//! --verify` finds it. An export must never change anything but the site's table.

pub mod report;

use std::borrow::Cow;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::config::{Export, Writes};
use crate::sql;
use crate::sql::exports::{LikeRow, time_literal};
use report::{Progress, Report};
use tallyd_base::config::{Config, Reconcile as Limits};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::pages::{PageLimits, is_passing};
use tallyd_base::jobs::run::{Job, Run, RunOptions};
use tallyd_base::runtime::retry::Outage;
use tallyd_core::control::Task;
use tallyd_core::model::{Kind, Metric, Micros, TargetId, UserId};
use tallyd_mysql::Store;
use tallyd_mysql::changed::{ChangedBefore, Span};
use tallyd_mysql::site_query::QueryError;

const PAGE_TARGETS: usize = 10_000;

const READ_TARGETS: usize = 500;

const ROWS: usize = 500;

/// One for writes, and one for checks of the server's load.
const SITE_CONNECTIONS: u32 = 2;

/// A daemon's clock can be this much behind MySQL's, so a further list begins this much before the pass began.
const CLOCKS_APART: Duration = Duration::from_secs(10);

/// Per pass. If each list takes minutes, the next pass finds the remaining changes.
const LISTS_MAX: usize = 10;

pub struct Exporter {
    since: Option<Micros>,
    every: Option<Duration>,
    export: Export,
    kind: Kind,
    like: Metric,
    writes: Writes,
    limits: Limits,
    site: Option<Store>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    /// Everything before it is exported. In microseconds, by MySQL's clock.
    until: i64,
}

struct Exporting<'a, 'r> {
    on: &'a Exporter,
    run: &'a mut Run<'r, Exporter>,
}

impl Exporter {
    pub fn new(config: &Config, export: &Export, since: Option<Micros>, every: Option<Duration>) -> Result<Self> {
        Ok(Self {
            since,
            every,
            kind: config.kinds.named(&export.kind).context("the kind is not in [kinds]")?,
            like: config.metrics.like(),
            writes: export.writes().map_err(|(_, sentence)| anyhow!(sentence))?,
            limits: config.reconcile.clone(),
            site: export.mysql.as_ref().map(|server| Store::new(server, SITE_CONNECTIONS)).transpose()?,
            export: export.clone(),
        })
    }
}

impl Job for Exporter {
    const NAME: &'static str = "export";
    type Report = Report;
    type Progress = Progress;

    fn needs(&self, _: &Config) -> &'static [Task] {
        &[]
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(&self.export.name)
    }

    fn begin(&self) -> (Report, Progress) {
        (Report::new(&self.export), Progress { export: self.export.name.clone(), ..Progress::default() })
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let mut exporting = Exporting { on: self, run };
        let since = exporting.begin().await?;
        let (limits, site) = (self.limits.clone(), self.site.clone());
        let limits = PageLimits { replicas: Vec::new(), site, limits, page_max: PAGE_TARGETS, log_wait };
        exporting.run.limit_pages(limits).await?;
        exporting.export_all(since).await
    }

    async fn close(&self) {
        if let Some(site) = &self.site {
            site.close().await;
        }
    }

    fn how_to_continue(&self, _: &RunOptions) -> Option<&'static str> {
        Some("--resume continues")
    }
}

impl Exporting<'_, '_> {
    async fn export_all(&mut self, mut since: Micros) -> Result<()> {
        let mut outage = Outage::new("writing to the site's table");
        loop {
            let pause = match (self.pass(since).await, self.on.every) {
                (Ok(until), every) => {
                    outage.over();
                    since = until;
                    every
                }
                (Err(error), Some(_)) if is_passing(&error) => Some(outage.failed(&format!("{error:#}"))),
                (Err(error), _) => return Err(error),
            };
            let Some(pause) = pause else { return Ok(()) };
            self.run.unless_stopped(tokio::time::sleep(pause)).await?;
        }
    }

    async fn begin(&mut self) -> Result<Micros> {
        let since = match self.on.since {
            Some(since) => since,
            None => {
                let last = self.run.last_checkpoint::<Checkpoint>(&self.on.mode(), false).await?;
                let (_, Checkpoint { until }) = last.ok_or_else(|| {
                    JobError::Refused(format!(
                        "no run of {} has stored its progress: add --since with the time of the cut-over",
                        self.on.export.name
                    ))
                })?;
                Micros(until)
            }
        };
        self.run.report.since = since.0;
        self.run.note_checkpoint(&Checkpoint { until: since.0 }).await?;
        Ok(since)
    }

    async fn pass(&mut self, since: Micros) -> Result<Micros> {
        let store = &self.run.servers.store;
        let since = since.before(self.on.export.overlap.0);
        let (mut began, _) = store.clock().await?;
        let (until, mut listed_since, mut last) = (began, since, None);
        for _ in 0..LISTS_MAX {
            self.list(listed_since, since).await?;
            let (ended, _) = store.clock().await?;
            let span = Some(Span::of(began)).filter(|span| *span == Span::of(ended));
            if span.is_some() && span == last {
                break;
            }
            (last, listed_since, began) = (span, until.before(CLOCKS_APART).max(since), ended);
        }
        self.run.note_checkpoint(&Checkpoint { until: until.0 }).await?;
        self.run.report.passes += 1;
        self.run.report.until = Some(until.0);
        Ok(until)
    }

    /// Exports the rows since `since` of the targets that changed since `listed_since`.
    async fn list(&mut self, listed_since: Micros, since: Micros) -> Result<()> {
        let mut before = ChangedBefore::NEWEST;
        loop {
            self.run.next_page().await?;
            self.run.check_stop()?;
            let (limit, asked) = (self.run.page_size(), Instant::now());
            let rows = self.run.servers.store.changed_numbers(listed_since, before, limit).await?;
            let numbers = rows.iter().map(|row| row.number);
            let likes = numbers.filter(|(target, metric)| target.kind == self.on.kind && *metric == self.on.like);
            let mut targets: Vec<TargetId> = likes.map(|(target, _)| target.id).collect();
            targets.sort_unstable();
            targets.dedup();
            for some in targets.chunks(READ_TARGETS) {
                self.export(some, since).await?;
            }
            self.run.report.targets += targets.len() as u64;
            self.run.note_page(rows.len(), asked.elapsed());
            self.show();
            let Some(last) = rows.last().filter(|_| rows.len() == limit) else { return Ok(()) };
            before = *last;
        }
    }

    async fn export(&mut self, targets: &[TargetId], since: Micros) -> Result<()> {
        let (mut left, mut after) = (targets, (TargetId(0), UserId(0)));
        loop {
            let rows =
                sql::exports::likes_since(&self.run.servers.store, self.on.kind, left, after, since, ROWS).await?;
            self.write(&rows).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == ROWS) else { return Ok(()) };
            after = (last.target, last.user);
            left = left.get(left.partition_point(|target| *target < last.target)..).unwrap_or_default();
        }
    }

    async fn write(&mut self, rows: &[LikeRow]) -> Result<()> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(()) };
        let Exporter { export, writes, site, .. } = self.on;
        let store = &self.run.servers.store;
        let at = |at: Micros| match export.unit {
            Some(unit) => unit.number(at).to_string(),
            None => time_literal(at),
        };
        let sql = |row: &LikeRow| {
            let deleted = if row.liked { "0" } else { "1" };
            writes.sql(row.liked, &[row.target.to_string(), row.user.to_string(), at(row.at), deleted.to_owned()])
        };
        let statements: Vec<String> = rows.iter().map(sql).collect();
        store.renew_job(Exporter::NAME, self.run.number).await?;
        sql::exports::write_site(site.as_ref().unwrap_or(store), &statements).await.map_err(|error| match error {
            QueryError::Query(sentence) => JobError::Refused(format!(
                "[[export]] {}: the server refuses a row from target {} user {} to target {} user {}: {sentence}",
                export.name, first.target, first.user, last.target, last.user
            ))
            .into(),
            QueryError::Store(error) => anyhow::Error::from(error),
        })?;
        let likes = rows.iter().filter(|row| row.liked).count() as u64;
        self.run.report.likes += likes;
        self.run.report.unlikes += rows.len() as u64 - likes;
        Ok(())
    }

    fn show(&self) {
        let Report { targets, likes, unlikes, passes, .. } = self.run.report;
        self.run.show(|shown| {
            *shown = Progress { targets, rows: likes + unlikes, passes, ..std::mem::take(shown) };
        });
    }
}

fn log_wait(reason: &str) {
    info!(event = "export-waiting", reason, "waiting, live traffic goes first: {reason}");
}
