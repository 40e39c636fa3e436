//! `tallyd admin erase`: deletes all data about a user or a target, while the site is running.
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
//! Each step does only the work that has not been done yet, so the next run completes a run that crashed at any point
//! ([`FAULT_POINTS`]), and finds nothing to do after a successful one. Only the first step can take long: `like_record`
//! has no index by user, so for a user the run lists all targets, and reads the user's rows by their keys for each page
//! of targets. `--resume` continues after the last finished page of an earlier run.
//!
//! # Races
//!
//! * After the unlike, the user likes the target again. The newer event wins, so the row is a like, and the erase does
//!   not delete it. The report counts the row as `liked_again`.
//! * The site published a like before the unlike, in any partition. The erase publishes a fence after both events, and
//!   waits for it before it deletes the row. So no earlier event can change the row after the deletion.
//! * A daemon commits a batch with a like and crashes before the acknowledgement. Then the erase deletes the row,
//!   without which the daemon no longer ignores older events. The broker redelivers the like and then the unlike, so
//!   the row exists again, as an unlike. The effect is the same if a producer publishes an old event again. The
//!   counters stay right, and the next erase deletes the row.
//! * A filter run reads the user before the erase deletes the row. Then the erase drops the filter with its config,
//!   which contains the number of the filter run. So Redis rejects the new filter, and a later run builds one without
//!   the user. The user's remembered click is deleted before the filter.
//! * Another run wants to write a snapshot or an archive of a board. It must wait, because the erase holds the
//!   archiver's lock and the board's claim.
//! * The erase crashes between the renaming of a member in a frozen zset and in MySQL. The next erase finds the row in
//!   MySQL and chooses the same new name.
//! * A reconcile needs the events that the consumers log for it. The erase leaves the rows of this log and reports how
//!   many there are. The reconcile deletes them at its end.
//!
//! An erase must never delete a row that a newer like has changed, an event of another user, or an outbox row that has
//! not been added to Redis yet. After a successful run, the erased user or target must not be in any log, report or
//! checkpoint.

mod boards;
mod likes;
pub mod report;
mod traces;

use std::borrow::Cow;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::sql;
use crate::sql::erase::JOB;
use report::{Progress, Report, Waiting};
use tallyd_base::config::{Config, Rules};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::fence::Fences;
use tallyd_base::jobs::run::{Job, Run, RunOptions};
use tallyd_base::partitions::{Backlog, InUse};
use tallyd_base::runtime::fault;
use tallyd_base::servers::Servers;
use tallyd_core::control::Task;
use tallyd_core::erase::Subject;
use tallyd_core::model::Target;
use tallyd_core::rules::Writes;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

/// In the order of the steps. There is a point between any two steps.
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

const LOOK_EVERY: Duration = Duration::from_millis(200);

pub struct Eraser {
    pub config: Config,
    pub subject: Subject,
    /// In addition to the boards of the rules. Their members must be users, or targets of this kind.
    pub boards: Vec<String>,
}

struct Erasing<'a, 'r> {
    on: &'a Eraser,
    run: &'a mut Run<'r, Eraser>,
    kinds: KindNames,
    caches: Vec<Cache>,
    fences: Fences<'r>,
    backlog: Backlog,
}

impl Eraser {
    pub fn name(&self) -> String {
        match &self.subject {
            Subject::User(user) => format!("user {user}"),
            Subject::Target { target, kind } => format!("{kind}:{}", target.id),
        }
    }
}

impl Job for Eraser {
    const NAME: &'static str = JOB;
    const SENDS_FENCES: bool = true;
    type Report = Report;
    type Progress = Progress;

    /// No daemon would write the unlikes.
    fn needs(&self, _: &Config) -> &'static [Task] {
        &[Task::Consumer]
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.subject.word())
    }

    fn begin(&self) -> (Report, Progress) {
        (Report::new(self.subject.word()), Progress::default())
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let cache = &run.servers.cache;
        let also = cache.also(&self.config.redis, &self.config.metrics)?;
        let caches = [cache.clone()].into_iter().chain(also).collect();
        let fences = run.fences(self.config.reconcile.fence_max.0).await?;
        let (kinds, backlog) = (KindNames::new(&self.config.kinds), Backlog::default());
        Erasing { on: self, run, kinds, caches, fences, backlog }.erase().await
    }

    fn how_to_continue(&self, options: &RunOptions) -> Option<&'static str> {
        Some(if options.dry_run { "run it again" } else { "--resume continues" })
    }
}

impl Erasing<'_, '_> {
    async fn erase(&mut self) -> Result<()> {
        self.erase_likes().await?;
        self.wait_for_outbox().await?;
        fault::point("erase:settled");
        self.erase_numbers().await?;
        fault::point("erase:numbers");
        self.erase_traces().await?;
        fault::point("erase:traces");
        self.run.check_stop()?;
        self.erase_members().await?;
        fault::point("erase:boards");
        self.count_waiting().await?;
        self.look_again().await?;
        self.report_remaining();
        if !self.run.options.dry_run {
            self.run.servers.store.forget_marks(JOB, &self.on.mode()).await?;
        }
        Ok(())
    }

