//! `tallyd erase`: deletes all data about a user or a target, while the site is running.
//!
//! # Steps
//!
//! ```text
//! likes    a page of rows -> unlikes through the exchange -> fence -> delete the rows that are unlikes -> clicks and filters in Redis
//!          -> checkpoint -> next page
//! settle   wait until Redis has all rows of the outbox
//! numbers  target: its rows in MySQL, then its numbers and its filter in Redis; user: the user's own keys
//! traces   rewrite rows of the outbox, dead letters and reports of runs that name the subject beside others
//! boards   under the archiver's lock: zsets and snapshots lose the member, archives keep its place under another name
//! waiting  count the messages in the queues
//! ```
//!
//! Each step does only the work that has not been done yet. If a run crashes at any point ([`FAULT_POINTS`]), the next
//! run completes its work. A run after a successful run finds nothing to do. Only the first step can take long. This
//! happens if the command erases a user, because `like_record` has no index by user. The run lists all targets, and
//! reads the user's rows by their keys for each page of targets. A run with `--resume` continues after the last
//! finished page of an earlier run.
//!
//! # Races
//!
//! * The erase publishes an unlike. After this unlike, the user likes the target again. The newer event wins, so the
//!   row is a like, and the erase does not delete it. The report counts the row as `liked_again`.
//! * The site published a like before the unlike, in any partition. The erase publishes a fence after both events, and
//!   waits for the fence before it deletes the row. So no earlier event can change the row after the deletion.
//! * A daemon commits a batch with a like and crashes before the acknowledgement. Then the erase deletes the row.
//!   Without the row, the daemon no longer ignores older events. The broker redelivers the like and then the unlike
//!   that follows it in the queue. So the row exists again, as an unlike. The effect is the same if a producer
//!   publishes an old event again. The counters stay right, and the next erase deletes the row.
//! * A filter run reads the user before the erase deletes the row. Then the erase drops the filter together with its
//!   config, which contains the number of the filter run. So Redis rejects the new filter, and a later filter run
//!   builds a filter without the user. The erase deletes the user's remembered click before it drops the filter.
//! * Another run wants to write a snapshot or an archive of a board. This run must wait, because the erase holds the
//!   archiver's lock and the board's claim.
//! * The erase renames a member of a frozen zset, and crashes before it renames the member in MySQL. The next erase
//!   finds the row in MySQL and chooses the same new name.
//! * A reconcile is running, and needs the events that the consumers log for it. The erase leaves the rows of this log
//!   and reports how many there are. The reconcile deletes the rows at its end.
//!
//! An erase must never delete a row that a newer like has changed, or an event of another user. An erase must never
//! delete an outbox row that has not been added to Redis yet. After a successful run, the erased user or target must
//! not be in any log, report or checkpoint.

mod boards;
mod likes;
pub mod report;
mod traces;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Rules};
use crate::jobs::JobError;
use crate::jobs::fence::{self, Fences};
use crate::jobs::runner::{LockRequest, Outcome, Ran, Report as _, run_once};
use crate::partitions::{Backlog, InUse};
use crate::runtime::fault;
use crate::runtime::progress::{ProgressSink, follow};
use crate::servers::Servers;
use report::{Progress, Report, Waiting};
use tallyd_core::control::Task;
use tallyd_core::erase::Subject;
use tallyd_core::model::Target;
use tallyd_core::rules::Writes;
use tallyd_mysql::erase::JOB;
use tallyd_mysql::jobs::number_of;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

/// The points at which a test can end the process, in the order of the steps. There is a point between any two steps.
pub const FAULT_POINTS: [&str; 10] = [
    "erase:published",
    "erase:fenced",
    "erase:deleted",
    "erase:page",
    "erase:settled",
    "erase:rows",
    "erase:numbers",
    "erase:traces",
    "erase:renamed",
    "erase:boards",
];

/// While one of these tasks is paused, no daemon writes the unlikes.
const PAUSED_BY: &[Task] = &[Task::Consumer];

/// Time between two checks while the run waits.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// An operator's order to erase: the subject to erase, and the options.
#[derive(Clone, Debug)]
pub struct Order {
    pub subject: Subject,
    /// The boards from which the subject is also removed, in addition to the boards of the configured rules. The
    /// members of these boards must be users, or targets of this kind.
    pub boards: Vec<String>,
    pub dry_run: bool,
    /// The run continues after the last finished page of an earlier run.
    pub resume: bool,
}

impl Order {
    /// `user 7` or `video:42`.
    pub fn name(&self) -> String {
        match &self.subject {
            Subject::User(user) => format!("user {user}"),
            Subject::Target { target, kind } => format!("{kind}:{}", target.id),
        }
    }
}

