//! Adds to Redis the amounts that the batches have added to `counter` in MySQL, each amount exactly once. This concerns
//! only metrics that the daemon writes to Redis.
//!
//! The transaction that adds to `counter` also writes the same addition into a row of the partition's outbox. After the
//! commit, the daemon's outbox task, one for all partitions, reads the rows in order and adds their amounts to Redis,
//! bucket by bucket. Each bucket holds a mark for each partition: the number of the last row that it contains
//! completely. One call adds the sum of all rows of a pass to some buckets. If a bucket's mark is higher than the last
//! row before the pass, the script (crates/redis/lua/apply.lua) skips the bucket, and the task sends it a sum of only
//! the rows after the mark. Once a second the task stores in `outbox_state` the number of the last row that is added to
//! all buckets. The next daemon begins after that row.
//!
//! Possible races, each with its outcome:
//!
//! * A: a batch is committed. B: the daemon is killed before it adds the batch. Another daemon, or the same one after a
//!   restart, finds the row: each daemon checks once a second for rows that have not been added yet.
//! * A: rows are added. B: the daemon is killed before it records the rows as added, or between two buckets. The next
//!   daemon sends the rows again. The script uses the marks to skip the rows that Redis already has.
//! * A: a call times out. Redis may have executed it, or may execute it later, when newer rows have already been added.
//!   Because of the marks, the additions are made only once. One call contains all additions that its rows make to a
//!   bucket. Of two calls, the first could fail, and the second would raise the mark above rows that were not added.
//! * A: the task has added the rows of a pass to some of the buckets. B: the pass is repeated with more rows. The
//!   script adds nothing to the buckets that already have some of the rows, and returns their marks. For each returned
//!   mark, the task sends the rows with higher numbers to the buckets with this mark. If a bucket's mark has changed
//!   before this call, the script returns the new mark.
//! * A: daemon 1 adds rows of the partition that it writes. B: daemon 2 finds these rows, too. Daemon 2 adds them only
//!   if no daemon has recorded any of them as added since daemon 2 looked before. If both add a row, the marks prevent
//!   the second addition.
//! * A: a node of a Redis Cluster fails. B: further rows are committed. In each pass, the task adds the rows again from
//!   the first one that a bucket lacks, and then goes ahead with later rows. It sends no later rows to the buckets
//!   whose calls failed, because such a call would raise a mark above rows that the bucket lacks. If a later pass
//!   reaches one of these buckets, the task sends all later rows again, even if another node still fails.
//! * A: the row numbered 7 is committed. B: row 8 is committed. Numbers are assigned under the partition's lock, so a
//!   reader that finds row 8 also finds row 7.
//! * A: rows are added. B: MySQL goes back to a state without these rows (a restore, a failover that loses commits).
//!   Row numbers follow MySQL's clock, so a new row has a higher number than every mark, and is added. Until a full
//!   reconcile, Redis keeps the additions that MySQL lost. The task logs a warning if the last recorded row is missing
//!   in MySQL, or if Redis has marks of rows that MySQL does not have.
//! * A: rows are added to a bucket. B: Redis loses the bucket, with its mark and its counters. New rows are added to
//!   the new bucket, which readers do not use yet. The job that loads the bucket first sets each mark to the
//!   partition's last committed row, and then loads values that include exactly the rows up to these marks
//!   (crates/redis/lua/load.lua).
//! * A: Redis comes back with an older state (a failover, an old snapshot) of the marks and the counters. The task does
//!   not send rows again if MySQL has recorded them as added, or if they were added ahead while another node failed and
//!   no call to this server failed. A reconcile finds the missing amounts, as for counters that API servers write.
//! * A: an operator changes a bucket's type, or changes a value into something that is not a number. The task logs this
//!   and skips the addition. If Redis has lost the bucket after the operator's repair, a job loads it. Otherwise a
//!   reconcile adds the missing amounts. The same is true for boards. After any other failure, the task retries until
//!   the call succeeds.
//!
//! If targets have Bloom filters, an outbox row also lists the new likes: the target and the user. The task adds these
//! users to the target's filter before it records the row as added. It is harmless to add a user twice. If the filter's
//! keys are damaged, the task deletes the filter.
//!
//! The task must never add a row before its commit, delete a row before it is added to all buckets, or delay a batch.

