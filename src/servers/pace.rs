//! Live traffic goes first: pages are as large as their measured time allows, and wait while a server has enough to do.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::control::Control;
use crate::config::Reconcile as Limits;
use crate::partitions::InUse;
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;

/// Between two checks of a server that has too much to do.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// How often it is said that a run still waits.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The servers are checked no more often than this.
const FRESH: Duration = Duration::from_millis(200);

/// Between two checks of a replica meanwhile.
const REPLICA_CHECK_EVERY: Duration = Duration::from_millis(10);

/// Targets or rows that a page has at least.
const PAGE_MIN: usize = 100;

/// How often a run found that a server has enough to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waits {
    /// MySQL ran more threads than `threads_running_max`.
    pub threads_running: u64,
    /// Redis took longer to answer than `redis_latency_max_ms`.
    pub redis_latency: u64,
    /// A partition had more messages than `queue_depth_max`.
    pub queue_depth: u64,
    /// A replica was further behind than `max_lag`.
    pub replica_lag: u64,
}

/// The servers whose health a run minds, and by which limits.
pub(crate) struct Health<'a> {
    pub store: &'a Store,
    pub cache: &'a Cache,
    pub broker: &'a Broker,
    /// MySQL's replicas, by name.
    pub replicas: &'a [(String, Store)],
    /// Another MySQL server, whose tables the run reads.
    pub site: Option<&'a Store>,
    pub limits: &'a Limits,
    /// The run's number in `job_run`, whose time stamp is looked for on the replicas.
    pub number: u64,
}

/// Sizes a run's pages, and says when the next one can begin.
pub(crate) struct Pace<'a> {
    health: Health<'a>,
    control: &'a Control,
    stop: &'a CancellationToken,
    /// The job's name, and what logs that it waits.
    job: (&'static str, fn(&str)),
    page: usize,
    page_max: usize,
    checked: Option<Instant>,
    /// When the last page could begin, and how many targets were compared since.
    pace: (Instant, usize),
    /// Time that was spent waiting for the servers.
    waited: Duration,
    /// The last reason, in words.
    waited_for: Option<String>,
    /// How often for each reason.
    waits: Waits,
}

/// Why a run waits.
#[derive(Debug)]
struct Wait {
    count: fn(&mut Waits) -> &mut u64,
    words: String,
}

impl<'a> Pace<'a> {
    /// Pages of at most `page_max` targets or rows. `job` has the job's name, and what logs that its run waits.
    pub(crate) fn new(
        health: Health<'a>,
        control: &'a Control,
        stop: &'a CancellationToken,
        job: (&'static str, fn(&str)),
        page_max: usize,
    ) -> Self {
        Self {
            health,
            control,
            stop,
            job,
            page: page_max.min(PAGE_MIN * 10),
            page_max,
            checked: None,
            pace: (Instant::now(), 0),
            waited: Duration::ZERO,
            waited_for: None,
            waits: Waits::default(),
        }
    }

    /// How many targets the next page has.
    pub(crate) fn page(&self) -> usize {
        match self.control.targets_per_second() {
            // At least one page a second, so that a run obeys other orders soon.
            Some(each_second) => self.page.min(each_second as usize),
            None => self.page,
        }
    }

    /// Sizes the next page by the time that one of `targets` took: at most twice or half as large as it was.
    pub(crate) fn note(&mut self, targets: usize, took: Duration) {
        self.pace.1 += targets;
        // A short last page tells nothing.
        if targets < self.page / 2 {
            return;
        }
        self.page = next_page(self.page, self.health.limits.page_target_ms, took)
            .clamp(PAGE_MIN.min(self.page_max), self.page_max);
    }

    /// Waits until the servers have time for the next page, or until the stop or `until`. `show` is called with the reason while the run
    /// waits, and with `None` after that.
    pub(crate) async fn wait(
        &mut self,
        until: Option<Instant>,
        publisher: &Publisher,
        show: impl Fn(Option<&str>),
    ) -> Result<()> {
        self.keep_pace().await;
        self.pause(Duration::from_millis(self.health.limits.pause_ms)).await;
        if self.checked.is_some_and(|checked| checked.elapsed() < FRESH) {
            return Ok(());
        }
        let (job, say) = self.job;
        let began = Instant::now();
        let mut said: Option<Instant> = None;
        while let Some(found) = self.stop.run_until_cancelled(self.health.too_much(publisher)).await {
            let Some(Wait { count, words: reason }) = found? else { break };
            if said.is_none_or(|said| said.elapsed() > SAY_EVERY) {
                say(&reason);
                said = Some(Instant::now());
            }
            *count(&mut self.waits) += 1;
            show(Some(&reason));
            telemetry().jobs.waits(job, Some((WaitsFor::Pace, reason.clone())));
            self.waited_for = Some(reason);
            let stopped = self.stop.run_until_cancelled(tokio::time::sleep(CHECK_EVERY)).await.is_none();
            if stopped || until.is_some_and(|until| Instant::now() > until) {
                break;
            }
        }
        if said.is_some() {
            self.waited += began.elapsed();
            show(None);
            telemetry().jobs.waits(job, None);
        }
        self.checked = Some(Instant::now());
        Ok(())
    }

    /// How long the run has waited, how often for what, and the last reason in words.
    pub(crate) fn waited(self) -> (Duration, Waits, Option<String>) {
        (self.waited, self.waits, self.waited_for)
    }

    /// Waits until the targets of the last page have had their time, where an operator has throttled reconciles.
    async fn keep_pace(&mut self) {
        let (began, targets) = self.pace;
        if let Some(each_second) = self.control.targets_per_second() {
            self.pause(pace(targets, each_second).saturating_sub(began.elapsed())).await;
        }
        self.pace = (Instant::now(), 0);
    }

    /// Sleeps, at most until the stop.
    async fn pause(&self, pause: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }
}

impl Health<'_> {
    /// Which server has too much to do; `None` where all have time. A limit of 0 is no limit.
    async fn too_much(&self, publisher: &Publisher) -> Result<Option<Wait>> {
        let limits = self.limits;
        if limits.threads_running_max > 0 {
            let running = self.store.threads_running().await?;
            if running > limits.threads_running_max {
                let words = format!("MySQL runs {running} threads, above {}", limits.threads_running_max);
                return Ok(Some(Wait { count: |waits| &mut waits.threads_running, words }));
            }
            if let Some(site) = self.site {
                let running = site.threads_running().await?;
                if running > limits.threads_running_max {
                    let words =
                        format!("the site's MySQL runs {running} threads, above {}", limits.threads_running_max);
                    return Ok(Some(Wait { count: |waits| &mut waits.threads_running, words }));
                }
            }
        }
        if limits.redis_latency_max_ms > 0 {
            let asked = Instant::now();
            self.cache.ping().await?;
            let latency = asked.elapsed();
            if latency > Duration::from_millis(limits.redis_latency_max_ms) {
                let (latency, max) = (latency.as_millis(), limits.redis_latency_max_ms);
                let words = format!("Redis answers after {latency} ms, above {max}");
                return Ok(Some(Wait { count: |waits| &mut waits.redis_latency, words }));
            }
        }
        if limits.queue_depth_max > 0 {
            let in_use = InUse::read(self.store, self.broker).await?;
            for (_, queue) in in_use.partitions.queues() {
                let messages = u64::from(publisher.depth(queue).await?.messages);
                if messages > limits.queue_depth_max {
                    let words = format!("{queue} has {messages} messages, above {}", limits.queue_depth_max);
                    return Ok(Some(Wait { count: |waits| &mut waits.queue_depth, words }));
                }
            }
        }
        Ok(self.lagging().await?.map(|words| Wait { count: |waits| &mut waits.replica_lag, words }))
    }

