//! What follows a batch's commit: the count of what was consumed, and the drift that its events tell of.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tracing::{debug, warn};

use super::batch::{Batch, Received};
use super::flush::{Found, Writer, chain};
use crate::config::Writes;
use crate::model::{Micros, Number};
use crate::runtime::log::Flood;
use crate::store::likes::Difference;
use crate::vitals::vitals;

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
    drifts: Vec<(Number, i64)>,
    kept: Option<Instant>,
    /// Writes them; gives back what it couldn't.
    keeping: Option<JoinHandle<Vec<(Number, i64)>>>,
    flood: Flood,
}

impl Writer {
    /// What events say of some numbers: each one's newest event, where it says what Redis has. Of those alone that API servers
    /// count there: what the daemon counts it has counted itself.
    pub(super) fn said(&mut self, received: &[Received], differences: &[Difference]) -> Vec<(Number, Micros, i64)> {
        // A backlog is drained first: what it says of Redis is old.
        let is_spared = received.len() > SPARED_EVENTS && !self.consumed.batches.is_multiple_of(SPARED_BATCHES);
        if is_spared || received.iter().all(|received| received.count.is_none()) {
            return Vec::new();
        }
        let is_like = |difference: &Difference| difference.metric == self.metric;
        let chosen = if differences.iter().all(is_like) {
            self.sights.choose(differences)
        } else {
            let by_api = |it: &&Difference| self.rules.of(it.target.kind, it.metric).writer == Writes::Api;
            let differences: Vec<Difference> = differences.iter().filter(by_api).copied().collect();
            self.sights.choose(&differences)
        };
        let mut said: Vec<_> = received
            .iter()
            .filter_map(|Received { event, count, .. }| {
                let (number, at) = (event.number(self.metric), event.at());
                chosen.binary_search(&(number, at)).ok()?;
                Some((number, at, (*count)?))
            })
            .collect();
        said.sort_unstable_by_key(|((target, metric), at, said)| (*metric, *target, *at, *said));
        said.dedup_by_key(|(number, ..)| *number);
        said
    }

    /// Counts what was consumed, and compares what the events said with what MySQL counts.
    pub(super) async fn note(&mut self, batch: &Batch, found: &Found) {
        self.consumed.batches += 1;
        self.consumed.events += batch.events.len() as u64;
        self.consumed.rows += found.coalesced as u64;
        self.consumed.with_count += batch.events.iter().filter(|received| received.count.is_some()).count() as u64;
        for (number, at, said, counted) in &found.said {
            let Some(drift) = self.sights.note((*number, *at), *said, *counted) else { continue };
            self.consumed.drift_seen += 1;
            vitals().drift_seen.add(1);
            let config = self.live.now();
            let (target, metric) = (number.0, config.metrics.name(number.1));
            let (kind, target_id) = (config.kinds.name(target.kind), target.id.0);
            if self.seen.drifts.len() < SEEN_MAX {
                self.seen.drifts.push((*number, drift));
            }
            if let Some(seen) = self.seen.flood.note(1, Instant::now()) {
                warn!(
                    event = "drift-seen",
                    partition = self.partition,
                    kind,
                    target_id,
                    metric,
                    drift,
                    seen,
                    "events say that Redis has {drift:+} on {kind}:{target_id} ({metric}); the next reconcile looks there first"
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
        drifts.sort_unstable_by_key(|((target, metric), drift)| (*metric, *target, *drift));
        let (store, partition) = (self.store.clone(), self.partition);
        seen.keeping = Some(tokio::spawn(async move {
            let mut unkept = Vec::new();
            for alike in drifts.chunk_by(|((_, a), _), ((_, b), _)| a == b) {
                let Some(((_, metric), _)) = alike.first() else { continue };
                let targets: Vec<_> = alike.iter().map(|((target, _), drift)| (*target, *drift)).collect();
                if let Err(error) = store.keep_drift_seen(*metric, &targets).await {
                    debug!(event = "drift-not-kept", partition, "{}", chain(&error));
                    unkept.extend_from_slice(alike);
                }
            }
            unkept
        }));
    }
}
