//! The rows of likes and unlikes. The newest event per (target, user) is written, and what the counters gain is computed from the
//! rows' old states.

use sqlx::MySqlConnection;

use super::batch::Received;
use super::event_capture::EventCapture;
use tallyd_core::coalesce::{Before, Pair, State, before, coalesce, differences};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Difference, Metric};
use tallyd_mysql::{StoreError, likes};

/// Writes the rows of likes.
pub(super) struct LikeRows {
    metric: Metric,
    /// Old states are read before rows are written: the slower way, for servers that cannot do the faster one.
    reads_first: bool,
}

/// What the rows of a batch have become.
pub(super) struct Written {
    /// How many rows its events came down to.
    pub rows: usize,
    /// What the counters gain or lose, sorted by key.
    pub differences: Vec<Difference>,
}

impl LikeRows {
    pub fn new(metric: Metric, reads_first: bool) -> Self {
        Self { metric, reads_first }
    }

    /// Falls back to the slower way if the server cannot do the faster one. Returns whether that is new.
    pub fn falls_back(&mut self, error: &StoreError) -> bool {
        let is_new = !self.reads_first && error.is_unsupported();
        self.reads_first |= is_new;
        is_new
    }

    pub async fn write(
        &self,
        tx: &mut MySqlConnection,
        received: &[Received],
        capture: &EventCapture,
    ) -> Result<Written, StoreError> {
        let events: Vec<LikeEvent> = received.iter().filter_map(Received::like).collect();
        let winners = coalesce(&events);
        let before = if self.reads_first || capture.has_likes() {
            write_reading(tx, &winners, &events, capture).await?
        } else {
            likes::upsert(tx, &winners).await?.ok_or(StoreError::Unsupported("user variables"))?
        };
        Ok(Written { rows: winners.len(), differences: differences(self.metric, &winners, &before) })
    }
}

/// Writes rows by reading their old states first, and logs the events of watched targets.
async fn write_reading(
    tx: &mut MySqlConnection,
    winners: &[(Pair, State)],
    events: &[LikeEvent],
    capture: &EventCapture,
) -> Result<Vec<Before>, StoreError> {
    let pairs: Vec<Pair> = winners.iter().map(|(pair, _)| *pair).collect();
    let old = likes::old_states(tx, &pairs).await?;
    let before = before(winners, &old);
    let those = |wanted: fn(&Before) -> bool| -> Vec<(Pair, State)> {
        winners.iter().zip(&before).filter(|(_, before)| wanted(before)).map(|(winner, _)| *winner).collect()
    };
    likes::insert_states(tx, &those(|before| *before == Before::Absent)).await?;
    likes::update_states(tx, &those(|before| matches!(before, Before::Older(_)))).await?;
    capture.log_likes(tx, events, &old).await?;
    Ok(before)
}
