//! What a batch's counts and sets do, within its transaction: the ledger keeps what was applied before away, and numbers that
//! may be set are locked and resolved (`resolve_sets`).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use sqlx::MySqlConnection;

use super::batch::{Received, distinct, entry, sums};
use super::flush::Writer;
use super::resolve_sets::{Resolved, newest, resolve};
use crate::event::CountEvent;
use crate::model::CounterKey;
use crate::store::StoreError;
use crate::store::applied_events::{self, Entry};
use crate::store::likes::Difference;
use crate::store::sets::{self, LastSet};

/// Transactions that ask the ledger after one that has found an event there.
const ASKS_AFTER_ONE: u32 = 100;

impl Writer {
    /// Notes counts and sets; gives what counters gain or lose by them, sorted by key.
    pub(super) async fn apply_counts(
        &mut self,
        tx: &mut MySqlConnection,
        received: &[Received],
    ) -> Result<Vec<Difference>, StoreError> {
        let counts = distinct(received.iter().filter_map(Received::counted));
        let sets = newest(received.iter().filter_map(Received::set));
        if counts.is_empty() && sets.is_empty() {
            return Ok(Vec::new());
        }
        let counts = self.note_counts(tx, counts).await?;
        let is_settable = |count: &CountEvent| self.rules.of(count.target.kind, count.metric).settable;
        let (settable, added) = match self.rules.has_settable() {
            true => counts.into_iter().partition(is_settable),
            false => (Vec::new(), counts),
        };
        let (resolved, differences) = self.resolve(tx, sets, settable).await?;
        self.log_watched_counts(tx, &added, &resolved).await?;
        let mut all = sums(&added);
        if !differences.is_empty() {
            all.extend(differences);
            all.sort_unstable_by_key(|difference| (difference.target, difference.metric));
        }
        Ok(all)
    }

    /// Notes counts in the ledger; gives those that were not in it. Nearly none ever is, so that is asked only once a
    /// transaction has failed, and for a while when one was: more of them may come.
    async fn note_counts(
        &mut self,
        tx: &mut MySqlConnection,
        mut counts: Vec<CountEvent>,
    ) -> Result<Vec<CountEvent>, StoreError> {
        let mut entries: Vec<Entry> = counts.iter().map(entry).collect();
        let applied = if self.asks_ledger > 0 { applied_events::applied(tx, &entries).await? } else { HashSet::new() };
        if !applied.is_empty() {
            self.asks_ledger = ASKS_AFTER_ONE;
            entries.retain(|entry| !applied.contains(entry));
            counts.retain(|count| !applied.contains(&entry(count)));
        }
        applied_events::note_applied(tx, &entries).await?;
        Ok(counts)
    }

    /// Resolves numbers that may be set, and notes what holds. All of them are locked first, in one order: another partition may
    /// write the same number.
    async fn resolve(
        &self,
        tx: &mut MySqlConnection,
        sets: BTreeMap<CounterKey, LastSet>,
        counts: Vec<CountEvent>,
    ) -> Result<(Resolved, Vec<Difference>), StoreError> {
        let counted = counts.iter().map(|count| (count.target, count.metric));
        let numbers: BTreeSet<CounterKey> = sets.keys().copied().chain(counted).collect();
        if numbers.is_empty() {
            return Ok((Resolved::default(), Vec::new()));
        }
        let numbers: Vec<CounterKey> = numbers.into_iter().collect();
        let known = sets::lock(tx, &numbers).await?;
        let resolved = resolve(&sets, counts, &known);
        let standing = sets::standing(tx, &resolved.won).await?;
        let differences = resolved.differences(&standing).ok_or(StoreError::OutOfRange("set a number"))?;
        sets::note(tx, &resolved.won, &resolved.live).await?;
        Ok((resolved, differences))
    }
}
