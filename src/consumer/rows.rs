//! Applies a batch's events within its transaction.
//!
//! Likes: the newest event per (target, user) is written. The changes of the counters are computed from the rows' old
//! states. Counts and sets: the ledger filters out counts that were applied before. The transaction locks settable
//! counters. For the events of these counters, `tallyd_core::resolve_sets` decides which events take effect. Events of
//! targets that a reconcile watches are logged.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use sqlx::MySqlConnection;

use super::batch::Received;
use tallyd_base::config::Rules;
use tallyd_core::coalesce::{
    Before, Entry, LikeState, Pair, before, coalesce, differences, distinct, new_likers, sums,
};
use tallyd_core::event::{CountEvent, LikeEvent};
use tallyd_core::mapping::in_order_of_arrival;
use tallyd_core::model::{CounterKey, Difference, Metric};
use tallyd_core::resolve_sets::{LastSet, Resolved, newest, resolve};
use tallyd_core::unit::Unit;
use tallyd_mysql::watches::{self, Logged};
use tallyd_mysql::{StoreError, applied_events, likes, partitions, sets};

/// If a transaction finds an event that was applied before, the writer checks the ledger in this number of later
/// transactions.
const ASKS_AFTER_ONE: u32 = 100;

pub(super) struct LikeRows {
    pub metric: Metric,
    /// Whether targets have Bloom filters. If so, the outbox adds the users who like a target to the target's filter.
    pub has_filters: bool,
    pub reads_first: bool,
    /// The unit of the events' times, if it is coarser than a microsecond. If two events have the same time in this
    /// unit, the event that arrived later wins.
    pub coarse: Option<Unit>,
}

pub(super) struct Written {
    pub rows: usize,
    pub differences: Vec<Difference>,
    /// The users who like a target and did not like it before. The list is empty if targets have no Bloom filters.
    pub likers: Vec<Pair>,
}

impl LikeRows {
    pub(super) fn falls_back(&mut self, error: &StoreError) -> bool {
        let is_new = !self.reads_first && error.is_unsupported();
        self.reads_first |= is_new;
        is_new
    }

    pub(super) async fn write(
        &self,
        tx: &mut MySqlConnection,
        received: &[Received],
        capture: &EventCapture,
    ) -> Result<Written, StoreError> {
        let events: Vec<LikeEvent> = received.iter().filter_map(Received::like).collect();
        let (winners, before) = if self.coarse.is_some() || self.reads_first || capture.has_likes() {
            write_reading(tx, &events, self.coarse, capture).await?
        } else {
            let winners = coalesce(&events);
            let before = likes::upsert(tx, &winners).await?.ok_or(StoreError::Unsupported("user variables"))?;
            (winners, before)
        };
        Ok(Written {
            rows: winners.len(),
            differences: differences(self.metric, &winners, &before),
            likers: if self.has_filters { new_likers(&winners, &before) } else { Vec::new() },
        })
    }
}

async fn write_reading(
    tx: &mut MySqlConnection,
    events: &[LikeEvent],
    coarse: Option<Unit>,
    capture: &EventCapture,
) -> Result<(Vec<(Pair, LikeState)>, Vec<Before>), StoreError> {
    let newest = coalesce(events);
    let pairs: Vec<Pair> = newest.iter().map(|(pair, _)| *pair).collect();
    let old = likes::old_states(tx, &pairs).await?;
    let (winners, before) = match coarse {
        Some(unit) => in_order_of_arrival(events, unit, &old),
        None => {
            let before = before(&newest, &old);
            (newest, before)
        }
    };
    likes::write_winners(tx, &winners, &before).await?;
    capture.log_likes(tx, events, &old).await?;
    Ok((winners, before))
}

/// Almost every count is new, so a transaction normally does not read the ledger. After a failed transaction the next
/// ones read it, because one known event means that others can follow.
#[derive(Default)]
pub(super) struct Counts {
    /// The number of later transactions in which the daemon must still read the ledger.
    asks_ledger: u32,
}

impl Counts {
    pub(super) async fn apply(
        &mut self,
        tx: &mut MySqlConnection,
        received: &[Received],
        rules: &Rules,
        capture: &EventCapture,
    ) -> Result<Vec<Difference>, StoreError> {
        if received.iter().all(|received| received.like().is_some()) {
            return Ok(Vec::new());
        }
        let counts = distinct(received.iter().filter_map(Received::counted));
        let sets = newest(received.iter().filter_map(Received::set));
        let counts = self.note(tx, counts).await?;
        let is_settable = |count: &CountEvent| rules.of(count.target.kind, count.metric).settable;
        let (settable, added) =
            if rules.has_settable() { counts.into_iter().partition(is_settable) } else { (Vec::new(), counts) };
        let (resolved, differences) = apply_settable(tx, sets, settable).await?;
        capture.log_counts(tx, &added, &resolved).await?;
        let mut all = sums(&added);
        if !differences.is_empty() {
            all.extend(differences);
            all.sort_unstable_by_key(|difference| (difference.target, difference.metric));
        }
        Ok(all)
    }