mod adding;
mod kept;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::watch;
use tracing::warn;

use self::adding::Ahead;
use self::kept::Kept;
use tallyd_base::config::ConfigHandle;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::log::Flood;
use tallyd_base::runtime::retry::Outage;
use tallyd_base::servers::control::Control;
use tallyd_base::telemetry::telemetry;
use tallyd_core::control::Task;
use tallyd_core::outbox::OutboxOffsets;
use tallyd_mysql::Store;
use tallyd_mysql::outbox::OutboxEnd;
use tallyd_redis::Cache;

const PAUSED_BY: &[Task] = &[Task::Outbox];

/// Looks for rows that other daemons have not added, and records the last added row.
const EVERY: Duration = Duration::from_secs(1);

/// A pass that has left no rows is followed by the next one after this time at the earliest, because a pass for each
/// commit of a busy site would cost more than the commit. A pass after a longer pause begins at once.
const PASS_EVERY: Duration = Duration::from_millis(20);

const PRUNE_EVERY: Duration = Duration::from_secs(10);

/// Limits the last pass at the stop. The next daemon adds the remaining rows.
const END_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Outbox {
    pub store: Store,
    pub caches: Vec<Cache>,
    pub live: ConfigHandle,
    pub control: Control,
    /// The rows of this daemon's partitions are added immediately.
    pub owner: String,
}

#[derive(Default)]
struct OutboxState {
    /// For each partition, the last row that Redis has. Redis also has all earlier rows.
    added: OutboxOffsets,
    noted: OutboxOffsets,
    ahead: BTreeMap<u16, Ahead>,
    /// Partitions with unread rows at the last look, each with the last row recorded in MySQL then.
    waited: BTreeMap<u16, u64>,
    kept: Kept,
    more: BTreeSet<u16>,
    looked: Option<Instant>,
    pruned: Option<Instant>,
    left: Flood,
    unfed: Flood,
    unnoted: Flood,
    went_back: Flood,
}

impl Outbox {
    pub(crate) async fn run(self, mut wake: watch::Receiver<()>, beat: Heartbeat) {
        let mut outage = Outage::new("adding the outbox to Redis");
        let mut state = OutboxState::default();
        loop {
            // Before the pass, so that a commit during the pass wakes the loop again.
            let ended = wake.has_changed().is_err();
            wake.mark_unchanged();
            if !self.control.allows(PAUSED_BY) {
                if ended || !beat.during(self.until_allowed(&mut wake)).await {
                    return;
                }
                continue;
            }
            let began = tokio::time::Instant::now();
            let passed = if ended {
                self.last_pass(&mut state, &beat).await
            } else {
                beat.during(self.pass(&mut state, false)).await
            };
            match passed {
                Ok(()) => outage.over(),
                Err(error) => {
                    let delay = outage.failed(&format!("{error:#}"));
                    beat.during(tokio::time::sleep(if ended { Duration::ZERO } else { delay })).await;
                }
            }
            if ended {
                return;
            }
            if state.more.is_empty() {
                // On an error all senders are dropped. The loop checks for that at its start.
                let _ = tokio::time::timeout(state.until_looks(), wake.changed()).await;
                tokio::time::sleep_until(began + PASS_EVERY).await;
            }
        }
    }

    /// Returns `false` if all senders of `wake` are dropped first. The next daemon then adds the remaining rows.
    async fn until_allowed(&self, wake: &mut watch::Receiver<()>) -> bool {
        tokio::select! {
            () = self.control.until_allowed(PAUSED_BY) => true,
            () = async { while wake.changed().await.is_ok() {} } => false,
        }
    }

    /// This daemon no longer holds the partitions of its last batches.
    async fn last_pass(&self, state: &mut OutboxState, beat: &Heartbeat) -> Result<()> {
        let began = Instant::now();
        loop {
            beat.during(self.pass(state, true)).await?;
            if state.more.is_empty() || began.elapsed() > END_MAX {
                return beat.during(self.note(state)).await;
            }
        }
    }

