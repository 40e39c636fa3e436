//! `tallyd export` exports the likes and unlikes that users made after the cut-over. The command writes them into the
//! site's old table, so that the site can return to this table.
//!
//! A pass lists the targets whose counter changed since the last pass. For each listed target, the pass reads the rows
//! of `like_record` that changed since the last pass. The pass writes the current state of these rows with the site's
//! own statements, in key order, up to 500 rows in a transaction. A repeated pass writes the same states again.
//!
//! Races:
//!
//! * A: a pass reads a row. B: the user likes again. C: the pass writes the old state. The next pass also reads older
//!   changes: it begins to read `overlap` before the start of this pass. So the next pass reads the row that B has
//!   changed.
//! * A: a pass lists changed targets. B: a target changes again before the pass reaches it in the list. The change
//!   moves the target to a part of the list that the pass has already read (`update_span`). C: the pass misses the
//!   target. So the pass makes another list, which contains the changes since the start of the pass. The list is
//!   ordered by spans of five minutes, so a second change in a span does not move a target. If the pass begins and ends
//!   two consecutive lists in the same span, the pass is complete.
//! * A: a run reads rows, and freezes until its lease has expired. B: another run writes newer states. C: the first run
//!   wakes up. Before each transaction, a run checks that it still holds the job's lock, because the site's server
//!   can't check this.
//!
//! A pass misses an event if a daemon writes it to MySQL more than `overlap` after the event's `at`. `tallyd import
//! --verify` finds such an event.
//!
//! An export must never change anything but the site's table.

pub mod report;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::is_passing;
use crate::config::{Config, Export, ExportWrites, Metrics};
use crate::jobs::JobError;
use crate::jobs::runner::{LockRequest, Ran, run_once};
use crate::runtime::progress::{ProgressSink, follow};
use crate::runtime::retry::Outage;
use crate::servers::Servers;
use crate::servers::pace::{Health, Pace};
use report::{End, Progress, Report};
use tallyd_core::job_name::CommandName;
use tallyd_core::model::{Kind, Micros, TargetId, UserId};
use tallyd_mysql::Store;
use tallyd_mysql::changed::{ChangedBefore, Span};
use tallyd_mysql::moving::exports::{LikeRow, time_literal};
use tallyd_mysql::site_query::QueryError;
use tallyd_rabbitmq::Publisher;

/// Maximum number of rows of `counter` that one list call reads.
const PAGE_TARGETS: usize = 10_000;

/// Number of targets whose rows one statement reads.
const READ_TARGETS: usize = 500;

/// Maximum number of rows that one call reads and one transaction writes.
const ROWS: usize = 500;

/// The number of connections to the site's server: one for writes, and one for checks of the server's load.
const SITE_CONNECTIONS: u32 = 2;

/// A daemon's clock can be this much behind MySQL's clock. So if a pass makes another list, the list contains the
/// changes since an earlier time: the start of the pass minus this duration.
const CLOCKS_APART: Duration = Duration::from_secs(10);

/// Maximum number of lists in one pass. If each list takes minutes, a pass can reach this maximum. In that case the
/// next pass finds the remaining changes.
const LISTS_MAX: usize = 10;

const JOB: &str = CommandName::Export.name();

/// The time from which an export starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    Since(Micros),
    /// The export continues where its last run ended.
    Resume,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOptions {
    pub begin: Begin,
    /// The pause between two passes. `None` if the run makes only one pass.
    pub every: Option<Duration>,
}

/// The progress of an export over all its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    /// All rows that were written before this time are exported. The time is in microseconds, by MySQL's clock.
    until: i64,
}

struct Exporter<'a> {
    servers: &'a Servers,
    export: &'a Export,
    kind: Kind,
    metrics: &'a Metrics,
    writes: ExportWrites,
    /// The server that has the site's table. `None`: the server of `[mysql]`.
    site: Option<Store>,
}

struct Run<'a> {
    on: &'a Exporter<'a>,
    number: u64,
    pace: Pace,
    publisher: Publisher,
    progress: watch::Sender<Progress>,
    stop: &'a CancellationToken,
    report: Report,
}

