//! What a partition has consumed, said once a minute while anything comes.

use std::time::{Duration, Instant};

use tracing::info;

use super::batch::Batch;

/// How often it is said.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Since it was last said.
#[derive(Default)]
pub(super) struct Consumed {
    said: Option<Instant>,
    batches: u64,
    events: u64,
    rows: u64,
}

impl Consumed {
    /// Counts a batch that was committed as so many rows, and logs the sum if it is time.
    pub(super) fn note(&mut self, partition: u16, batch: &Batch, rows: usize) {
        self.batches += 1;
        self.events += batch.events.len() as u64;
        self.rows += rows as u64;
        self.say(partition, Instant::now());
    }

    fn say(&mut self, partition: u16, now: Instant) {
        let said = *self.said.get_or_insert(now);
        if now.duration_since(said) < SAY_EVERY {
            return;
        }
        let Self { batches, events, rows, .. } = *self;
        let seconds = now.duration_since(said).as_secs();
        info!(
            event = "consumed",
            partition,
            events,
            batches,
            rows,
            seconds,
            "{events} events in {batches} batches became {rows} rows in {seconds} s"
        );
        *self = Self { said: Some(now), ..Self::default() };
    }
}
