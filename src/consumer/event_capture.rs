//! Logs the events of targets that a reconcile watches, so that it knows their values as of any instant.

use std::collections::{HashMap, HashSet};

use sqlx::MySqlConnection;

use tallyd_core::coalesce::{Pair, State};
use tallyd_core::event::{CountEvent, LikeEvent};
use tallyd_core::model::{CounterKey, Metric};
use tallyd_core::resolve_sets::Resolved;
use tallyd_mysql::watches::{self, Logged};
use tallyd_mysql::{StoreError, partitions};

/// The watch that was last read, and what it is of.
pub(super) struct EventCapture {
    /// The metric of likes.
    like: Metric,
    watch: Option<u64>,
    keys: HashSet<CounterKey>,
}

impl EventCapture {
    pub fn new(like: Metric) -> Self {
        Self { like, watch: None, keys: HashSet::new() }
    }

    /// Reads which counters `watch` is of, unless they are known. They were noted before the watch began.
    pub async fn refresh(&mut self, tx: &mut MySqlConnection, watch: Option<u64>) -> Result<(), StoreError> {
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

    /// Whether likes are captured, so that the rows' former states must be read in full.
    pub fn has_likes(&self) -> bool {
        self.of_likes().is_some()
    }

    /// Logs each like event of a watched target with the row's former state, also those that coalescing or a newer row
    /// made void.
    pub async fn log_likes(
        &self,
        tx: &mut MySqlConnection,
        events: &[LikeEvent],
        old: &HashMap<Pair, State>,
    ) -> Result<(), StoreError> {
        let Some(watch) = self.of_likes() else { return Ok(()) };
        let is_watched = |event: &&LikeEvent| self.keys.contains(&(event.target, self.like));
        let seen: Vec<LikeEvent> = events.iter().filter(is_watched).copied().collect();
        let pairs: HashSet<Pair> = seen.iter().map(|event| (event.target, event.user)).collect();
        let former: Vec<(Pair, State)> = pairs.iter().filter_map(|pair| Some((*pair, *old.get(pair)?))).collect();
        partitions::log_watched(tx, watch, &seen, &former).await
    }

    /// Logs changes of watched counters that are not likes: counts that are applied, and sets that win.
    pub async fn log_counts(
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

    /// The watch, if it is of any target's likes.
    fn of_likes(&self) -> Option<u64> {
        self.watch.filter(|_| self.keys.iter().any(|(_, metric)| *metric == self.like))
    }
}
