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

use std::borrow::Cow;
use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tracing::info;

use crate::config::{Import, Reads};
use crate::sql::imports::JOB;
use checkpoint::Checkpoint;
use report::{Progress, Report};
use tallyd_base::config::{Config, Reconcile as Limits};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::pages::{PageLimits, is_passing};
use tallyd_base::jobs::run::{Ended, Job, Run, RunOptions};
use tallyd_base::runtime::retry::Outage;
use tallyd_base::servers::Servers;
use tallyd_core::control::Task;
use tallyd_core::import::Key;
use tallyd_core::model::{Kind, Metric};
use tallyd_mysql::Store;
use tallyd_mysql::site_query::Plan;
use tallyd_redis::Cache;

/// In order. There is a point between any two steps.
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

/// One for pages, and one for checks of the server's load.
const SITE_CONNECTIONS: u32 = 2;

const WARNINGS_MAX: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Rows,
    /// A missing row is checked again after this time.
    Deletions {
        look_again_after: Duration,
    },
    Verify,
}

impl Pass {
    pub fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Deletions { .. } => "deletions",
            Self::Verify => "verify",
        }
    }
}

pub struct Importer {
    pass: Pass,
    store: Store,
    cache: Cache,
    replicas: Vec<(String, Store)>,
    limits: Limits,
    import: Import,
    reads: Reads,
    kind: Kind,
    metric: Metric,
    /// A row's time can be ahead of this machine's clock by at most this.
    future_max: Duration,
    source: Option<Store>,
}

struct Importing<'a, 'r> {
    on: &'a Importer,
    run: &'a mut Run<'r, Importer>,
    began_at: Option<Checkpoint>,
    outage: Outage,
    read_ms: Cell<u64>,
    write_ms: Cell<u64>,
}

impl Importer {
    pub fn new(config: &Config, import: &Import, pass: Pass, servers: &Servers) -> Result<Self> {
        let reads = import.reads().map_err(|(_, problem)| anyhow!(problem))?;
        // No daemon runs then, so the import must not wait for shorter queues.
        let queue_depth_max = if matches!(reads, Reads::Likes(_)) { config.reconcile.queue_depth_max } else { 0 };
        let source = import.mysql.as_ref().map(|source| Store::new(source, SITE_CONNECTIONS)).transpose()?;
        Ok(Self {
            pass,
            store: servers.store.clone(),
            cache: servers.cache.clone(),
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

    /// The query is not executed. Empty if the import reads keys. [`JobError::Refused`] if the query is wrong.
    pub async fn explain(&self) -> Result<Vec<Plan>, JobError> {
        match &self.reads {
            Reads::Likes(query) => self.like_columns(query).await.map(|(_, plan)| plan),
            Reads::Numbers(query) => self.number_columns(query).await.map(|(_, plan)| plan),
            Reads::Keys(_) => Ok(Vec::new()),
        }
    }
}

impl Job for Importer {
    const NAME: &'static str = JOB;
    type Report = Report;
    type Progress = Progress;

    fn needs(&self, _: &Config) -> &'static [Task] {
        &[]
    }

    fn mode(&self) -> Cow<'_, str> {
        match self.pass {
            Pass::Rows => Cow::Borrowed(&self.import.name),
            pass => Cow::Owned(format!("{}:{}", self.import.name, pass.name())),
        }
    }

    fn begin(&self) -> (Report, Progress) {
        let import = self.import.name.clone();
        (Report::new(&import, self.pass.name()), Progress { import, ..Progress::default() })
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let page_max = match (&self.reads, self.pass) {
            (Reads::Likes(_), Pass::Verify) => self.import.page_rows * verify::RANGE_PAGES,
            _ => self.import.page_rows,
        };
        let (replicas, site, limits) = (self.replicas.clone(), self.source.clone(), self.limits.clone());
        run.limit_pages(PageLimits { replicas, site, limits, page_max, log_wait }).await?;
        let outage = Outage::new("importing a page");
        let (read_ms, write_ms) = (Cell::new(0), Cell::new(0));
        let mut importing = Importing { on: self, run, began_at: None, outage, read_ms, write_ms };
        let worked = importing.work().await;
        let Importing { run, read_ms, write_ms, .. } = importing;
        (run.report.read_ms, run.report.write_ms) = (read_ms.get(), write_ms.get());
        worked.map_err(JobError::into_error)
    }

    fn how_to_continue(&self, options: &RunOptions) -> Option<&'static str> {
        Some(match (self.pass, options.dry_run) {
            (Pass::Rows | Pass::Deletions { .. }, false) => "--resume continues",
            (Pass::Verify, _) | (_, true) => "run it again",
        })
    }

    async fn close(&self) {
        for store in self.replicas.iter().map(|(_, store)| store).chain(&self.source) {
            store.close().await;
        }
    }
}

impl Importing<'_, '_> {
    async fn work(&mut self) -> Result<(), JobError> {
        match (&self.on.reads, self.on.pass) {
            (Reads::Likes(query), Pass::Rows) => self.import_rows(query).await,
            (Reads::Likes(query), Pass::Deletions { look_again_after }) => {
                self.take_out_missing(query, look_again_after).await
            }
            (Reads::Likes(query), Pass::Verify) => self.verify_likes(query).await,
            (_, Pass::Rows) => self.import_numbers().await,
            (_, Pass::Verify) => self.verify_numbers().await,
            (_, Pass::Deletions { .. }) => Err(self.on.refused("--deletions works only for likes")),
        }?;
        if self.run.report.head.ended == Ended::Done { self.forget_position().await } else { Ok(()) }
    }

    /// Warns if each page would take longer than the page before.
    fn plan(&mut self, plan: &[Plan]) {
        self.run.report.plan = plan.iter().map(ToString::to_string).collect();
        let faults = plan.iter().filter_map(Plan::fault);
        self.run.report.warnings.extend(faults.map(|fault| {
            format!(
                "the query {fault}: it needs an index on target and user, and the condition of docs/moving-reference.md"
            )
        }));
    }

    /// Returns false if the run must end with this error, because a retry can't succeed, or the run is over.
    async fn waits_after(&mut self, error: &JobError) -> bool {
        let JobError::Other(cause) = error else { return false };
        if !is_passing(cause) || self.run.is_over() {
            return false;
        }
        let text = format!("{cause:#}");
        let pause = self.outage.failed(&text);
        let _waiting = self.run.waits(text);
        self.run.unless_stopped(tokio::time::sleep(pause)).await.is_ok()
    }

    fn show(&self, reached: Key) {
        let rows = self.run.report.rows;
        self.run.show(|progress| {
            progress.rows = rows;
            progress.reached = reached.0.0;
        });
    }
}

fn log_wait(reason: &str) {
    info!(event = "import-waiting", reason, "waiting, live traffic goes first: {reason}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        let sources = [include_str!("rows.rs"), include_str!("numbers.rs"), include_str!("deletions.rs")];
        tallyd_connect::fault::assert_points(&FAULT_POINTS, &sources);
    }
}
