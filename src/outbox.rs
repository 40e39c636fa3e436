//! Adds to Redis the amounts that the batches have added to `counter` in MySQL, each amount exactly once. This concerns
//! only metrics that the daemon writes to Redis.
//!
//! The transaction that adds to `counter` also writes the same addition into a row of the partition's outbox. After the
//! commit, the outbox task reads the rows in order and adds their amounts to Redis, bucket by bucket. Each daemon has
//! one such task for all partitions. Each bucket holds a mark for each partition: the number of the last row that the
//! bucket contains completely. One call adds the sum of all rows of a pass to some buckets. A bucket's mark can be
//! higher than the last row before the pass. The script (crates/redis/lua/apply.lua) then skips the bucket, and the
//! task sends it a sum of only the rows after the mark. Once a second the task stores in `outbox_state` the number of
//! the last row that is added to all buckets. The next daemon begins after that row.
//!
//! Possible races, each with its outcome:
//!
//! * A: a batch is committed. B: the daemon is killed before it adds the batch. Another daemon, or the same daemon
//!   after a restart, finds the row. Each daemon checks once a second for rows that have not been added yet.
//! * A: rows are added. B: the daemon is killed before it records the rows as added, or between two buckets. The next
//!   daemon sends the rows again. The script uses the marks to skip the rows that Redis already has.
//! * A: a call times out. It is unknown whether Redis has executed the call. Redis can also execute the call later,
//!   when newer rows have already been added. Because of the marks, the additions are made only once. One call contains
//!   all additions that its rows make to a bucket. With two calls, the first call could fail, and the second call would
//!   raise the mark above rows that were not added.
//! * A: the task has added the rows of a pass to some of the buckets. B: the pass is repeated with more rows. The
//!   script finds that these buckets already have some of the rows. So the script adds nothing to these buckets, and
//!   returns their marks. For each returned mark, the task sends the rows with higher numbers to the buckets with this
//!   mark. If a bucket's mark has changed before this call, the script returns the new mark.
//! * A: daemon 1 adds rows of the partition that it writes. B: daemon 2 reads these rows, too. If a row of another
//!   daemon's partition is younger than `OLD`, daemon 2 skips the row. If both daemons add a row, the marks prevent the
//!   second addition.
//! * A: the row numbered 7 is committed. B: row 8 is committed. Numbers are assigned under the partition's lock, so a
//!   reader that finds row 8 also finds row 7.
//! * A: rows are added. B: MySQL goes back to a state without these rows (a restore, a failover that loses commits).
//!   Row numbers follow MySQL's clock. So a new row has a higher number than every mark, and the script adds the row.
//!   Until a full reconcile, Redis keeps the additions that MySQL lost. The task logs a warning if the last recorded
//!   row is missing in MySQL, or if Redis has marks of rows that MySQL does not have.
//! * A: rows are added to a bucket. B: Redis loses the bucket, with its mark and its counters. After that, new rows are
//!   added to the new bucket, which readers do not use yet. The job that loads the bucket first sets each mark to the
//!   partition's last committed row. The job then loads values that include exactly the rows up to these marks
//!   (crates/redis/lua/load.lua).
//! * A: Redis comes back with an older state (a failover, an old snapshot). The marks and the counters then have the
//!   same older state. The task does not send rows again if MySQL has recorded them as added. A reconcile finds the
//!   missing amounts in the same way as for counters that API servers write.
//! * A: an operator changes a bucket's type, or changes a value into something that is not a number. The task logs this
//!   and skips the addition. If Redis has lost the bucket after the operator's repair, a job loads the bucket.
//!   Otherwise a reconcile adds the missing amounts. After any other failure, the task retries until the call succeeds.
//!
//! If targets have Bloom filters, an outbox row also lists the new likes: the target and the user. The task adds these
//! users to the target's filter before it records the row as added. It is harmless to add a user twice.
//!
//! The task must never add a row before its commit, delete a row before it is added to all buckets, or delay a batch.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::watch;
use tracing::warn;

