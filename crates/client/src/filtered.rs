//! Remembers the shapes of Bloom filters, so the client can send a user's bits with a call.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::debug;

use super::{Client, Result};
use tallyd_core::chain::Chain;
use tallyd_core::model::{Target, UserId};
use tallyd_redis::Cache;
use tallyd_redis::bloom::Shape;
use tallyd_redis::recent::Seen;

/// The maximum number of filter shapes that the client remembers, one per target. These shapes need about 5 MB. At this
/// limit the client forgets all shapes, and learns them again.
const SHAPES_MAX: usize = 100_000;

/// How long the epoch is cached. Until this time has passed after a failover, the client may wrongly trust a filter
/// that lost likes.
const EPOCH_KEPT: Duration = Duration::from_secs(1);

/// The known filters.
#[derive(Default)]
pub(super) struct Shapes {
    /// The last known shape of each target's filter. If a shape is outdated, Redis answers with the filter's new shape.
    shapes: Mutex<HashMap<Target, Shape>>,
    /// The trusted epoch, and when Redis returned it.
    epoch: Mutex<Option<(Instant, String)>>,
}

impl Shapes {
    pub(crate) fn get(&self, target: Target) -> Option<Shape> {
        self.shapes.lock().unwrap_or_else(PoisonError::into_inner).get(&target).copied()
    }

    pub(crate) fn learn(&self, target: Target, shape: Shape) {
        let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
        if shapes.len() >= SHAPES_MAX && !shapes.contains_key(&target) {
            shapes.clear();
        }
        shapes.insert(target, shape);
    }

    /// Returns the epoch of the trusted filters. Returns an empty text if no filter is trusted, or if Redis fails to
    /// answer.
    pub(crate) async fn epoch(&self, cache: &Cache) -> String {
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
}

impl Client {
    /// For each target, returns whether the user likes it, or `None` if Redis does not know.
    pub(super) async fn known_to_redis(&self, user: UserId, targets: &[Target]) -> Result<Vec<Option<bool>>> {
        let seen = match &self.shapes {
            None => self.cache.recent_likes(&self.names, user, targets).await?,
            Some(shapes) => {
                let asked: Vec<(Target, Option<Shape>)> =
                    targets.iter().map(|target| (*target, shapes.get(*target))).collect();
                let epoch = shapes.epoch(&self.cache).await;
                let seen = self.cache.filtered_likes(&self.names, user, &epoch, &asked).await?;
                for (target, seen) in targets.iter().zip(&seen) {
                    if let Seen::Unknown(Some(shape)) = seen {
                        shapes.learn(*target, *shape);
                    }
                }
                seen
            }
        };
        Ok(seen.into_iter().map(|seen| if let Seen::Known(liked) = seen { Some(liked) } else { None }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_core::model::{Kind, TargetId};

    #[test]
    fn what_is_known_of_filters_has_a_bound() {
        let shapes = Shapes::default();
        let target = |id: usize| Target { kind: Kind(1), id: TargetId(id as u64) };
        for id in 0..=SHAPES_MAX {
            shapes.learn(target(id), Shape { size: 1, iterations: 1 });
        }
        assert_eq!(shapes.get(target(0)), None);
        assert_eq!(shapes.get(target(SHAPES_MAX)), Some(Shape { size: 1, iterations: 1 }));
    }
}