/// Erases all data about the subject, under the lock of this job.
///
/// # Errors
/// Fails with [`JobError`] if consumers are paused, a queue stalls, or the archiver is running. Also fails if a server
/// fails. Work that was done before a failure stays done.
pub async fn erase(
    servers: &Servers,
    config: &Config,
    order: &Order,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<Report>, JobError> {
    fence::knows_all(&servers.store, &servers.broker).await?;
    servers.control.refresh(&servers.store).await?;
    if let Some(pause) = servers.control.paused(PAUSED_BY) {
        return Err(JobError::Paused(Box::new(pause)));
    }
    let mode = if order.dry_run { "dry-run" } else { order.subject.word() };
    let job = LockRequest { name: JOB, mode, owner: &servers.owner, keep: config.reconcile.repair_keep.0 };
    let ran = run_once(&servers.store, job, |number| async move {
        let mut run = Run::new(servers, config, order, number, stop).await?;
        let progress = run.progress.subscribe();
        tokio::select! {
            done = run.run() => done?,
            () = follow(to, progress) => bail!("the output of the run is closed, so the run stops"),
        }
        Ok::<_, anyhow::Error>(run.report)
    })
    .await?;
    if let Ran::Ended(report) = &ran
        && report.outcome() == Outcome::Done
    {
        // Checkpoints contain ids.
        servers.store.forget_marks(JOB, mode).await?;
    }
    Ok(ran)
}

struct Run<'a> {
    // Connections and settings.
    servers: &'a Servers,
    config: &'a Config,
    kinds: KindNames,
    /// One Redis cache for each layout of counters.
    caches: Vec<Cache>,
    fences: Fences<'a>,
    backlog: Backlog,
    // The order.
    order: &'a Order,
    number: u64,
    stop: &'a CancellationToken,
    // Results.
    fences_sent: u64,
    report: Report,
    progress: watch::Sender<Progress>,
}

impl<'a> Run<'a> {
    async fn new(
        servers: &'a Servers,
        config: &'a Config,
        order: &'a Order,
        number: u64,
        stop: &'a CancellationToken,
    ) -> Result<Self> {
        let Servers { store, cache, broker, .. } = servers;
        let also = cache.also(&config.redis, &config.metrics)?;
        let publisher = broker.connect_publisher("erase").await?;
        let fence_max = config.reconcile.fence_max.0;
        Ok(Self {
            servers,
            config,
            kinds: KindNames::new(&config.kinds),
            caches: [cache.clone()].into_iter().chain(also).collect(),
            fences: Fences { job: JOB, store, broker, publisher, fence_max },
            backlog: Backlog::default(),
            order,
            number,
            stop,
            fences_sent: 0,
            report: Report::new(order.subject.word(), order.dry_run),
            progress: watch::Sender::default(),
        })
    }

    async fn run(&mut self) -> Result<()> {
        self.erase_likes().await?;
        if self.is_stopped() {
            return Ok(());
        }
        self.settle().await?;
        fault::point("erase:settled");
        self.erase_numbers().await?;
        fault::point("erase:numbers");
        self.erase_traces().await?;
        fault::point("erase:traces");
        if self.is_stopped() {
            return Ok(());
        }
        self.erase_members().await?;
        fault::point("erase:boards");
        self.count_waiting().await?;
        self.look_again().await?;
        self.say_what_stays();
        Ok(())
    }

    fn is_stopped(&mut self) -> bool {
        self.report.stopped = self.stop.is_cancelled();
        self.report.stopped
    }

    /// Waits until every event that was published before now is committed.
    async fn fence(&mut self) -> Result<()> {
        self.fences_sent += 1;
        self.fences.pass(number_of(self.number, self.fences_sent)).await
    }

