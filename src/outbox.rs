//! The outbox: everything that batches have added to `counter` is added to Redis, exactly once, for metrics that no API server counts.
//!
//! The way: the transaction that adds to `counter` notes the same in a row of the partition's outbox. After its commit the task here, one in
//! each daemon for all partitions, reads the rows in order and adds them, bucket by bucket. Each bucket holds a mark for each partition, the
//! number of the last row up to which it has everything. A call has the sum of a pass for some buckets. The script adds it where the mark is not
//! above the row that the pass follows (crates/redis/lua/apply.lua). A bucket with a higher mark gets a sum of the rows that follow it. The last row that
//! is added everywhere is noted in `outbox_state` once a second, so that the next daemon knows where to begin.
//!
//! The races, and what decides them:
//!
//! * A: a batch is committed. B: the daemon is killed before it adds. Another daemon, or the same one after a restart, finds the row: each looks once a
//!   second for rows that nobody has added.
//! * A: rows are added. B: the daemon is killed before it notes that, or between two buckets. The next one adds them again, and the marks
//!   skip what is there.
//! * A: a call times out; it may have run, or run later, even after later rows. Again the marks decide. Everything that some rows have for
//!   one bucket is one call, so that a mark is never raised above something that is missing: of two calls the first could be refused.
//! * A: rows are added to some buckets of a pass. B: the pass is repeated with more rows. The marks of these buckets are amidst the pass, and they answer
//!   with them. The next call is for buckets with exactly that mark, and has the rows after it. A mark that changes meanwhile is answered again.
//! * A: daemon 1 adds rows of the partition that it writes. B: daemon 2 sees them, too. It leaves alone rows that are younger than `OLD` and
//!   not of a partition of its own; if both add, the marks decide.
//! * A: the row numbered 7 is committed. B: so is 8. Numbers are given under the partition's lock: whoever sees 8 sees 7.
//! * A: rows are added. B: MySQL goes back to before them (a restore, a failover that loses commits). Numbers follow its clock, so what comes
//!   now has higher ones than any mark, and is added. What MySQL lost is in Redis alone until a full reconcile. The task detects it, because
//!   what it noted is gone or Redis has marks of rows that MySQL doesn't have, and logs it.
//! * A: rows are added to a bucket. B: Redis loses it. Mark and numbers are lost together. Rows that come now are added to a bucket that is
//!   unknown to readers; the job that loads it first raises the marks to what is committed, and loads the numbers as of those (crates/redis/lua/load.lua).
//! * A: Redis comes back older than it was (a failover, an old snapshot). Marks and numbers go back together, and rows up to `applied` are not
//!   sent again: a reconcile finds what is missing, as it does with likes.
//! * A: an operator has made a bucket another type, or a value no number. It is logged, and left alone: once it is repaired, it is a bucket
//!   that Redis has lost, or a reconcile adds what is missing. Everything else that fails is tried until it works.
//!
//! Where targets have Bloom filters a row also names the users who began to like a target. They are noted beside its filter before the row
//! counts as added; twice is harmless.
//!
//! What it must never do: add a row before its commit, delete a row before it is added everywhere, keep a batch waiting.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
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
use tallyd_redis::feed::{Gain, Once};
use tallyd_redis::keys::KindNames;

/// Tasks whose pause keeps rows from being added.
const PAUSED_BY: &[Task] = &[Task::Outbox];

/// How often it looks for rows that others have left, and notes the last row that is added.
const EVERY: Duration = Duration::from_secs(1);

/// Rows that are older have been left by the daemon that wrote them.
const OLD: Duration = Duration::from_secs(2);

/// Rows that are read at once.
const ROWS_MAX: u64 = 32;

/// Items of rows after which no others are read to be added together, some megabytes: the more there are, the more of them share a bucket.
const ITEMS_MAX: usize = 30_000;

/// How long rows are kept once they are added: longer than a reconcile takes from its sample to its read.
const KEPT: Duration = Duration::from_secs(600);

const PRUNE_EVERY: Duration = Duration::from_secs(10);

/// How long it continues after the last batch: the next daemon does the rest.
const END_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Outbox {
    pub store: Store,
    /// Where they are added: one for each layout.
    pub caches: Vec<Cache>,
    pub live: ConfigHandle,
    /// Says whether it is paused.
    pub control: Control,
    /// This daemon: rows of its own partitions are added immediately.
    pub owner: String,
}

#[derive(Default)]
struct State {
    /// The last rows up to which everything is in Redis.
    added: OutboxOffsets,
    /// The part of `added` that is noted in MySQL.
    noted: OutboxOffsets,
    kept: Kept,
    /// Partitions with more rows than were read.
    more: BTreeSet<u16>,
    looked: Option<Instant>,
    pruned: Option<Instant>,
    left: Flood,
    unfed: Flood,
    went_back: Flood,
}

