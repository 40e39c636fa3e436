//! Live traffic goes first: pages are as large as their measured time allows, and wait while a server has enough to do.

use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use super::context::{JOB, RunContext};
use super::report::{Report, Waits};
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_rabbitmq::Publisher;

/// Between two checks of a server that has too much to do.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// How often it is said that a run still waits.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The servers are checked no more often than this.
const FRESH: Duration = Duration::from_millis(200);

/// Between two checks of a replica meanwhile.
const REPLICA_CHECK_EVERY: Duration = Duration::from_millis(10);

/// Targets that a page has at least.
const PAGE_MIN: usize = 100;

/// Sizes a run's pages, and says when the next one can begin.
pub(super) struct Throttle<'a> {
    run: &'a RunContext<'a>,
    page: usize,
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

impl<'a> Throttle<'a> {
    pub(super) fn new(run: &'a RunContext<'a>) -> Self {
        let page = run.servers.limits.page_targets.min(PAGE_MIN * 10);
        Self {
            run,
            page,
            checked: None,
            pace: (Instant::now(), 0),
            waited: Duration::ZERO,
            waited_for: None,
            waits: Waits::default(),
        }
    }

    /// How many targets the next page has.
    pub(super) fn page(&self) -> usize {
        match self.run.servers.control.targets_per_second() {
            // At least one page a second, so that a run obeys other orders soon.
            Some(each_second) => self.page.min(each_second as usize),
            None => self.page,
        }
    }

    /// Sizes the next page by the time that one of `targets` took: at most twice or half as large as it was.
    pub(super) fn note(&mut self, targets: usize, took: Duration) {
        self.pace.1 += targets;
        // A short last page tells nothing.
        if targets < self.page / 2 {
            return;
        }
        let limits = &self.run.servers.limits;
        self.page = next_page(self.page, limits.page_target_ms, took)
            .clamp(PAGE_MIN.min(limits.page_targets), limits.page_targets);
    }

    /// Waits until the servers have time for the next page, or until the stop or the run's deadline. A run that others
    /// wait for gives up after its `wait_max`.
    pub(super) async fn wait(&mut self, publisher: &Publisher) -> Result<()> {
        let early_end = &self.run.early_end;
        if early_end.gave_up() {
            return Ok(());
        }
        let patience = self.run.options.wait_max.map(|max| Instant::now() + max);
        let until = early_end.deadline().into_iter().chain(patience).min();
        self.keep_pace().await;
        self.wait_until(until, publisher).await?;
        if patience.is_some_and(|patience| Instant::now() > patience) {
            early_end.give_up();
        }
        Ok(())
    }

    /// Waits until the targets of the last page have had their time, where an operator has throttled reconciles.
    async fn keep_pace(&mut self) {
        let (began, targets) = self.pace;
        if let Some(each_second) = self.run.servers.control.targets_per_second() {
            self.run.early_end.pause(pace(targets, each_second).saturating_sub(began.elapsed())).await;
        }
        self.pace = (Instant::now(), 0);
    }

    /// Writes how long the run has waited, and for what.
    pub(super) fn report(self, report: &mut Report) {
        report.waited_s = self.waited.as_secs();
        report.waits = self.waits;
        report.waited_for = self.waited_for;
    }

    async fn wait_until(&mut self, until: Option<Instant>, publisher: &Publisher) -> Result<()> {
        let stop = self.run.early_end.stop;
        self.run.early_end.pause(Duration::from_millis(self.run.servers.limits.pause_ms)).await;
        if self.checked.is_some_and(|checked| checked.elapsed() < FRESH) {
            return Ok(());
        }
        let began = Instant::now();
        let mut said: Option<Instant> = None;
        while let Some(found) = stop.run_until_cancelled(self.too_much(publisher)).await {
            let Some(Wait { count, words: reason }) = found? else { break };
            if said.is_none_or(|said| said.elapsed() > SAY_EVERY) {
                info!(event = "reconcile-waiting", reason, "waiting, live traffic goes first: {reason}");
                said = Some(Instant::now());
            }
            *count(&mut self.waits) += 1;
            self.show(Some(&reason));
            telemetry().jobs.waits(JOB, Some((WaitsFor::Pace, reason.clone())));
            self.waited_for = Some(reason);
            let stopped = stop.run_until_cancelled(tokio::time::sleep(CHECK_EVERY)).await.is_none();
            if stopped || until.is_some_and(|until| Instant::now() > until) {
                break;
            }
        }
        if said.is_some() {
            self.waited += began.elapsed();
            self.show(None);
            telemetry().jobs.waits(JOB, None);
        }
        self.checked = Some(Instant::now());
        Ok(())
    }

    fn show(&self, reason: Option<&str>) {
        self.run.progress.send_modify(|progress| progress.waiting = reason.map(str::to_owned));
    }

    /// Which server has too much to do; `None` where all have time. A limit of 0 is no limit.
    async fn too_much(&self, publisher: &Publisher) -> Result<Option<Wait>> {
        let servers = self.run.servers;
        let limits = &servers.limits;
        if limits.threads_running_max > 0 {
            let running = servers.store.threads_running().await?;
            if running > limits.threads_running_max {
                let words = format!("MySQL runs {running} threads, above {}", limits.threads_running_max);
                return Ok(Some(Wait { count: |waits| &mut waits.threads_running, words }));
            }
        }
        if limits.redis_latency_max_ms > 0 {
            let asked = Instant::now();
            servers.cache.ping().await?;
            let latency = asked.elapsed();
            if latency > Duration::from_millis(limits.redis_latency_max_ms) {
                let (latency, max) = (latency.as_millis(), limits.redis_latency_max_ms);
                let words = format!("Redis answers after {latency} ms, above {max}");
                return Ok(Some(Wait { count: |waits| &mut waits.redis_latency, words }));
            }
        }
        if limits.queue_depth_max > 0 {
            for partition in 0..servers.broker.partitions() {
                let queue = servers.broker.queue(partition);
                let messages = u64::from(publisher.depth(&queue).await?.messages);
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
        let servers = self.run.servers;
        if servers.replicas.is_empty() {
            return Ok(None);
        }
        let max = servers.limits.max_lag.0;
        let stamp = servers.store.stamp(self.run.number).await?;
        for (replica, store) in &servers.replicas {
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
        let max = self.run.servers.limits.max_lag.0;
        let asked = Instant::now();
        loop {
            let seen = replica.stamp_seen(self.run.number).await?;
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