    /// Waits until all rows that are now in the outbox have been added to Redis. After the wait, the erase can rewrite
    /// these rows. The next step can delete counters, because no daemon adds these rows to Redis later.
    async fn settle(&mut self) -> Result<()> {
        if self.order.dry_run {
            return Ok(());
        }
        self.fence().await?;
        let store = &self.servers.store;
        let ends = store.outbox_numbers().await?;
        let began = Instant::now();
        loop {
            let applied = store.outbox_applied().await?;
            if ends.iter().all(|(partition, last)| applied.of(partition) >= last) {
                return Ok(());
            }
            if began.elapsed() > self.config.reconcile.fence_max.0 {
                let text = "the rows of the outbox were not added to Redis in time: wait until `tallyd status` shows an empty outbox, then try again";
                return Err(JobError::NotNow(text.to_owned()).into());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Deletes the data that belongs only to the subject.
    async fn erase_numbers(&mut self) -> Result<()> {
        let Servers { store, cache, .. } = self.servers;
        let dry_run = self.order.dry_run;
        let (target, kind) = match &self.order.subject {
            Subject::User(user) => {
                self.report.redis_keys += cache.erase_user(*user, dry_run).await?;
                return Ok(());
            }
            Subject::Target { target, kind } => (*target, kind.as_str()),
        };
        let rows = match dry_run {
            true => store.count_numbers(target).await?,
            false => store.erase_numbers(self.number, target).await?,
        };
        self.report.numbers = rows.into_iter().collect();
        fault::point("erase:rows");
        let metrics = self.config.metrics.codes();
        for cache in &self.caches {
            self.report.redis_keys += cache.erase_numbers(kind, &metrics, target, dry_run).await?;
        }
        self.drop_filters(&[target]).await
    }

    /// Drops the filters of these targets, because one user can't be removed from a filter. If the erase changed a
    /// target's counter, the daemon's next filter run builds the filter again. If the user's row was already an unlike,
    /// the erase did not change the counter. In this case, only the daily run over all targets builds the filter again.
    async fn drop_filters(&mut self, targets: &[Target]) -> Result<()> {
        if !self.config.filter.is_on() {
            return Ok(());
        }
        let cache = &self.servers.cache;
        let states = cache.filter_states(&self.kinds, targets).await?;
        let there = targets.iter().zip(states).filter(|(_, state)| state.is_some());
        let there: Vec<Target> = there.map(|(target, _)| *target).collect();
        if !self.order.dry_run {
            cache.drop_filters(&self.kinds, &there).await?;
        }
        self.report.filters += there.len() as u64;
        Ok(())
    }

    /// Counts the messages in all queues, without fences. The messages can belong to any user or target.
    async fn count_waiting(&mut self) -> Result<()> {
        let Servers { store, broker, .. } = self.servers;
        let in_use = InUse::read(store, broker).await?;
        let publisher = &self.fences.publisher;
        let fences = store.fences(JOB).await?;
        for (partition, queue) in in_use.partitions.queues() {
            let fences = fences.left(partition).count() as u64;
            let messages = publisher.depth(queue).await?.messages();
            let messages = messages.map(|messages| u64::from(messages).saturating_sub(fences));
            if messages != Some(0) {
                self.report.waiting.push(Waiting { queue: queue.to_owned(), messages });
            }
        }
        let queue = broker.returned();
        let messages = u64::from(publisher.count(&queue).await?);
        if messages > 0 {
            let text =
                format!("{messages} messages wait in the queue {queue}: run `tallyd dead list`, then erase again");
            self.report.left.push(text);
            self.report.waiting.push(Waiting { queue, messages: Some(messages) });
        }
        let watched = self.servers.store.watched_of(&self.order.subject).await?;
        if watched > 0 {
            let text = format!(
                "{watched} rows of watched_event, watched_count or watched_target remain: the running reconcile deletes them at its end"
            );
            self.report.left.push(text);
        }
        Ok(())
    }

    fn say_what_stays(&mut self) {
        let rules = Rules::from(self.config);
        let like = self.config.metrics.like();
        let by_api = self.kinds.all().any(|(kind, _)| rules.of(kind, like).writer == Writes::Api);
        self.report.redis_follows = by_api && self.report.unlikes > 0 && self.report.of == "user";
        if self.report.liked_again > 0 {
            let text = format!("{} like records were written after the unlikes: erase again", self.report.liked_again);
            self.report.left.push(text);
        }
        let unclear = &self.report.unclear_letters;
        if !unclear.is_empty() {
            let ids: Vec<String> = unclear.iter().map(u64::to_string).collect();
            let text = format!(
                "some dead letters contain the id in a field that tallyd does not know: check them with `tallyd dead show {}`",
                ids.join(" ")
            );
            self.report.left.push(text);
        }
    }

    fn context(&self, action: &'static str) -> impl Fn() -> String {
        let rows = self.report.rows;
        move || {
            format!("{action} (the erase stopped after {rows} like records: run the same command again to continue)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FAULT_POINTS;

    #[test]
    fn every_fault_point_is_listed_once() {
        let source = [include_str!("mod.rs"), include_str!("likes.rs"), include_str!("boards.rs")].concat();
        for point in FAULT_POINTS {
            assert_eq!(source.matches(&format!("fault::point(\"{point}\")")).count(), 1, "{point}");
        }
    }
}