use crate::config::{Config, ConfigHandle, Rules};
use crate::runtime::fault;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::log::Flood;
use crate::runtime::retry::Outage;
use crate::servers::control::Control;
use crate::telemetry::{seconds_between, telemetry};
use tallyd_core::control::Task;
use tallyd_core::model::{Addition, Micros, Target, UserId};
use tallyd_core::outbox::{CORRECTIONS, OutboxOffsets, OutboxRow};
use tallyd_mysql::Store;
use tallyd_mysql::outbox::End;
use tallyd_redis::Cache;
use tallyd_redis::apply::Left;
use tallyd_redis::feed::{Gain, Refused};
use tallyd_redis::keys::KindNames;

/// If one of these tasks is paused, no rows are added.
const PAUSED_BY: &[Task] = &[Task::Outbox];

/// At this interval the task checks for rows that other daemons have not added, and records the last added row.
const EVERY: Duration = Duration::from_secs(1);

/// If a row is older than this, the daemon that wrote it is assumed to be down.
const OLD: Duration = Duration::from_secs(2);

/// Maximum number of rows per read.
const ROWS_MAX: u64 = 32;

/// For one pass, the task reads rows until these rows together contain this number of items (some megabytes). A large
/// pass is efficient, because more of its items belong to the same bucket.
const ITEMS_MAX: usize = 30_000;

/// Rows are kept in MySQL for this time after they were added to Redis. A reconcile needs the rows that were added
/// between its sample of Redis and its read of MySQL. A reconcile always reads MySQL within this time.
const KEPT: Duration = Duration::from_secs(600);

const PRUNE_EVERY: Duration = Duration::from_secs(10);

/// When the daemon stops, the task adds rows for at most this time. The next daemon adds the remaining rows.
const END_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Outbox {
    pub store: Store,
    /// One cache for each layout.
    pub caches: Vec<Cache>,
    pub live: ConfigHandle,
    pub control: Control,
    /// The name of this daemon. The rows of its own partitions are added immediately.
    pub owner: String,
}

#[derive(Default)]
struct State {
    /// For each partition: the last row whose additions are all in Redis. Redis also has all earlier rows.
    added: OutboxOffsets,
    /// The value of `added` that was last recorded in MySQL.
    noted: OutboxOffsets,
    kept: Kept,
    /// The partitions that still had unread rows after the last pass.
    more: BTreeSet<u16>,
    looked: Option<Instant>,
    pruned: Option<Instant>,
    left: Flood,
    unfed: Flood,
    went_back: Flood,
}

