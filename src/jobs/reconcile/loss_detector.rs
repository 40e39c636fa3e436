//! Checks whether Redis lost counters, and requests a run that loads them within seconds.
//!
//! A lost bucket (by a flush, the promotion of an empty replica, or an eviction) has no field `_`. Each check reads the
//! next group of buckets, and those that readers reported as missing. It reads all buckets if Redis, or one master of a
//! Redis Cluster, has a different data set than at the last check.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use tallyd_base::config::ConfigHandle;
use tallyd_base::jobs::Request;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::retry::Outage;
use tallyd_redis::keys::KindNames;
use tallyd_redis::{Cache, CacheError};

/// Of each kind, one field per bucket. This takes Redis a few milliseconds.
const CHECKED_BUCKETS: u32 = 2_048;

const MISSING_MAX: usize = 1_000;

pub(crate) struct LossDetector {
    pub cache: Cache,
    pub live: ConfigHandle,
    pub request: Request,
}

#[derive(Default)]
struct LastCheck {
    data_set: Option<String>,
    next: u32,
}

impl LossDetector {
    pub(crate) async fn run(self, beat: Heartbeat, stop: CancellationToken) {
        let mut outage = Outage::new("checking Redis for lost buckets");
        let mut last = LastCheck::default();
        while !stop.is_cancelled() {
            let config = self.live.current();
            let every = config.reconcile.watch_every.0;
            if !every.is_zero() {
                match beat.during(self.check(&KindNames::new(&config.kinds), &mut last)).await {
                    Ok(0) => outage.over(),
                    Ok(_) => {
                        outage.over();
                        self.request.make();
                    }
                    Err(error) => drop(outage.failed(&format!("{:#}", anyhow::Error::from(error)))),
                }
            }
            beat.pause(every.max(Duration::from_secs(1)), &stop).await;
        }
    }

    async fn check(&self, kinds: &KindNames, last: &mut LastCheck) -> Result<u64, CacheError> {
        let data_set = self.cache.data_set().await?;
        let buckets = self.cache.keys.buckets();
        let range = if last.data_set.as_ref() == Some(&data_set) {
            let from = if last.next >= buckets { 0 } else { last.next };
            from..buckets.min(from.saturating_add(CHECKED_BUCKETS))
        } else {
            0..buckets
        };
        // Only a hint. Without it, a lost bucket is found when the checks reach it.
        let missing = match self.cache.take_missing(kinds, MISSING_MAX).await {
            Ok(missing) => missing,
            Err(error) if last.data_set.is_none() => {
                let error = format!("{:#}", anyhow::Error::from(error));
                warn!(
                    event = "missing-unread",
                    error, "the list of the buckets that are missing in Redis cannot be read: {error}"
                );
                Vec::new()
            }
            Err(_) => Vec::new(),
        };
        let mut lost = 0;
        for (kind, name) in kinds.all() {
            let noted = missing.iter().filter(|(of, _)| *of == kind).map(|(_, bucket)| *bucket).collect::<Vec<_>>();
            lost += self.cache.unloaded(name, range.clone().chain(noted)).await?.lost;
        }
        *last = LastCheck { data_set: Some(data_set), next: range.end };
        Ok(lost)
    }
}