    async fn fence(&mut self) -> Result<()> {
        let number = self.run.next_number();
        self.run.unless_stopped(self.fences.pass(number)).await?
    }

    /// After the wait, the rows of the outbox can be rewritten and counters deleted: no daemon adds these rows later.
    async fn wait_for_outbox(&mut self) -> Result<()> {
        if self.run.options.dry_run {
            return Ok(());
        }
        self.fence().await?;
        let store = &self.run.servers.store;
        let ends = store.outbox_numbers().await?;
        let began = Instant::now();
        loop {
            let applied = store.outbox_applied().await?;
            if ends.iter().all(|(partition, last)| applied.of(partition) >= last) {
                return Ok(());
            }
            if began.elapsed() > self.on.config.reconcile.fence_max.0 {
                let text = "the rows of the outbox were not added to Redis in time: wait until `tallyd status` shows an empty outbox, then try again";
                return Err(JobError::NotNow(text.to_owned()).into());
            }
            self.run.unless_stopped(tokio::time::sleep(LOOK_EVERY)).await?;
        }
    }

    async fn erase_numbers(&mut self) -> Result<()> {
        let Servers { store, cache, .. } = self.run.servers;
        let dry_run = self.run.options.dry_run;
        let (target, kind) = match &self.on.subject {
            Subject::User(user) => {
                self.run.report.redis_keys += cache.erase_user(*user, dry_run).await?;
                return Ok(());
            }
            Subject::Target { target, kind } => (*target, kind.as_str()),
        };
        let rows = match dry_run {
            true => sql::erase::numbers::count_numbers(store, target).await?,
            false => sql::erase::numbers::erase_numbers(store, self.run.number, target).await?,
        };
        self.run.report.numbers = rows.into_iter().collect();
        fault::point("erase:rows");
        let metrics = self.on.config.metrics.codes();
        for cache in &self.caches {
            self.run.report.redis_keys += cache.erase_numbers(kind, &metrics, target, dry_run).await?;
        }
        self.drop_filters(&[target]).await
    }

    /// A user can't be removed from a filter. The next filter run builds the filters of changed counters. If the user's
    /// row was already an unlike, the counter is unchanged, and only the daily run over all targets builds the filter.
    async fn drop_filters(&mut self, targets: &[Target]) -> Result<()> {
        if !self.on.config.filter.is_on() {
            return Ok(());
        }
        let cache = &self.run.servers.cache;
        let states = cache.filter_states(&self.kinds, targets).await?;
        let there = targets.iter().zip(states).filter(|(_, state)| state.is_some());
        let there: Vec<Target> = there.map(|(target, _)| *target).collect();
        if !self.run.options.dry_run {
            cache.drop_filters(&self.kinds, &there).await?;
        }
        self.run.report.filters += there.len() as u64;
        Ok(())
    }

    async fn count_waiting(&mut self) -> Result<()> {
        let Servers { store, broker, .. } = self.run.servers;
        let in_use = InUse::read(store, broker).await?;
        let publisher = &self.fences.publisher;
        let fences = store.fences(JOB).await?;
        for (partition, queue) in in_use.partitions.queues() {
            let fences = fences.left(partition).count() as u64;
            let messages = publisher.depth(queue).await?.messages();
            let messages = messages.map(|messages| u64::from(messages).saturating_sub(fences));
            if messages != Some(0) {
                self.run.report.waiting.push(Waiting { queue: queue.to_owned(), messages });
            }
        }
        let queue = broker.returned();
        let messages = u64::from(publisher.count(&queue).await?);
        if messages > 0 {
            let text =
                format!("{messages} messages wait in the queue {queue}: run `tallyd dead list`, then erase again");
            self.run.report.left.push(text);
            self.run.report.waiting.push(Waiting { queue, messages: Some(messages) });
        }
        let watched = sql::erase::traces::watched_of(&self.run.servers.store, &self.on.subject).await?;
        if watched > 0 {
            let text = format!(
                "{watched} rows of watched_event, watched_count or watched_target remain: the running reconcile deletes them at its end"
            );
            self.run.report.left.push(text);
        }
        Ok(())
    }

    fn report_remaining(&mut self) {
        let rules = Rules::from(&self.on.config);
        let like = self.on.config.metrics.like();
        let by_api = self.kinds.all().any(|(kind, _)| rules.of(kind, like).writer == Writes::Api);
        self.run.report.redis_follows = by_api && self.run.report.unlikes > 0 && self.run.report.of == "user";
        if self.run.report.liked_again > 0 {
            let text =
                format!("{} like records were written after the unlikes: erase again", self.run.report.liked_again);
            self.run.report.left.push(text);
        }
        let unclear = &self.run.report.unclear_letters;
        if !unclear.is_empty() {
            let ids: Vec<String> = unclear.iter().map(u64::to_string).collect();
            let text = format!(
                "some dead letters contain the id in a field that tallyd does not know: check them with `tallyd dead show {}`",
                ids.join(" ")
            );
            self.run.report.left.push(text);
        }
    }

    fn context(&self, action: &'static str) -> impl Fn() -> String {
        let rows = self.run.report.rows;
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
