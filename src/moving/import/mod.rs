//! `tallyd import`: imports a site's table as like records and counters, while the site keeps writing to the table.
//!
//! Steps of the first pass: read a page with the site's query -> write the rows, counters and checkpoint in one
//! transaction, while the next page is read. The import does not write to Redis or to the outbox, because Redis is
//! loaded once, at the cut-over. The second pass (`--deletions`) reads the site's table and `like_record` side by side
//! (`sides`). `--verify` compares sums of ranges of rows (`sums`), and reads rows only if sums differ.
//!
//! Races:
//!
//! * A: a page is read. B: a user unlikes, and the event is applied. C: the page is written. The event's state is newer
//!   than the page's row (see `tallyd_core::import`), so the event's state stays.
//! * As before, but at C the event waits in a queue. C writes a like, and the event changes the like to an unlike.
//! * A: a row is read. B: the site deletes the row without publishing an event. The second pass removes the like.
//! * A: the second pass finds that the site lacks a row. B: the user likes again. C: the second check finds the row.
//! * A: a row was missing in both checks. B: an event changes the row. C: the pass finds this change and keeps the row.
//! * A: a run is frozen. B: another run continues. C: the first run wakes up and can't write, because it lost the lock.
//!
//! An import must never overwrite a newer row, remove a row that it did not write, or lock rows of the site's table.

mod checkpoint;
mod deletions;
mod numbers;
pub mod report;
mod rows;
mod sides;
mod site;
mod sums;
mod verify;

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::config::{Config, Import, Reads, Reconcile as Limits};
use crate::jobs::JobError;
use crate::jobs::runner::{LockRequest, Ran, run_once};
use crate::runtime::progress::{ProgressSink, follow};
use crate::runtime::retry::Outage;
use crate::servers::Servers;
use crate::servers::pace::{Health, Pace};
use checkpoint::{Checkpoint, raw};
use report::{End, Progress, Report};
use tallyd_core::import::Key;
use tallyd_core::model::{Kind, Metric};
use tallyd_mysql::Store;
use tallyd_mysql::moving::imports::JOB;
use tallyd_mysql::site_query::Plan;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;

/// The points at which a test can end the process, in order. There is a point between any two steps.
pub const FAULT_POINTS: [&str; 8] = [
    "import:read",
    "import:writing",
    "import:written",
    "import:numbers-read",
    "import:numbers-written",
    "import:missed",
    "import:taking-out",
    "import:taken-out",
];

/// The number of connections to the site's server: one for pages, and one for checks of the server's load.
const SITE_CONNECTIONS: u32 = 2;

/// Maximum number of warnings in a report.
const WARNINGS_MAX: usize = 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pass {
    /// Writes the site's rows.
    #[default]
    Rows,
    /// Removes imported rows that the site no longer has.
    Deletions,
    /// Compares the site with tallyd, and changes nothing.
    Verify,
}

impl Pass {
    /// Returns the name of the pass, which reports and the modes of runs contain.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Deletions => "deletions",
            Self::Verify => "verify",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub pass: Pass,
    /// The run only reads, and changes nothing.
    pub dry_run: bool,
    /// The second pass removes any number of rows.
    pub force: bool,
    /// The run continues where the last run of this pass ended.
    pub resume: bool,
    /// After this time, the run ends when it has finished the current page.
    pub run_time_max: Option<Duration>,
    /// Time between the two checks of the second pass.
    pub look_again_after: Duration,
}

/// Imports one block of the configuration.
pub struct Importer {
    store: Store,
    cache: Cache,
    broker: Broker,
    servers: Servers,
    replicas: Vec<(String, Store)>,
    limits: Limits,
    import: Import,
    reads: Reads,
    kind: Kind,
    metric: Metric,
    /// The time of a row can be ahead of this machine's clock by at most this.
    future_max: Duration,
    /// The server with the site's table, if it is not the server of `[mysql]`.
    source: Option<Store>,
}