    /// Which replica is too far behind: by the run's time stamp, which is written to MySQL and looked for there.
    async fn lagging(&self) -> Result<Option<String>> {
        if self.replicas.is_empty() {
            return Ok(None);
        }
        let max = self.limits.max_lag.0;
        let stamp = self.store.stamp(self.number).await?;
        for (replica, store) in self.replicas {
            let lag = match self.lag_of(store, stamp).await {
                Ok(lag) => lag,
                Err(error) => return Ok(Some(format!("the replica {replica} can't be read: {error:#}"))),
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

    /// How far a replica is behind, once it is less than `max_lag` or known to be more; `None` where it has no stamp of
    /// the run: the run has only just begun, or the replica is behind its beginning.
    async fn lag_of(&self, replica: &Store, stamp: Micros) -> Result<Option<Duration>> {
        let max = self.limits.max_lag.0;
        let asked = Instant::now();
        loop {
            let seen = replica.stamp_seen(self.number).await?;
            // The stamp that is there can be an old one of a run that was busy: only after `max` it is known that the new
            // one is late.
            let age = |seen: Micros| Duration::from_micros((stamp.0 - seen.0).max(0).unsigned_abs());
            let lag = seen.map(|seen| age(seen) + if seen < stamp { asked.elapsed() } else { Duration::ZERO });
            if lag.is_some_and(|lag| lag <= max) || asked.elapsed() > max {
                return Ok(lag);
            }
            tokio::time::sleep(REPLICA_CHECK_EVERY).await;
        }
    }
}

/// The time that so many targets take at least. One second at most, for which pages are sized: a larger page is from before the order.
fn pace(targets: usize, each_second: u32) -> Duration {
    Duration::from_secs_f64((targets as f64 / f64::from(each_second.max(1))).min(1.0))
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
    fn a_throttled_page_takes_its_time_and_never_more_than_a_second() {
        for (targets, each_second, ms) in [(0, 10, 0), (5, 10, 500), (10, 10, 1_000), (5_000, 10, 1_000), (1, 0, 1_000)]
        {
            assert_eq!(pace(targets, each_second), Duration::from_millis(ms), "{targets} at {each_second}");
        }
    }

    #[test]
    fn a_page_grows_and_shrinks_towards_its_time() {
        for (page, took_ms, next) in [(1_000, 500, 1_000), (1_000, 400, 1_250), (1_000, 10, 2_000), (1_000, 5_000, 500)]
        {
            assert_eq!(next_page(page, 500, Duration::from_millis(took_ms)), next, "{page} in {took_ms} ms");
        }
    }
}