impl Outbox {
    /// Adds rows, each time `wake` changes, until all its senders are gone.
    pub(crate) async fn run(self, mut wake: watch::Receiver<()>, beat: Heartbeat) {
        let mut outage = Outage::new("adding the outbox to Redis");
        let mut state = State::default();
        loop {
            // Before the pass: a commit while it runs wakes it again.
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
                // An error means that all senders are gone, which is checked above.
                let _ = tokio::time::timeout(state.until_looks(), wake.changed()).await;
            }
        }
    }

    /// Waits for the end of a pause. Returns `false` if all senders of `wake` are gone before: the next daemon adds what is left.
    async fn until_allowed(&self, wake: &mut watch::Receiver<()>) -> bool {
        tokio::select! {
            () = self.control.until_allowed(PAUSED_BY) => true,
            () = async { while wake.changed().await.is_ok() {} } => false,
        }
    }

    /// Adds the rows of the last batches, whose partitions are released by now, and notes the last row.
    async fn last_pass(&self, state: &mut State, beat: &Heartbeat) -> Result<()> {
        let began = Instant::now();
        loop {
            beat.during(self.pass(state, true)).await?;
            if state.more.is_empty() || began.elapsed() > END_MAX {
                return beat.during(self.note(state)).await;
            }
        }
    }

    /// Adds some rows of each partition that has any. A partition that fails does not stop the others: one node of a Cluster may not answer.
    async fn pass(&self, state: &mut State, ends: bool) -> Result<()> {
        let looks = state.until_looks().is_zero();
        if looks {
            state.looked = Some(Instant::now());
            // Rows that others have added.
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
                // Others may have added the rest.
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
        // In order, whatever the clock did: a row that is skipped is never added.
        let rows = rows.into_iter().take_while(|row| ours || row.is_old);
        let rows: Vec<OutboxRow> = rows.collect();
        let Some(last) = rows.last().map(|row| row.number) else { return Ok(()) };
        let config = self.live.current();
        let kinds = KindNames::new(&config.kinds);
        self.note_likers(&kinds, &rows).await?;
        let fed = self.feed(&config, &rows, state).await;
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

    /// The rows after that one which are added together, and whether others may follow.
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

    /// Adds to Bloom filters who likes what: before the rows are noted as added. A filter that begins to be built after this reads these
    /// likes in MySQL.
    async fn note_likers(&self, kinds: &KindNames, rows: &[OutboxRow]) -> Result<()> {
        let mut likers: BTreeMap<Target, Vec<UserId>> = BTreeMap::new();
        for (target, user) in rows.iter().flat_map(|row| &row.likers) {
            likers.entry(*target).or_default().push(*user);
        }
        let Some(cache) = self.caches.first().filter(|_| !likers.is_empty()) else { return Ok(()) };
        Ok(cache.note_likers(kinds, &likers).await?)
    }

    /// Adds to boards what rules say, in the periods in which it was written. Corrections by a run are not added.
    async fn feed(&self, config: &Config, rows: &[OutboxRow], state: &mut State) -> Result<()> {
        let rules = Rules::from(config);
        let (mut calls, Some(cache)) = (Vec::new(), self.caches.first()) else { return Ok(()) };
        // The last addition to each board.
        let mut last: HashMap<&str, (u64, usize)> = HashMap::new();
        for OutboxRow { partition, number, written_at, additions, .. } in
            rows.iter().filter(|it| it.partition != CORRECTIONS)
        {
            for (place, Addition { target, metric, delta }) in (1..).zip(additions) {
                let Some(board) = rules.board(target.kind, *metric) else { continue };
                let (member, column) = (target.id.to_string(), config.metrics.name(*metric));
                let gain = Gain { board, member: member.as_bytes(), column: &column, delta: *delta, at: *written_at };
                let place = (*number, place);
                let once = Once { partition: *partition, place, after: last.insert(board, place) };
                calls.push(cache.gain_call(&config.boards, gain, Some(once))?);
            }
        }
        for error in cache.gain(&calls).await? {
            if let Some(times) = state.unfed.note(1, Instant::now()) {
                let error = format!("{:#}", anyhow::Error::from(error));
                warn!(
                    event = "board-refused",
                    times, error, "{times} times something could not be added to a board: {error}"
                );
            }
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
                // There are more rows than one prune deletes: prune again at the next pass.
                state.pruned = None;
            }
        }
        Ok(())
    }
}

/// The last rows in Redis at some instants, the oldest first: rows are kept for a while from then on.
#[derive(Default)]
struct Kept(VecDeque<(Instant, OutboxOffsets)>);

impl Kept {
    /// The last rows that have been in Redis for `KEPT`. `noted` are there `now`.
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
            "{times} times something could not be added to Redis: kinds or metrics that are not in the configuration ({unknown} now), what is no \
             number there ({no_numbers}), buckets of another type ({no_buckets})"
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
            "MySQL is older than Redis: it lacks rows of partition {partition}'s outbox that Redis has. Run: tallyd after-restore"
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
