//! Live traffic goes first: pages are as large as their measured time allows, and wait while a server has enough to do.

use std::time::{Duration, Instant};

use anyhow::Result;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::broker::Publisher;
use crate::config::Reconcile as Limits;
use crate::model::Micros;
use crate::telemetry::{WaitsFor, telemetry};

use super::Reconciler;
use super::report::Waits;

/// Between two looks at a server that has too much to do.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often it is said that a run still waits.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The servers are looked at no more often than this.
const FRESH: Duration = Duration::from_millis(200);

/// Between two looks at a replica meanwhile.
const REPLICA_LOOK: Duration = Duration::from_millis(10);

/// Targets that a page has at least.
const PAGE_MIN: usize = 100;

/// How fast a run goes.
pub(super) struct Throttle {
    run: u64,
    page: usize,
    looked: Option<Instant>,
    /// Time that was spent waiting for the servers.
    pub waited: Duration,
    /// The last reason, in words.
    pub waited_for: Option<String>,
    /// How often for each.
    pub waits: Waits,
}

/// Why a run waits.
#[derive(Debug)]
struct Wait {
    count: fn(&mut Waits) -> &mut u64,
    words: String,
}

impl Throttle {
    pub fn new(run: u64, limits: &Limits) -> Self {
        let page = limits.page_targets.min(PAGE_MIN * 10);
        Self { run, page, looked: None, waited: Duration::ZERO, waited_for: None, waits: Waits::default() }
    }

    /// How many targets the next page has.
    pub fn page(&self) -> usize {
        self.page
    }

    /// Sizes the next page by the time that one of `targets` took: at most twice or half as large as it was.
    pub fn note(&mut self, limits: &Limits, targets: usize, took: Duration) {
        // A short last page tells nothing.
        if targets < self.page / 2 {
            return;
        }
        self.page = next_page(self.page, limits.page_target_ms, took)
            .clamp(PAGE_MIN.min(limits.page_targets), limits.page_targets);
    }

    /// Returns when the servers have time for the next page, at the stop, or after `until`. `show` is told why it waits,
    /// and nothing when it doesn't any longer.
    pub async fn wait(
        &mut self,
        on: &Reconciler,
        publisher: &Publisher,
        stop: &CancellationToken,
        until: Option<Instant>,
        show: impl Fn(Option<&str>),
    ) -> Result<()> {
        stop.run_until_cancelled(tokio::time::sleep(Duration::from_millis(on.limits.pause_ms))).await;
        if self.looked.is_some_and(|looked| looked.elapsed() < FRESH) {
            return Ok(());
        }
        let began = Instant::now();
        let mut said: Option<Instant> = None;
        while let Some(found) = stop.run_until_cancelled(self.too_much(on, publisher)).await {
            let Some(Wait { count, words: reason }) = found? else { break };
            if said.is_none_or(|said| said.elapsed() > SAY_EVERY) {
                info!(event = "reconcile-waiting", reason, "waiting, live traffic goes first: {reason}");
                said = Some(Instant::now());
            }
            *count(&mut self.waits) += 1;
            show(Some(&reason));
            telemetry().jobs.waits(super::JOB, Some((WaitsFor::Pace, reason.clone())));
            self.waited_for = Some(reason);
            let stopped = stop.run_until_cancelled(tokio::time::sleep(LOOK_EVERY)).await.is_none();
            if stopped || until.is_some_and(|until| Instant::now() > until) {
                break;
            }
        }
        if said.is_some() {
            self.waited += began.elapsed();
            show(None);
            telemetry().jobs.waits(super::JOB, None);
        }
        self.looked = Some(Instant::now());
        Ok(())
    }

    /// What a server has too much of; none where all have time. A limit of 0 is none.
    async fn too_much(&self, on: &Reconciler, publisher: &Publisher) -> Result<Option<Wait>> {
        let limits = &on.limits;
        if limits.threads_running_max > 0 {
            let running = on.store.threads_running().await?;
            if running > limits.threads_running_max {
                let words = format!("MySQL runs {running} threads, above {}", limits.threads_running_max);
                return Ok(Some(Wait { count: |waits| &mut waits.threads_running, words }));
            }
        }
        if limits.redis_latency_max_ms > 0 {
            let asked = Instant::now();
            on.cache.ping().await?;
            let latency = asked.elapsed();
            if latency > Duration::from_millis(limits.redis_latency_max_ms) {
                let (latency, max) = (latency.as_millis(), limits.redis_latency_max_ms);
                let words = format!("Redis answers after {latency} ms, above {max}");
                return Ok(Some(Wait { count: |waits| &mut waits.redis_latency, words }));
            }
        }
        if limits.queue_depth_max > 0 {
            for partition in 0..on.broker.partitions() {
                let queue = on.broker.queue(partition);
                let messages = u64::from(publisher.depth(&queue).await?.messages);
                if messages > limits.queue_depth_max {
                    let words = format!("{queue} has {messages} messages, above {}", limits.queue_depth_max);
                    return Ok(Some(Wait { count: |waits| &mut waits.queue_depth, words }));
                }
            }
        }
        Ok(self.lagging(on).await?.map(|words| Wait { count: |waits| &mut waits.replica_lag, words }))
    }

    /// Which replica is too far behind: by the run's time stamp, which is written to MySQL and looked for there.
    async fn lagging(&self, on: &Reconciler) -> Result<Option<String>> {
        let max = on.limits.max_lag.0;
        let written = if on.replicas.is_empty() { None } else { Some(on.store.stamp(self.run).await?) };
        let Some(stamp) = written else { return Ok(None) };
        for (replica, store) in &on.replicas {
            let asked = Instant::now();
            let lag = loop {
                let seen = match store.stamp_seen(self.run).await {
                    Ok(seen) => seen,
                    Err(error) => {
                        let error = anyhow::Error::from(error);
                        return Ok(Some(format!("the replica {replica} can't be read: {error:#}")));
                    }
                };
                // A run without a stamp there has only just begun, or the replica is behind its beginning. The stamp that is
                // there may be an old one of a run that was busy: only after `max` it is known that the new one is late.
                let age = |seen: Micros| Duration::from_micros((stamp.0 - seen.0).max(0).unsigned_abs());
                let lag = seen.map(|seen| age(seen) + if seen < stamp { asked.elapsed() } else { Duration::ZERO });
                if lag.is_some_and(|lag| lag <= max) || asked.elapsed() > max {
                    break lag;
                }
                tokio::time::sleep(REPLICA_LOOK).await;
            };
            let behind = match lag {
                Some(lag) if lag <= max => continue,
                Some(lag) => format!("{:.1} s", lag.as_secs_f32()),
                None => "from before this run".to_owned(),
            };
            return Ok(Some(format!("the replica {replica} is behind: {behind}, above {:.1} s", max.as_secs_f32())));
        }
        Ok(None)
    }
}

/// The size that would have taken `target_ms`, at most twice or half of `page`.
fn next_page(page: usize, target_ms: u64, took: Duration) -> usize {
    let took_us = took.as_micros().max(1);
    let wanted = page as u128 * u128::from(target_ms) * 1_000 / took_us;
    usize::try_from(wanted).unwrap_or(usize::MAX).clamp(page / 2, page * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_grows_and_shrinks_towards_its_time() {
        for (page, took_ms, next) in [(1_000, 500, 1_000), (1_000, 400, 1_250), (1_000, 10, 2_000), (1_000, 5_000, 500)]
        {
            assert_eq!(next_page(page, 500, Duration::from_millis(took_ms)), next, "{page} in {took_ms} ms");
        }
    }
}
