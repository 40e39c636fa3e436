//! What a batch's counts and sets do within its transaction. The ledger keeps out counts that were applied before; counters
//! that events may set are locked, and `resolve_sets` says which events hold.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use sqlx::MySqlConnection;

use super::batch::Received;
use super::event_capture::EventCapture;
use crate::config::Rules;
use tallyd_core::coalesce::{Entry, distinct, sums};
use tallyd_core::event::CountEvent;
use tallyd_core::model::{CounterKey, Difference};
use tallyd_core::resolve_sets::{LastSet, Resolved, newest, resolve};
use tallyd_mysql::{StoreError, applied_events, sets};

/// Transactions that ask the ledger after one that has found an event there.
const ASKS_AFTER_ONE: u32 = 100;

/// Applies counts and sets. Nearly no count was applied before, so the ledger is asked only after a transaction has failed,
/// and for a while after it knew an event: more of them may come.
#[derive(Default)]
pub(super) struct Counts {
    /// How many more transactions ask the ledger.
    asks_ledger: u32,
}

impl Counts {
    /// Notes counts and sets. Returns what counters gain or lose by them, sorted by key.
    pub async fn apply(
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

    /// A transaction has failed. Perhaps it met a count that was applied before, and perhaps its COMMIT was done.
    pub fn failed(&mut self) {
        self.asks_ledger = self.asks_ledger.max(1);
    }

    pub fn committed(&mut self) {
        self.asks_ledger = self.asks_ledger.saturating_sub(1);
    }

    /// Notes counts in the ledger. Returns those that were not in it.
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

/// Notes which sets and counts of settable counters hold, and what the counters gain by them. All these counters are locked
/// first, in one order: another partition may write the same one.
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
    let differences = resolved.differences(&standing).ok_or(StoreError::OutOfRange("set a number"))?;
    sets::note(tx, &resolved.won, &resolved.live).await?;
    Ok((resolved, differences))
}
