//! The shapes of Bloom filters, so that a like can pass the user's bits, and notes of likes that pass no bits.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tallyd_core::model::{Target, UserId};
use tallyd_redis::bloom::Shape;
use tallyd_redis::{Cache, Call};

use super::{ApiServer, NOTE_BESIDE, Result, is_of_a_moving_slot};

/// How long the epoch is cached.
const EPOCH_KEPT: Duration = Duration::from_secs(1);

/// The number of seconds for which Redis keeps the note about a user if the target has no filter.
const NOTED_S: u64 = 7 * 86_400;

#[derive(Default)]
pub(super) struct Shapes {
    /// The last known shape of each target's filter. If a shape is outdated, Redis answers with the filter's new shape.
    shapes: Mutex<HashMap<Target, Shape>>,
    /// The trusted epoch, and when Redis returned it.
    epoch: Mutex<Option<(Instant, String)>>,
}

impl Shapes {
    pub(super) fn get(&self, target: Target) -> Option<Shape> {
        self.shapes.lock().unwrap_or_else(PoisonError::into_inner).get(&target).copied()
    }

    pub(super) fn learn(&self, target: Target, shape: Shape) {
        self.shapes.lock().unwrap_or_else(PoisonError::into_inner).insert(target, shape);
    }

    /// Returns the epoch of the trusted filters. Returns an empty text if no filter is trusted, or if Redis fails to
    /// answer.
    pub(super) async fn epoch(&self, cache: &Cache) -> String {
        let known = self.epoch.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((read, epoch)) = known
            && read.elapsed() < EPOCH_KEPT
        {
            return epoch;
        }
        let epoch = cache.filter_epoch().await.unwrap_or_default();
        *self.epoch.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), epoch.clone()));
        epoch
    }
}

impl ApiServer {
    /// Adds the user to the target's set of noted users, because the like passes no keys of the filter.
    pub(super) async fn note_beside_filter(&self, kind: &str, target: Target, user: UserId) -> Result<()> {
        const ACTION: &str = "note who likes a target";
        let [_, config, added] = self.cache.keys.filter(kind, target);
        let call = || Call::new(&NOTE_BESIDE, added.clone()).number(user).number(NOTED_S);
        match self.cache.eval(ACTION, &[call().key(config)]).await {
            Err(error) if is_of_a_moving_slot(&error) => self.cache.eval(ACTION, &[call()]).await?,
            noted => noted?,
        };
        Ok(())
    }
}