    /// If one partition fails, the others continue. Adds rows of another daemon only if nobody did since the last look.
    async fn pass(&self, state: &mut OutboxState, ends: bool) -> Result<()> {
        let looks = state.until_looks().is_zero();
        if looks {
            state.looked = Some(Instant::now());
            let applied = self.store.outbox_applied().await?;
            state.added.raise_all(&applied);
            let lost = state.noted.iter().find(|(partition, noted)| applied.of(*partition) < *noted);
            state.noted = applied;
            if let Some((partition, _)) = lost {
                log_went_back(partition, state);
            }
        }
        let (mut failed, outboxes) = (Ok(()), self.store.outbox_ends().await?);
        for end in &outboxes {
            let ours = end.owner.as_ref() == Some(&self.owner) || (ends && end.owner.is_none());
            if end.last > state.added.of(end.partition) && (ours || state.is_left_to_us(end, looks)) {
                let added = self.add(end.partition, ours && !ends, state).await;
                failed = failed.and(added);
            } else {
                state.more.remove(&end.partition);
            }
        }
        if looks {
            self.note(state).await?;
            state.note_waiting(&outboxes);
            self.prune(state).await?;
        }
        failed
    }

    async fn note(&self, state: &mut OutboxState) -> Result<()> {
        let news: OutboxOffsets = state.added.iter().filter(|(of, number)| *number > state.noted.of(*of)).collect();
        self.store.note_outbox_applied(&news).await?;
        state.noted.raise_all(&news);
        Ok(())
    }

    async fn prune(&self, state: &mut OutboxState) -> Result<()> {
        if state.pruned.is_some_and(|pruned| pruned.elapsed() < PRUNE_EVERY) {
            return Ok(());
        }
        state.pruned = Some(Instant::now());
        for (partition, number) in state.kept.over(Instant::now(), &state.noted).iter() {
            if self.store.prune_outbox(partition, number).await? {
                state.pruned = None;
                return Ok(());
            }
        }
        Ok(())
    }
}

impl OutboxState {
    fn until_looks(&self) -> Duration {
        self.looked.map_or(Duration::ZERO, |looked| EVERY.saturating_sub(looked.elapsed()))
    }

    /// For a partition of another daemon or of none. If one daemon adds the rows, the others stop at their next look.
    fn is_left_to_us(&self, OutboxEnd { partition, owner, .. }: &OutboxEnd, looks: bool) -> bool {
        match looks {
            true => self.waited.get(partition) == Some(&self.noted.of(*partition)),
            false => owner.is_none() && self.more.contains(partition),
        }
    }

    fn note_waiting(&mut self, outboxes: &[OutboxEnd]) {
        let noted = |end: &OutboxEnd| (end.partition, self.noted.of(end.partition));
        self.waited = outboxes.iter().filter(|end| end.last > noted(end).1).map(noted).collect();
    }
}

fn log_went_back(partition: u16, state: &mut OutboxState) {
    telemetry().mysql_went_back();
    if let Some(times) = state.went_back.note(1, Instant::now()) {
        warn!(
            event = "mysql-went-back",
            times,
            partition,
            "MySQL is older than Redis: Redis has outbox rows of partition {partition} that MySQL does not have. Run: tallyd admin after-restore"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_another_daemon_are_added_once_it_adds_none() {
        let end = |owner: Option<&str>| OutboxEnd { partition: 3, last: 9, owner: owner.map(str::to_owned) };
        let (of_other, of_nobody) = (end(Some("other")), end(None));
        let mut state = OutboxState::default();
        let mut looks_at = |end: &OutboxEnd, noted: u64| {
            state.noted.raise(3, noted);
            let is_left = state.is_left_to_us(end, true);
            state.note_waiting(std::slice::from_ref(end));
            is_left
        };
        assert!(!looks_at(&of_other, 4), "the rows can be new");
        assert!(!looks_at(&of_other, 6), "the other daemon adds rows");
        assert!(looks_at(&of_other, 6));
        assert!(looks_at(&of_nobody, 6));
        state.more.insert(3);
        assert!(state.is_left_to_us(&of_nobody, false) && !state.is_left_to_us(&of_other, false));
    }
}
