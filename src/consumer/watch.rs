//! What is logged of watched numbers, for a reconcile that wants their values as of an instant.

use std::collections::{HashMap, HashSet};

use sqlx::MySqlConnection;

use super::flush::Writer;
use super::resolve_sets::Resolved;
use crate::event::{CountEvent, LikeEvent};
use crate::model::{CounterKey, Metric};
use crate::store::likes::{Pair, State};
use crate::store::watches::{self, Logged};
use crate::store::{StoreError, partitions};

/// The watch that was last read.
#[derive(Default)]
pub(super) struct Watch {
    number: Option<u64>,
    numbers: HashSet<CounterKey>,
}

impl Watch {
    /// The watch's number, where it is of any target's likes.
    pub fn of_likes(&self, like: Metric) -> Option<u64> {
        self.number.filter(|_| self.numbers.iter().any(|(_, metric)| *metric == like))
    }
}

impl Writer {
    /// Learns what the watch of that number is of, unless it is known. Its targets were noted before the watch was.
    pub(super) async fn learn_watch(&mut self, tx: &mut MySqlConnection, watch: Option<u64>) -> Result<(), StoreError> {
        if self.watch.number == watch {
            return Ok(());
        }
        self.watch = Watch::default();
        if let Some(number) = watch {
            let numbers = partitions::watched_numbers(tx, number).await?.into_iter().collect();
            self.watch = Watch { number: watch, numbers };
        }
        Ok(())
    }

    /// Logs each like event of a watched target, also those that coalescing or a newer row made void, with the row's former
    /// state: with them the reconciler knows the value as of any instant.
    pub(super) async fn log_watched_likes(
        &self,
        tx: &mut MySqlConnection,
        number: u64,
        events: &[LikeEvent],
        old: &HashMap<Pair, State>,
    ) -> Result<(), StoreError> {
        let is_watched = |event: &&LikeEvent| self.watch.numbers.contains(&(event.target, self.metric));
        let seen: Vec<LikeEvent> = events.iter().filter(is_watched).copied().collect();
        let pairs: HashSet<Pair> = seen.iter().map(|event| (event.target, event.user)).collect();
        let former: Vec<(Pair, State)> = pairs.iter().filter_map(|pair| Some((*pair, *old.get(pair)?))).collect();
        partitions::log_watched(tx, number, &seen, &former).await
    }

    /// Logs what changes watched numbers that are not likes: counts that are applied, and sets that win.
    pub(super) async fn log_watched_counts(
        &self,
        tx: &mut MySqlConnection,
        added: &[CountEvent],
        resolved: &Resolved,
    ) -> Result<(), StoreError> {
        let Some(watch) = self.watch.number else { return Ok(()) };
        let counted = added.iter().chain(&resolved.live).map(|count| Logged {
            number: (count.target, count.metric),
            at: count.at,
            delta: Some((count.id, count.delta)),
        });
        let set = resolved.won.iter().map(|(number, set)| Logged { number: *number, at: set.at, delta: None });
        let is_watched = |logged: &Logged| self.watch.numbers.contains(&logged.number);
        let logged: Vec<Logged> = counted.chain(set).filter(is_watched).collect();
        watches::log_counts(tx, watch, &logged).await
    }
}
