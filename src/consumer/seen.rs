//! What follows a batch's commit: the count of what was consumed, and the drift that its events tell of.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tracing::{debug, warn};

use super::batch::{Batch, Received};
use super::flush::{Found, Writer, chain};
use crate::event::LikeEvent;
use crate::model::{Micros, Target};
use crate::runtime::log::Flood;
use crate::store::likes::Difference;

/// Of batches with more events than this, most compare nothing.
const SPARED_EVENTS: usize = 2_000;

/// One of so many large batches compares.
const SPARED_BATCHES: u64 = 16;

/// Drifts that wait to be kept, at most.
const SEEN_MAX: usize = 1_000;

/// How often they are kept.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// Drifts that were seen, and are not kept yet.
#[derive(Default)]
pub(super) struct Seen {
    drifts: Vec<(Target, i64)>,
    kept: Option<Instant>,
    /// Writes them; gives back what it couldn't.
    keeping: Option<JoinHandle<Vec<(Target, i64)>>>,
    flood: Flood,
}

impl Writer {
    /// What events say of some targets' numbers: each target's newest one, where it carries a number.
    pub(super) fn said(&mut self, received: &[Received], differences: &[Difference]) -> Vec<(Target, Micros, i64)> {
        // A backlog is drained first: what it says of Redis is old.
        let is_spared = received.len() > SPARED_EVENTS && !self.consumed.batches.is_multiple_of(SPARED_BATCHES);
        if is_spared || received.iter().all(|received| received.count.is_none()) {
            return Vec::new();
        }
        let chosen = self.sights.choose(differences);
        let mut said: Vec<_> = received
            .iter()
            .filter_map(|received| {
                let LikeEvent { target, at, .. } = received.like()?;
                chosen.binary_search(&(target, at)).ok()?;
                Some((target, at, received.count?))
            })
            .collect();
        said.sort_unstable();
        said.dedup_by_key(|(target, ..)| *target);
        said
    }

    /// Counts what was consumed, and compares what the events said with what MySQL counts.
    pub(super) async fn note(&mut self, batch: &Batch, found: &Found) {
        self.consumed.batches += 1;
        self.consumed.events += batch.events.len() as u64;
        self.consumed.rows += found.coalesced as u64;
        self.consumed.with_count += batch.events.iter().filter(|received| received.count.is_some()).count() as u64;
        for (target, at, said, counted) in &found.said {
            let Some(drift) = self.sights.note((*target, *at), *said, *counted) else { continue };
            self.consumed.drift_seen += 1;
            let (kind, target_id) = (self.kinds.name(target.kind), target.id.0);
            if self.seen.drifts.len() < SEEN_MAX {
                self.seen.drifts.push((*target, drift));
            }
            if let Some(seen) = self.seen.flood.note(1, Instant::now()) {
                warn!(
                    event = "drift-seen",
                    partition = self.partition,
                    kind,
                    target_id,
                    drift,
                    seen,
                    "events say that Redis has {drift:+} on {kind}:{target_id}; the next reconcile looks there first"
                );
            }
        }
        self.keep_seen().await;
        self.consumed.say(self.partition, Instant::now());
    }

    /// Once a second at most, and beside the batches: a site where all is wrong must not be slow, too.
    async fn keep_seen(&mut self) {
        let seen = &mut self.seen;
        if seen.keeping.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(kept) = seen.keeping.take()
        {
            // What was not kept is tried again.
            seen.drifts.extend(kept.await.unwrap_or_default());
            seen.drifts.truncate(SEEN_MAX);
        }
        let soon = seen.kept.is_some_and(|kept| kept.elapsed() < KEEP_EVERY);
        if seen.drifts.is_empty() || soon || seen.keeping.is_some() {
            return;
        }
        seen.kept = Some(Instant::now());
        let mut drifts = std::mem::take(&mut seen.drifts);
        drifts.sort_unstable();
        let (store, metric, partition) = (self.store.clone(), self.metric, self.partition);
        seen.keeping = Some(tokio::spawn(async move {
            let Err(error) = store.keep_drift_seen(metric, &drifts).await else { return Vec::new() };
            debug!(event = "drift-not-kept", partition, "{}", chain(&error));
            drifts
        }));
    }
}