impl Outbox {
    /// Adds rows each time `wake` changes, until all its senders are dropped.
    pub(crate) async fn run(self, mut wake: watch::Receiver<()>, beat: Heartbeat) {
        let mut outage = Outage::new("adding the outbox to Redis");
        let mut state = State::default();
        loop {
            // The wake-up is reset before the pass, so that a commit during the pass wakes the loop again.
            let ended = wake.has_changed().is_err();
            wake.mark_unchanged();
            if !self.control.allows(PAUSED_BY) {
                if ended || !beat.during(self.until_allowed(&mut wake)).await {
                    return;
                }
                continue;
            }
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
                // An error means that all senders are dropped. The loop checks for that at its start.
                let _ = tokio::time::timeout(state.until_looks(), wake.changed()).await;
            }
        }
    }

    /// Waits for the end of a pause. Returns `false` if all senders of `wake` are dropped before that. The next daemon
    /// then adds the remaining rows.
    async fn until_allowed(&self, wake: &mut watch::Receiver<()>) -> bool {
        tokio::select! {
            () = self.control.until_allowed(PAUSED_BY) => true,
            () = async { while wake.changed().await.is_ok() {} } => false,
        }
    }

    /// Adds the rows of the last batches and records the last row. This daemon no longer holds the partitions of these
    /// batches.
    async fn last_pass(&self, state: &mut State, beat: &Heartbeat) -> Result<()> {
        let began = Instant::now();
        loop {
            beat.during(self.pass(state, true)).await?;
            if state.more.is_empty() || began.elapsed() > END_MAX {
                return beat.during(self.note(state)).await;
            }
        }
    }

    /// Adds the next rows of each partition that has new rows. If one partition fails, the others continue, because
    /// possibly only one node of the Redis Cluster is unreachable.
    async fn pass(&self, state: &mut State, ends: bool) -> Result<()> {
        let looks = state.until_looks().is_zero();
        if looks {
            state.looked = Some(Instant::now());
            // These rows include the rows that other daemons have added.
            let applied = self.store.outbox_applied().await?;
            state.added.raise_all(&applied);
            let lost = state.noted.iter().find(|(partition, noted)| applied.of(*partition) < *noted);
            state.noted = applied;
            if let Some((partition, _)) = lost {
                say_went_back(partition, state);
            }
        }
        let mut failed = Ok(());
        for End { partition, last, owner } in self.store.outbox_ends().await? {
            let ours = owner.as_ref() == Some(&self.owner) || (ends && owner.is_none());
            if last <= state.added.of(partition) {
                // Other daemons may have added the remaining rows.
                state.more.remove(&partition);
            } else if ours || looks || state.more.contains(&partition) {
                let added = self.add(partition, ours, state).await;
                failed = failed.and(added);
            }
        }
        if looks {
            self.note(state).await?;
            self.prune(state).await?;
        }
        failed
    }

    async fn add(&self, partition: u16, ours: bool, state: &mut State) -> Result<()> {
        state.more.remove(&partition);
        let (rows, full) = self.read(partition, state.added.of(partition)).await?;
        // The rows are added strictly in order, even if the clock jumped, because a skipped row would never be added.
        let rows = rows.into_iter().take_while(|row| ours || row.is_old);
        let rows: Vec<OutboxRow> = rows.collect();
        let Some(last) = rows.last().map(|row| row.number) else { return Ok(()) };
        let config = self.live.current();
        let kinds = KindNames::new(&config.kinds);
        self.note_likers(&kinds, &rows).await?;
        let fed = self.feed(&config, partition, &rows, state).await;
        let (written, additions): (Vec<Micros>, Vec<usize>) =
            rows.iter().map(|row| (row.written_at, row.additions.len())).unzip();
        let additions = additions.iter().sum::<usize>() as u64;
        let rows: Vec<_> = rows.into_iter().map(|row| (row.number, row.additions)).collect();
        for cache in self.caches.iter().map(|cache| cache.named(&config.metrics)) {
            fault::point("outbox:adding");
            let mut applying = cache.applying(&kinds, partition, state.added.of(partition), &rows);
            while !applying.is_done() {
                cache.apply_some(&mut applying).await?;
                fault::point("outbox:amidst");
            }
            let left = applying.ended()?;
            say_left(left, state);
            if left.unknown_marks > 0 {
                say_went_back(partition, state);
            }
        }
        fed?;
        fault::point("outbox:added");
        let now = crate::runtime::clock::now();
        written.iter().for_each(|at| telemetry().outbox.lag.observe(seconds_between(*at, now)));
        telemetry().outbox.added.inc_by(additions);
        state.added.raise(partition, last);
        if full {
            state.more.insert(partition);
        }
        Ok(())
    }

    /// Reads the rows after `after` for one pass. Also returns whether more rows can follow.
    async fn read(&self, partition: u16, after: u64) -> Result<(Vec<OutboxRow>, bool)> {
        let (mut rows, mut items) = (Vec::<OutboxRow>::new(), 0);
        loop {
            let last = rows.last().map_or(after, |row| row.number);
            let some = self.store.outbox_after(partition, last, ROWS_MAX, OLD).await?;
            let full = some.len() as u64 == ROWS_MAX;
            items += some.iter().map(|row| row.additions.len() + row.likers.len()).sum::<usize>();
            rows.extend(some);
            if !full || items >= ITEMS_MAX {
                return Ok((rows, full));
            }
        }
    }

    /// Adds the users who like a target to the target's Bloom filter. The task does this before it records the outbox
    /// rows as added. A filter build that begins later reads these likes in MySQL.
    async fn note_likers(&self, kinds: &KindNames, rows: &[OutboxRow]) -> Result<()> {
        let mut likers: BTreeMap<Target, Vec<UserId>> = BTreeMap::new();
        for (target, user) in rows.iter().flat_map(|row| &row.likers) {
            likers.entry(*target).or_default().push(*user);
        }
        let Some(cache) = self.caches.first().filter(|_| !likers.is_empty()) else { return Ok(()) };
        Ok(cache.note_likers(kinds, &likers).await?)
    }

    /// Adds the rows' amounts to the boards that the rules specify, in the periods in which the rows were written. A
    /// job's corrections are not added to boards.
    async fn feed(&self, config: &Config, partition: u16, rows: &[OutboxRow], state: &mut State) -> Result<()> {
        let Some(cache) = self.caches.first().filter(|_| partition != CORRECTIONS) else { return Ok(()) };
        let rules = Rules::from(config);
        let mut gains = Vec::new();
        for OutboxRow { number, written_at: at, additions, .. } in rows {
            for (place, Addition { target, metric, delta }) in (1..).zip(additions) {
                let Some(board) = rules.board(target.kind, *metric) else { continue };
                let member = target.id.to_string().into_bytes().into();
                let column = config.metrics.name(*metric).into();
                gains.push(((*number, place), Gain { board, member, column, delta: *delta, at: *at }));
            }
        }
        let calls = cache.feed_calls(&config.boards, partition, gains.into_iter())?;
        let Refused { additions, error: Some(error) } = cache.feed(calls).await? else { return Ok(()) };
        if let Some(times) = state.unfed.note(additions, Instant::now()) {
            warn!(
                event = "board-refused",
                times, error, "{times} additions to boards failed and were skipped: {error}"
            );
        }
        Ok(())
    }

    async fn note(&self, state: &mut State) -> Result<()> {
        let news: OutboxOffsets = state.added.iter().filter(|(of, number)| *number > state.noted.of(*of)).collect();
        self.store.note_outbox_applied(&news).await?;
        state.noted.raise_all(&news);
        Ok(())
    }

    async fn prune(&self, state: &mut State) -> Result<()> {
        if state.pruned.is_some_and(|pruned| pruned.elapsed() < PRUNE_EVERY) {
            return Ok(());
        }
        state.pruned = Some(Instant::now());
        for (partition, number) in state.kept.over(Instant::now(), &state.noted).iter() {
            if self.store.prune_outbox(partition, number).await? {
                // One prune deletes a limited number of rows, and more are left. The next pass prunes again.
                state.pruned = None;
            }
        }
        Ok(())
    }
}

