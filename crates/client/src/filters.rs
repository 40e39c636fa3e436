//! Remembers the shapes of Bloom filters, so that the client can send a user's bits with a call, and whether the
//! filters can be used now.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tracing::debug;

use super::gateway::HINT_MAX;
use tallyd_core::chain::Chain;
use tallyd_core::model::Target;
use tallyd_mysql::Store;
use tallyd_redis::Cache;
use tallyd_redis::bloom::Shape;
use tallyd_redis::recent::Seen;

/// The maximum number of filter shapes that the client remembers, one per target. These shapes need about 5 MB. At this
/// limit the client forgets all shapes, and learns them again.
const SHAPES_MAX: usize = 100_000;

/// How long the epoch is cached. Until this time has passed after a failover, the client may wrongly trust a filter
/// that lost likes.
const EPOCH_KEPT: Duration = Duration::from_secs(1);

/// How long the state of the outbox is cached.
const OUTBOX_KEPT: Duration = Duration::from_secs(1);

/// The outbox is behind if a row of this age has not been added. Daemons record their progress once a second.
const OUTBOX_LAG_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct Filters {
    /// The last known shape of each target's filter. If a shape is outdated, Redis answers with the filter's new shape.
    shapes: Mutex<HashMap<Target, Shape>>,
    epoch: Mutex<Option<(Instant, String)>>,
    /// Whether the outbox was up to date, and when MySQL said so. A call holds the lock while it asks MySQL.
    up_to_date: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

impl Filters {
    fn shape(&self, target: Target) -> Option<Shape> {
        self.shapes.lock().unwrap_or_else(PoisonError::into_inner).get(&target).copied()
    }

    pub(super) fn shapes(&self, targets: &[Target]) -> Vec<(Target, Option<Shape>)> {
        targets.iter().map(|target| (*target, self.shape(*target))).collect()
    }

    pub(super) fn learn(&self, targets: &[Target], seen: &[Seen]) {
        let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
        for (target, seen) in targets.iter().zip(seen) {
            let Seen::Unknown(Some(shape)) = seen else { continue };
            if shapes.len() >= SHAPES_MAX && !shapes.contains_key(target) {
                shapes.clear();
            }
            shapes.insert(*target, *shape);
        }
    }

    /// Returns the epoch of the trusted filters. Returns an empty text if no filter is trusted, or if Redis fails to
    /// answer.
    pub(super) async fn epoch(&self, cache: &Cache) -> String {
        let now = Instant::now();
        if let Some((read, epoch)) = &*self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
            && now.duration_since(*read) < EPOCH_KEPT
        {
            return epoch.clone();
        }
        let epoch = cache.filter_epoch().await.unwrap_or_else(|error| {
            debug!(event = "filters-unknown", "{}", Chain(&error));
            String::new()
        });
        *self.epoch.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, epoch.clone()));
        epoch
    }

    /// Returns whether the filters have all likes that the daemon has committed, apart from the last seconds. Returns
    /// false if MySQL fails to answer.
    pub(super) async fn are_up_to_date(&self, store: &Store) -> bool {
        let mut known = self.up_to_date.lock().await;
        if let Some((read, are_up_to_date)) = *known
            && read.elapsed() < OUTBOX_KEPT
        {
            return are_up_to_date;
        }
        // This is recorded first, because the caller's time limit can end this call. Then the next calls must not wait.
        *known = Some((Instant::now(), false));
        let asked = timeout(HINT_MAX, store.outbox_is_behind(OUTBOX_LAG_MAX)).await;
        let are_up_to_date = matches!(asked, Ok(Ok(false)));
        *known = Some((Instant::now(), are_up_to_date));
        are_up_to_date
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_core::model::{Kind, TargetId};

    #[test]
    fn what_is_known_of_filters_has_a_bound() {
        let filters = Filters::default();
        let target = |id: usize| Target { kind: Kind(1), id: TargetId(id as u64) };
        let shape = Shape { size: 1, iterations: 1 };
        for id in 0..=SHAPES_MAX {
            filters.learn(&[target(id)], &[Seen::Unknown(Some(shape))]);
        }
        assert_eq!(filters.shape(target(0)), None);
        assert_eq!(filters.shape(target(SHAPES_MAX)), Some(shape));
    }
}
