//! Compares the counts in an older site's keys with tallyd's counts (the table `counter`), while both systems count. It
//! reports how many targets differ, and by how much.
//!
//! Steps for a page of targets: read both sides -> mark targets with different counts as *suspect* -> check the
//! suspects again, [`LOOKS_APART`] later. A target *differs* if both checks find a difference in the same direction.
//! The smaller of the two differences is reported. An in-flight event reaches one side before the other side, so it
//! usually causes a difference in only one check. A target that users like all the time can have in-flight events in
//! both checks.
//!
//! The run first reads the keys of all targets in `counter`. Then it scans Redis for keys of targets without a row in
//! `counter`.
//!
//! A comparison must never change a count or a key.

pub mod report;
mod sides;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::config::Config;
use crate::jobs::JobError;
use crate::jobs::runner::{Job, Ran, run_once};
use crate::runtime::progress::{ProgressSink, follow};
use crate::servers::Servers;
use crate::servers::pace::{Health, Pace};
use report::{End, Progress, Report};
use sides::{Look, Page, Sides};
use tallyd_connect::pace::pace;
use tallyd_core::job_name::CommandName;
use tallyd_core::model::{Kind, Metric, TargetId};
use tallyd_core::template::Template;
use tallyd_mysql::ranges::LAST;
use tallyd_rabbitmq::Publisher;

/// Time between the two checks of a suspect.
pub const LOOKS_APART: Duration = Duration::from_secs(5);

/// If there are this many suspects, the run checks them again before it reads the next page.
const SUSPECTS_MAX: usize = 10_000;

/// Maximum number of targets in a page.
const PAGE_TARGETS: usize = 10_000;

const JOB: &str = CommandName::Compare.name();

/// Selects the counts to compare.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The pattern of the older site's keys.
    pub keys: Template,
    pub kind: (String, Kind),
    pub metric: (String, Metric),
}

/// One comparison.
struct Run<'a> {
    sides: Sides<'a>,
    subject: &'a Subject,
    pace: Pace<'a>,
    publisher: Publisher,
    progress: watch::Sender<Progress>,
    stop: &'a CancellationToken,
    suspects: BTreeMap<TargetId, Look>,
    report: Report,
}

/// Compares once, under the job's lock.
///
/// # Errors
/// Fails if a server fails.
pub async fn run(
    servers: &Servers,
    config: &Config,
    subject: &Subject,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<Report>, JobError> {
    let mode = format!("{}:{}", subject.kind.0, subject.metric.0);
    let job = Job { name: JOB, mode: &mode, owner: &servers.owner, keep: config.reconcile.repair_keep.0 };
    let work = |number| async move {
        let (progress, shown) = watch::channel(Progress::default());
        let ran = tokio::select! {
            ran = compare(servers, config, (subject, number), progress, stop) => ran,
            () = follow(to, shown) => Err(anyhow!("the output of the run is closed, so the run stops")),
        };
        ran.map(Report::finished)
    };
    run_once(&servers.store, job, work).await
}

async fn compare(
    servers: &Servers,
    config: &Config,
    (subject, number): (&Subject, u64),
    progress: watch::Sender<Progress>,
    stop: &CancellationToken,
) -> Result<Report> {
    let health = Health {
        store: &servers.store,
        cache: &servers.cache,
        broker: &servers.broker,
        replicas: &[],
        site: None,
        limits: &config.reconcile,
        number,
    };
    let mut run = Run {
        sides: Sides { servers, subject },
        subject,
        pace: Pace::new(health, &servers.control, stop, (JOB, say), PAGE_TARGETS),
        publisher: servers.broker.connect_publisher(JOB).await?,
        progress,
        stop,
        suspects: BTreeMap::new(),
        report: Report::new(subject),
    };
    run.compare_all().await?;
    if stop.is_cancelled() {
        run.report.end(End::Stopped, "it was stopped");
    }
    Ok(run.report)
}

impl Run<'_> {
    async fn compare_all(&mut self) -> Result<()> {
        let mut after = TargetId(0);
        while after < LAST && self.wait().await? {
            let began = Instant::now();
            let page = self.sides.page(after, self.pace.page()).await?;
            self.pace.note(page.looks.len(), began.elapsed());
            after = page.until;
            self.take(page).await?;
        }
        let mut next = self.sides.begin_search().await?;
        while let Some(from) = next
            && self.wait().await?
        {
            let found;
            (found, next) = self.sides.search(from).await?;
            self.take(found).await?;
        }
        self.look_again().await
    }

    /// Adds the results of a first check to the report and the suspects.
    async fn take(&mut self, page: Page) -> Result<()> {
        let Page { looks, unreadable, .. } = page;
        self.report.unreadable += unreadable;
        for (id, look) in looks {
            // A scan of Redis can return a key twice.
            if look.drift() != 0 && self.suspects.insert(id, look).is_some() {
                continue;
            }
            self.report.checked += 1;
            self.report.equal += u64::from(look.drift() == 0);
        }
        self.show();
        if self.suspects.len() >= SUSPECTS_MAX { self.look_again().await } else { Ok(()) }
    }

    async fn look_again(&mut self) -> Result<()> {
        let suspects = std::mem::take(&mut self.suspects);
        if suspects.is_empty() || self.stop.run_until_cancelled(tokio::time::sleep(pace(LOOKS_APART))).await.is_none() {
            return Ok(());
        }
        let again = self.sides.again(&suspects).await?;
        for (id, first) in &suspects {
            let second = again.get(id).copied().unwrap_or_default();
            self.report.judge(&self.subject.kind.0, *id, first, &second);
        }
        self.show();
        Ok(())
    }

    /// Waits until the servers are ready for a page. Returns false if the run must stop.
    async fn wait(&mut self) -> Result<bool> {
        let progress = &self.progress;
        let show = |reason: Option<&str>| progress.send_modify(|shown| shown.waiting = reason.map(str::to_owned));
        let broker = (&self.sides.servers.broker, JOB, &mut self.publisher);
        super::wait(&mut self.pace, None, broker, self.stop, show).await?;
        Ok(!self.stop.is_cancelled())
    }

    fn show(&self) {
        let Report { checked, differ, .. } = self.report;
        let pending = self.suspects.len() as u64;
        self.progress.send_modify(|shown| {
            *shown = Progress { checked, differ, pending, waiting: None };
        });
    }
}

fn say(reason: &str) {
    info!(event = "compare-waiting", reason, "waiting, live traffic goes first: {reason}");
}
