//! Looks whether Redis has lost counters, and has them loaded again within seconds.
//!
//! A flush, an empty replica that was promoted or an evicted bucket leave buckets without the field `_`. Some buckets are
//! looked at each time, all of them in turn; those that readers have found missing; and all at once when Redis has become
//! another one, or one master of a Cluster has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::cache::keys::KindNames;
use crate::cache::{Cache, CacheError};
use crate::config::ConfigHandle;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;

/// Buckets of each kind that one look reads a field of: some milliseconds of Redis.
const LOOKED_BUCKETS: u32 = 2_048;

/// Buckets that readers found missing, which one look takes.
const MISSING_MAX: usize = 1_000;

/// Finds out that Redis lost counters, and asks for a run that loads them.
pub struct LossDetector {
    /// Where it looks.
    pub cache: Cache,
    /// Whose buckets, and how often: zero for never.
    pub live: ConfigHandle,
    /// Set when something is lost.
    pub asked: Arc<AtomicBool>,
    /// Rung then.
    pub bell: Arc<Notify>,
}

/// What it knows from its last look.
#[derive(Default)]
struct Seen {
    data_set: Option<String>,
    next: u32,
}

impl LossDetector {
    /// Looks until the stop.
    pub async fn run(self, beat: Heartbeat, stop: CancellationToken) {
        let mut outage = Outage::new("looking at Redis");
        let mut seen = Seen::default();
        while !stop.is_cancelled() {
            let config = self.live.current();
            let every = config.reconcile.watch_every.0;
            if !every.is_zero() {
                match beat.during(self.look(&KindNames::new(&config.kinds), &mut seen)).await {
                    Ok(0) => outage.over(),
                    Ok(_) => {
                        outage.over();
                        self.asked.store(true, Ordering::Relaxed);
                        self.bell.notify_one();
                    }
                    Err(error) => drop(outage.failed(&format!("{:#}", anyhow::Error::from(error)))),
                }
            }
            beat.pause(every.max(Duration::from_secs(1)), &stop).await;
        }
    }

    /// How many buckets it finds lost, among those that readers found missing and some others.
    async fn look(&self, kinds: &KindNames, seen: &mut Seen) -> Result<u64, CacheError> {
        let data_set = self.cache.data_set().await?;
        let buckets = self.cache.keys.buckets();
        let range = if seen.data_set.as_ref() == Some(&data_set) {
            let from = if seen.next >= buckets { 0 } else { seen.next };
            from..buckets.min(from.saturating_add(LOOKED_BUCKETS))
        } else {
            0..buckets
        };
        // A hint: without it buckets are found in their turn.
        let missing = match self.cache.take_missing(kinds, MISSING_MAX).await {
            Ok(missing) => missing,
            Err(error) if seen.data_set.is_none() => {
                let error = format!("{:#}", anyhow::Error::from(error));
                warn!(event = "missing-unread", error, "what readers found missing can't be read: {error}");
                Vec::new()
            }
            Err(_) => Vec::new(),
        };
        let mut lost = 0;
        for (kind, name) in kinds.all() {
            let noted = missing.iter().filter(|(of, _)| *of == kind).map(|(_, bucket)| *bucket).collect::<Vec<_>>();
            lost += self.cache.unloaded(name, range.clone().chain(noted)).await?.lost;
        }
        *seen = Seen { data_set: Some(data_set), next: range.end };
        Ok(lost)
    }
}