/// Exports under the job's lock, either once or repeatedly until `stop`.
///
/// # Errors
/// Fails with [`JobError::Refused`] if a statement is wrong, or with another error if a server fails.
pub async fn run(
    servers: &Servers,
    config: &Config,
    export: &Export,
    options: RunOptions,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<Report>, JobError> {
    let on = Exporter::new(servers, config, export)?;
    let job =
        LockRequest { name: JOB, mode: &export.name, owner: &servers.owner, keep: config.reconcile.repair_keep.0 };
    let on = &on;
    let work = |number| async move {
        let (progress, shown) = watch::channel(Progress { export: export.name.clone(), ..Progress::default() });
        tokio::select! {
            ran = on.run(config, number, options, progress, stop) => ran,
            () = follow(to, shown) => Err(anyhow!("the output of the run is closed, so the run stops")),
        }
    };
    run_once(&servers.store, job, work).await
}

impl<'a> Exporter<'a> {
    fn new(servers: &'a Servers, config: &'a Config, export: &'a Export) -> Result<Self> {
        Ok(Self {
            servers,
            export,
            kind: config.kinds.named(&export.kind).context("the kind is not in [kinds]")?,
            metrics: &config.metrics,
            writes: export.writes().map_err(|(_, sentence)| anyhow!(sentence))?,
            site: export.server.as_ref().map(|server| Store::new(server, SITE_CONNECTIONS)).transpose()?,
        })
    }

    async fn run(
        &self,
        config: &Config,
        number: u64,
        options: RunOptions,
        progress: watch::Sender<Progress>,
        stop: &CancellationToken,
    ) -> Result<Report> {
        let since = self.begin(number, options.begin).await?;
        let health = Health {
            servers: self.servers.clone(),
            replicas: Vec::new(),
            site: self.site.clone(),
            limits: config.reconcile.clone(),
            number,
        };
        let mut run = Run {
            on: self,
            number,
            pace: Pace::new(health, stop.clone(), (JOB, say), PAGE_TARGETS),
            publisher: self.servers.broker.connect_publisher(JOB).await?,
            progress,
            stop,
            report: Report::new(self.export, since),
        };
        run.run(since, options.every).await?;
        Ok(run.report)
    }

    async fn begin(&self, number: u64, begin: Begin) -> Result<Micros> {
        let store = &self.servers.store;
        let since = match begin {
            Begin::Since(since) => since,
            Begin::Resume => {
                let noted = store.last_checkpoint(JOB, &self.export.name, number, false).await?;
                let Some((_, text)) = noted else {
                    return Err(JobError::Refused(format!(
                        "no run of {} has stored its progress: add --since with the time of the cut-over",
                        self.export.name
                    ))
                    .into());
                };
                let Checkpoint { until } = serde_json::from_str(&text).context("read the progress of the last run")?;
                Micros(until)
            }
        };
        store.note_checkpoint(number, &checkpoint(since)?).await?;
        Ok(since)
    }
}

impl Run<'_> {
    async fn run(&mut self, since: Micros, every: Option<Duration>) -> Result<()> {
        let mut since = since;
        let mut outage = Outage::new("writing to the site's table");
        while !self.stop.is_cancelled() {
            let pause = match (self.pass(since).await, every) {
                (Ok(until), _) => {
                    outage.over();
                    since = until.unwrap_or(since);
                    every
                }
                (Err(error), Some(_)) if is_passing(&error) => Some(outage.failed(&format!("{error:#}"))),
                (Err(error), _) => return Err(error),
            };
            let Some(pause) = pause else { break };
            self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
        if self.stop.is_cancelled() {
            self.report.end(End::Stopped, "it was stopped; --resume continues the export");
        }
        Ok(())
    }

    /// Exports the rows written since `since`. Returns the time up to which rows are exported, or `None` if the run was
    /// stopped.
    async fn pass(&mut self, since: Micros) -> Result<Option<Micros>> {
        let store = &self.on.servers.store;
        let since = since.before(self.on.export.overlap.0);
        let (mut began, _) = store.clock().await?;
        let (until, mut listed_since, mut last) = (began, since, None);
        for _ in 0..LISTS_MAX {
            if !self.list(listed_since, since).await? {
                return Ok(None);
            }
            let (ended, _) = store.clock().await?;
            let span = Some(Span::of(began)).filter(|span| *span == Span::of(ended));
            if span.is_some() && span == last {
                break;
            }
            (last, listed_since, began) = (span, until.before(CLOCKS_APART).max(since), ended);
        }
        store.note_checkpoint(self.number, &checkpoint(until)?).await?;
        self.report.passes += 1;
        self.report.until = Some(until.0);
        Ok(Some(until))
    }

    /// Lists the targets that changed since `listed_since`. From these targets, exports the rows that changed since
    /// `since`. Returns false if the run was stopped before the end of the list.
    async fn list(&mut self, listed_since: Micros, since: Micros) -> Result<bool> {
        let like = self.on.metrics.like();
        let mut before = ChangedBefore::NEWEST;
        loop {
            self.wait().await?;
            if self.stop.is_cancelled() {
                return Ok(false);
            }
            let (limit, asked) = (self.pace.page(), Instant::now());
            let rows = self.on.servers.store.changed_numbers(listed_since, before, limit).await?;
            let numbers = rows.iter().map(|row| row.number);
            let likes = numbers.filter(|(target, metric)| target.kind == self.on.kind && *metric == like);
            let mut targets: Vec<TargetId> = likes.map(|(target, _)| target.id).collect();
            targets.sort_unstable();
            targets.dedup();
            for some in targets.chunks(READ_TARGETS) {
                self.export(some, since).await?;
            }
            self.report.targets += targets.len() as u64;
            self.pace.note(rows.len(), asked.elapsed());
            self.show();
            let Some(last) = rows.last().filter(|_| rows.len() == limit) else { return Ok(true) };
            before = *last;
        }
    }

    async fn export(&mut self, targets: &[TargetId], since: Micros) -> Result<()> {
        let (mut left, mut after) = (targets, (TargetId(0), UserId(0)));
        loop {
            let rows = self.on.servers.store.likes_since(self.on.kind, left, after, since, ROWS).await?;
            self.write(&rows).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == ROWS) else { return Ok(()) };
            after = (last.target, last.user);
            left = left.get(left.partition_point(|target| *target < last.target)..).unwrap_or_default();
        }
    }

    async fn write(&mut self, rows: &[LikeRow]) -> Result<()> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(()) };
        let Exporter { servers, export, writes, site, .. } = self.on;
        let at = |at: Micros| match export.unit {
            Some(unit) => unit.number(at).to_string(),
            None => time_literal(at),
        };
        let sql = |row: &LikeRow| {
            let deleted = if row.liked { "0" } else { "1" };
            writes.sql(row.liked, &[row.target.to_string(), row.user.to_string(), at(row.at), deleted.to_owned()])
        };
        let statements: Vec<String> = rows.iter().map(sql).collect();
        servers.store.renew_job(JOB, self.number).await?;
        site.as_ref().unwrap_or(&servers.store).write_site(&statements).await.map_err(|error| match error {
            QueryError::Query(sentence) => JobError::Refused(format!(
                "[[export]] {}: the server refuses a row from target {} user {} to target {} user {}: {sentence}",
                export.name, first.target, first.user, last.target, last.user
            ))
            .into(),
            QueryError::Store(error) => anyhow::Error::from(error),
        })?;
        let likes = rows.iter().filter(|row| row.liked).count() as u64;
        self.report.likes += likes;
        self.report.unlikes += rows.len() as u64 - likes;
        Ok(())
    }

    async fn wait(&mut self) -> Result<()> {
        let progress = &self.progress;
        let show = |reason: Option<&str>| progress.send_modify(|shown| shown.waiting = reason.map(str::to_owned));
        let broker = (&self.on.servers.broker, JOB, &mut self.publisher);
        super::wait(&mut self.pace, None, broker, self.stop, show).await
    }

    fn show(&self) {
        let Report { targets, likes, unlikes, passes, .. } = self.report;
        self.progress.send_modify(|shown| {
            *shown = Progress { targets, rows: likes + unlikes, passes, ..std::mem::take(shown) };
        });
    }
}

fn checkpoint(until: Micros) -> Result<String> {
    serde_json::to_string(&Checkpoint { until: until.0 }).context("write the progress of the run")
}

fn say(reason: &str) {
    info!(event = "export-waiting", reason, "waiting, live traffic goes first: {reason}");
}