    /// Records that a transaction failed. A possible reason is a count that was applied before, or a COMMIT that
    /// succeeded without a reply.
    pub(super) fn failed(&mut self) {
        self.asks_ledger = self.asks_ledger.max(1);
    }

    pub(super) fn committed(&mut self) {
        self.asks_ledger = self.asks_ledger.saturating_sub(1);
    }

    async fn note(
        &mut self,
        tx: &mut MySqlConnection,
        mut counts: Vec<CountEvent>,
    ) -> Result<Vec<CountEvent>, StoreError> {
        let mut entries: Vec<Entry> = counts.iter().map(Entry::of).collect();
        let applied = if self.asks_ledger > 0 { applied_events::applied(tx, &entries).await? } else { HashSet::new() };
        if !applied.is_empty() {
            self.asks_ledger = ASKS_AFTER_ONE;
            entries.retain(|entry| !applied.contains(entry));
            counts.retain(|count| !applied.contains(&Entry::of(count)));
        }
        applied_events::note_applied(tx, &entries).await?;
        Ok(counts)
    }
}

/// All these counters are locked first, in a fixed order, because another partition can write the same counters.
async fn apply_settable(
    tx: &mut MySqlConnection,
    sets: BTreeMap<CounterKey, LastSet>,
    counts: Vec<CountEvent>,
) -> Result<(Resolved, Vec<Difference>), StoreError> {
    let counted = counts.iter().map(|count| (count.target, count.metric));
    let keys: BTreeSet<CounterKey> = sets.keys().copied().chain(counted).collect();
    if keys.is_empty() {
        return Ok((Resolved::default(), Vec::new()));
    }
    let keys: Vec<CounterKey> = keys.into_iter().collect();
    let known = sets::lock(tx, &keys).await?;
    let resolved = resolve(&sets, counts, &known);
    let standing = sets::standing(tx, &resolved.won).await?;
    let differences = resolved.differences(&standing).ok_or(StoreError::OutOfRange("set a counter"))?;
    sets::note(tx, &resolved.won, &resolved.live).await?;
    Ok((resolved, differences))
}

/// Logs the events of targets that a reconcile watches, so that it can compute their counters at any instant. Caches
/// the last watch and its counters.
pub(super) struct EventCapture {
    like: Metric,
    watch: Option<u64>,
    keys: HashSet<CounterKey>,
}

impl EventCapture {
    pub(super) fn new(like: Metric) -> Self {
        Self { like, watch: None, keys: HashSet::new() }
    }

    pub(super) async fn refresh(&mut self, tx: &mut MySqlConnection, watch: Option<u64>) -> Result<(), StoreError> {
        if self.watch == watch {
            return Ok(());
        }
        *self = Self::new(self.like);
        if let Some(number) = watch {
            self.keys = partitions::watched_numbers(tx, number).await?.into_iter().collect();
            self.watch = watch;
        }
        Ok(())
    }

    /// Whether likes are captured (their events are logged). If so, the former states of all rows must be read.
    pub(super) fn has_likes(&self) -> bool {
        self.of_likes().is_some()
    }

    /// Logs each like event of a watched target with the row's former state. The log also has the events that change
    /// nothing, because the batch or the row has a newer event.
    pub(super) async fn log_likes(
        &self,
        tx: &mut MySqlConnection,
        events: &[LikeEvent],
        old: &HashMap<Pair, LikeState>,
    ) -> Result<(), StoreError> {
        let Some(watch) = self.of_likes() else { return Ok(()) };
        let is_watched = |event: &&LikeEvent| self.keys.contains(&(event.target, self.like));
        let seen: Vec<LikeEvent> = events.iter().filter(is_watched).copied().collect();
        let pairs: HashSet<Pair> = seen.iter().map(|event| (event.target, event.user)).collect();
        let former: Vec<(Pair, LikeState)> = pairs.iter().filter_map(|pair| Some((*pair, *old.get(pair)?))).collect();
        partitions::log_watched(tx, watch, &seen, &former).await
    }

    pub(super) async fn log_counts(
        &self,
        tx: &mut MySqlConnection,
        added: &[CountEvent],
        resolved: &Resolved,
    ) -> Result<(), StoreError> {
        let Some(watch) = self.watch else { return Ok(()) };
        let counted = added.iter().chain(&resolved.live).map(|count| Logged {
            number: (count.target, count.metric),
            at: count.at,
            delta: Some((count.id, count.delta)),
        });
        let set = resolved.won.iter().map(|(number, set)| Logged { number: *number, at: set.at, delta: None });
        let is_watched = |logged: &Logged| self.keys.contains(&logged.number);
        let logged: Vec<Logged> = counted.chain(set).filter(is_watched).collect();
        watches::log_counts(tx, watch, &logged).await
    }

    fn of_likes(&self) -> Option<u64> {
        self.watch.filter(|_| self.keys.iter().any(|(_, metric)| *metric == self.like))
    }
}