/// For several instants, the last row of each partition that was in Redis at this instant. The oldest instant is first.
/// A row is deleted from MySQL after the row has been in Redis for `KEPT`.
#[derive(Default)]
struct Kept(VecDeque<(Instant, OutboxOffsets)>);

impl Kept {
    /// Returns the last rows that have been in Redis for at least `KEPT`. At `now`, the rows up to `noted` are in
    /// Redis.
    fn over(&mut self, now: Instant, noted: &OutboxOffsets) -> OutboxOffsets {
        self.0.push_back((now, noted.clone()));
        let is_over = |(since, _): &(Instant, OutboxOffsets)| now.duration_since(*since) >= KEPT;
        while self.0.get(1).is_some_and(is_over) {
            self.0.pop_front();
        }
        self.0.front().filter(|oldest| is_over(oldest)).map(|(_, offsets)| offsets.clone()).unwrap_or_default()
    }
}

impl State {
    fn until_looks(&self) -> Duration {
        self.looked.map_or(Duration::ZERO, |looked| EVERY.saturating_sub(looked.elapsed()))
    }
}

fn say_left(left: Left, state: &mut State) {
    let Left { unknown, no_numbers, no_buckets, .. } = left;
    if let Some(times) = state.left.note(unknown + no_numbers + no_buckets, Instant::now()) {
        warn!(
            event = "outbox-left",
            times,
            unknown,
            no_numbers,
            no_buckets,
            "{times} additions to Redis were skipped. Reasons in the last pass: the kind or metric is not in the configuration ({unknown}), \
             the value in Redis is not a number ({no_numbers}), the bucket has another type ({no_buckets})"
        );
    }
}

fn say_went_back(partition: u16, state: &mut State) {
    telemetry().mysql_went_back();
    if let Some(times) = state.went_back.note(1, Instant::now()) {
        warn!(
            event = "mysql-went-back",
            times,
            partition,
            "MySQL is older than Redis: Redis has outbox rows of partition {partition} that MySQL does not have. Run: tallyd after-restore"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_from_when_they_were_added() {
        let (began, mut kept) = (Instant::now(), Kept::default());
        let mut over = |after_s: u64, number: u64| {
            kept.over(began + Duration::from_secs(after_s), &OutboxOffsets::from_iter([(0, number)])).of(0)
        };
        assert_eq!([over(0, 5), over(300, 7), over(599, 9)], [0, 0, 0]);
        assert_eq!([over(600, 9), over(899, 9), over(900, 9), over(2_000, 12)], [5, 5, 7, 9]);
    }
}