/// One run of an import.
struct Run<'a> {
    on: &'a Importer,
    options: RunOptions,
    number: u64,
    began: Instant,
    stop: &'a CancellationToken,
    publisher: Publisher,
    pace: Pace,
    progress: watch::Sender<Progress>,
    outage: Outage,
    read_ms: Cell<u64>,
    write_ms: Cell<u64>,
    report: Report,
}

/// Runs one pass of an import under the job's lock.
///
/// # Errors
/// Fails with [`JobError::Refused`] if the query or a row is wrong, or with another error if a server fails.
pub async fn run(
    servers: &Servers,
    config: &Config,
    import: &Import,
    options: RunOptions,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<Report>, JobError> {
    let importer = Importer::new(config, import, servers)?;
    let mode = importer.mode(options.pass);
    let job = LockRequest { name: JOB, mode: &mode, owner: &servers.owner, keep: config.reconcile.repair_keep.0 };
    let importer = &importer;
    run_once(&servers.store, job, |number| async move { importer.run(number, options, to, stop).await }).await
}

impl Importer {
    /// Creates the importer for one `[[import]]`.
    pub fn new(config: &Config, import: &Import, servers: &Servers) -> Result<Self> {
        let reads = import.reads().map_err(|(_, problem)| anyhow!(problem))?;
        // Opening balances are imported while no daemon runs, so the import must not wait until queues become shorter.
        let queue_depth_max = if matches!(reads, Reads::Likes(_)) { config.reconcile.queue_depth_max } else { 0 };
        let source = import.source.as_ref().map(|source| Store::new(source, SITE_CONNECTIONS)).transpose()?;
        Ok(Self {
            store: servers.store.clone(),
            cache: servers.cache.clone(),
            broker: servers.broker.clone(),
            servers: servers.clone(),
            replicas: Store::replicas(&config.mysql, &config.reconcile.replicas).map_err(anyhow::Error::msg)?,
            limits: Limits { queue_depth_max, ..config.reconcile.clone() },
            reads,
            kind: config.kinds.named(&import.kind).context("the kind is not in [kinds]")?,
            metric: config.metrics.named(&import.metric).context("the metric is not in [metrics]")?,
            future_max: config.consumer.future_max.0,
            import: import.clone(),
            source,
        })
    }

    /// Asks the site's server how it would execute the query. The query is not executed. The result is empty if the
    /// import reads keys.
    ///
    /// # Errors
    /// Fails with [`JobError::Refused`] if the query is wrong, or with another error if MySQL fails.
    pub async fn explain(&self) -> Result<Vec<Plan>, JobError> {
        match &self.reads {
            Reads::Likes(query) => self.like_columns(query).await.map(|(_, plan)| plan),
            Reads::Numbers(query) => self.number_columns(query).await.map(|(_, plan)| plan),
            Reads::Keys(_) => Ok(Vec::new()),
        }
    }

    fn mode(&self, pass: Pass) -> String {
        match pass {
            Pass::Rows => self.import.name.clone(),
            pass => format!("{}:{}", self.import.name, pass.name()),
        }
    }

    async fn run(
        &self,
        number: u64,
        options: RunOptions,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report, JobError> {
        let (progress, shown) = watch::channel(Progress { import: self.import.name.clone(), ..Progress::default() });
        let ran = tokio::select! {
            ran = self.run_showing(number, options, progress, stop) => ran,
            () = follow(to, shown) => Err(JobError::Other(anyhow!("the output of the run is closed, so the run stops"))),
        };
        self.close().await;
        ran
    }

    /// Closes the connections to servers that only this import uses.
    pub async fn close(&self) {
        for store in self.replicas.iter().map(|(_, store)| store).chain(&self.source) {
            store.close().await;
        }
    }

    async fn run_showing(
        &self,
        number: u64,
        options: RunOptions,
        progress: watch::Sender<Progress>,
        stop: &CancellationToken,
    ) -> Result<Report, JobError> {
        let health = Health {
            servers: self.servers.clone(),
            replicas: self.replicas.clone(),
            site: self.source.clone(),
            limits: self.limits.clone(),
            number,
        };
        let job = (JOB, say_waiting as fn(&str));
        let page_max = match (&self.reads, options.pass) {
            (Reads::Likes(_), Pass::Verify) => self.import.page_rows * verify::RANGE_PAGES,
            _ => self.import.page_rows,
        };
        let report = Report::new(&self.import.name, options.pass.name(), options.dry_run);
        let mut run = Run {
            on: self,
            options,
            number,
            began: Instant::now(),
            stop,
            publisher: self.broker.connect_publisher("import").await.map_err(anyhow::Error::from)?,
            pace: Pace::new(health, stop.clone(), job, page_max),
            progress,
            outage: Outage::new("importing a page"),
            read_ms: Cell::new(0),
            write_ms: Cell::new(0),
            report,
        };
        let worked = match (&self.reads, options.pass) {
            (Reads::Likes(query), Pass::Rows) => run.import_rows(query).await,
            (Reads::Likes(query), Pass::Deletions) => run.take_out_missing(query).await,
            (Reads::Likes(query), Pass::Verify) => run.verify_likes(query).await,
            (_, Pass::Rows) => run.import_numbers().await,
            (_, Pass::Verify) => run.verify_numbers().await,
            (_, Pass::Deletions) => Err(self.refused("--deletions works only for likes")),
        };
        worked?;
        run.forget_position().await?;
        Ok(run.into_report())
    }
}

impl Run<'_> {
    /// Adds the query's plan to the report, and warns if each page would take longer than the page before.
    fn plan(&mut self, plan: &[Plan]) {
        self.report.plan = plan.iter().map(ToString::to_string).collect();
        let faults = plan.iter().filter_map(Plan::fault);
        self.report.warnings.extend(faults.map(|fault| {
            format!(
                "the query {fault}: it needs an index on target and user, and the condition of docs/moving-reference.md"
            )
        }));
    }

    /// Waits until the servers are ready for the next page.
    async fn wait(&mut self) -> Result<()> {
        let until = self.options.run_time_max.map(|max| self.began + max);
        let show = |reason: Option<&str>| {
            self.progress.send_modify(|progress| progress.waiting = reason.map(str::to_owned));
        };
        let broker = (&self.on.broker, JOB, &mut self.publisher);
        crate::moving::wait(&mut self.pace, until, broker, self.stop, show).await
    }

    /// Waits after a failure of a page. Returns false if the run must end with this error, because a retry can't
    /// succeed, or the run is over.
    async fn waits_after(&mut self, error: &JobError) -> bool {
        let JobError::Other(cause) = error else { return false };
        if !crate::moving::is_passing(cause) || self.is_over() {
            return false;
        }
        let text = format!("{cause:#}");
        self.progress.send_modify(|progress| progress.waiting = Some(text.clone()));
        let pause = self.outage.failed(&text);
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some()
    }

    /// Returns whether the run must end before the next page. Writes the reason into the report.
    fn is_over(&mut self) -> bool {
        if self.stop.is_cancelled() {
            self.end_stopped();
            return true;
        }
        let is_over = self.options.run_time_max.is_some_and(|max| self.began.elapsed() > max);
        if is_over {
            self.report.end(End::TimeOver, format!("its run time was over: {}", self.options.how_to_continue()));
        }
        is_over
    }

    fn end_stopped(&mut self) {
        self.report.end(End::Stopped, format!("it was stopped: {}", self.options.how_to_continue()));
    }

    fn show(&self, reached: Key) {
        let rows = self.report.rows;
        self.progress.send_modify(|progress| {
            progress.rows = rows;
            progress.reached = reached.0.0;
        });
    }

    fn into_report(self) -> Report {
        let mut report = self.report;
        let (waited, waits, waited_for) = self.pace.waited();
        (report.waited_s, report.waits, report.waited_for) = (waited.as_secs(), waits, waited_for);
        (report.read_ms, report.write_ms) = (self.read_ms.get(), self.write_ms.get());
        report
    }
}

fn say_waiting(reason: &str) {
    info!(event = "import-waiting", reason, "waiting, live traffic goes first: {reason}");
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        let sources = [include_str!("rows.rs"), include_str!("numbers.rs"), include_str!("deletions.rs")];
        crate::jobs::assert_fault_points(&FAULT_POINTS, &sources);
    }
}
