//! Gives live traffic priority over runs. The time that earlier pages took determines the size of later pages. A run
//! waits while a server is busy.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::Servers;
use crate::config::Reconcile as Limits;
use crate::partitions::{Backlog, InUse};
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_rabbitmq::Publisher;

const CHECK_EVERY: Duration = Duration::from_secs(1);

const LOG_EVERY: Duration = Duration::from_secs(30);

const FRESH: Duration = Duration::from_millis(200);

/// Longer pages delay stops, and hold locks for longer; shorter ones waste calls.
const PAGE_TARGET_MS: u64 = 1_000;

/// While consumers are behind, a run pauses after each page for this part of the page's time, at most for
/// `PAGE_TARGET_MS`: on a small machine, the run would take a fifth of the consumer's speed.
const BEHIND_PAUSE: f64 = 0.5;

/// A consumer that is behind writes a batch within this time, even if MySQL is slow.
const BATCH_MAX: Duration = Duration::from_secs(2);

const REPLICA_CHECK_EVERY: Duration = Duration::from_millis(10);

/// MySQL has room for a second page while it runs at most `threads_running_max` threads divided by this number.
const ROOM_DIVISOR: u64 = 8;

/// A page has at least this number of targets or rows.
const PAGE_MIN: usize = 100;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waits {
    pub threads_running: u64,
    pub redis_latency: u64,
    pub queue_depth: u64,
    pub replica_lag: u64,
}

/// What a run waited for, as its report says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waited {
    pub waited_s: u64,
    pub waits: Waits,
    pub waited_for: Option<String>,
}

/// The servers that a run checks, and the limits.
pub struct Health {
    pub servers: Servers,
    /// MySQL's replicas, by name.
    pub replicas: Vec<(String, Store)>,
    /// Another MySQL server, whose tables the run reads.
    pub site: Option<Store>,
    pub limits: Limits,
    /// The run's number in `job_run`. The row with this number has a time stamp that shows how far a replica is behind.
    pub number: u64,
}

/// Chooses the size of a run's pages, and delays the next page.
pub struct Pace {
    health: Health,
    stop: CancellationToken,
    /// The job's name, and the function that logs that the run waits.
    job: (&'static str, fn(&str)),
    page: usize,
    page_max: usize,
    backlog: Backlog,
    checked: Option<Instant>,
    load: Load,
    /// How long the last page took.
    took: Duration,
    pace: (Instant, usize),
    waited: Duration,
    total: Waited,
}

/// What the checks found.
#[derive(Default)]
struct Load {
    threads_running: u64,
    /// The batches of consumers that are behind, and when their number last changed.
    behind: Option<(u64, Instant)>,
    is_behind: bool,
}

impl Load {
    /// A consumer that ends leaves its row behind. So a number of batches means something only while it changes.
    fn note(&mut self, behind: Option<u64>, now: Instant) {
        let Some(batches) = behind else {
            (self.behind, self.is_behind) = (None, false);
            return;
        };
        match self.behind {
            Some((before, at)) if before == batches => self.is_behind &= now - at < BATCH_MAX,
            before => (self.behind, self.is_behind) = (Some((batches, now)), before.is_some()),
        }
    }
}

#[derive(Debug)]
struct Wait {
    count: fn(&mut Waits) -> &mut u64,
    words: String,
}

impl Pace {
    /// Pages have at most `page_max` targets or rows. `job` contains the job's name, and a function that logs why the
    /// run waits.
    pub fn new(health: Health, stop: CancellationToken, job: (&'static str, fn(&str)), page_max: usize) -> Self {
        Self {
            health,
            stop,
            job,
            page: page_max.min(PAGE_MIN * 10),
            page_max,
            backlog: Backlog::default(),
            checked: None,
            load: Load::default(),
            took: Duration::ZERO,
            pace: (Instant::now(), 0),
            waited: Duration::ZERO,
            total: Waited::default(),
        }
    }

    pub fn page(&self) -> usize {
        match self.health.servers.control.targets_per_second() {
            // If a page takes at most a second, the run soon notices a new order of an operator.
            Some(each_second) => self.page.min(each_second as usize).max(1),
            None => self.page,
        }
    }

    /// Whether a run can read two pages in parallel: the run is not slowed down, no consumer is behind, and MySQL ran few
    /// threads at the last check. These threads include the run's own two or three threads.
    pub fn has_room(&self) -> bool {
        let limits = &self.health.limits;
        let is_slowed = limits.pause_ms > 0 || self.health.servers.control.targets_per_second().is_some();
        !is_slowed && !self.load.is_behind && has_room(self.load.threads_running, limits.threads_running_max)
    }

    pub fn note(&mut self, targets: usize, took: Duration) {
        self.took = took;
        self.pace.1 += targets;
        // The last page can have few targets. The time for a few targets does not show the best page size.
        if targets < self.page / 2 {
            return;
        }
        self.page = next_page(self.page, PAGE_TARGET_MS, took).clamp(PAGE_MIN.min(self.page_max), self.page_max);
    }

    /// Without a publisher, the lengths of queues do not matter. Ends at `until`, or when the run is stopped.
    pub async fn wait(&mut self, until: Option<Instant>, publisher: Option<&Publisher>) -> Result<()> {
        self.keep_pace().await;
        self.pause(Duration::from_millis(self.health.limits.pause_ms)).await;
        if self.load.is_behind {
            let pause = std::mem::take(&mut self.took).mul_f64(BEHIND_PAUSE);
            self.pause(pause.min(Duration::from_millis(PAGE_TARGET_MS))).await;
        }
        if self.checked.is_some_and(|checked| checked.elapsed() < FRESH) {
            return Ok(());
        }
        let (job, log_wait) = self.job;
        let began = Instant::now();
        let mut logged_at: Option<Instant> = None;
        let mut waiting = telemetry().runs.waiting(job, WaitsFor::Pace);
        let (backlog, load) = (&mut self.backlog, &mut self.load);
        while let Some(found) = self.stop.run_until_cancelled(self.health.too_much(publisher, backlog, load)).await {
            let Some(Wait { count, words: reason }) = found? else { break };
            if logged_at.is_none_or(|logged_at| logged_at.elapsed() > LOG_EVERY) {
                log_wait(&reason);
                logged_at = Some(Instant::now());
            }
            *count(&mut self.total.waits) += 1;
            self.total.waited_for = Some(reason.clone());
            waiting.note(reason);
            let stopped = self.stop.run_until_cancelled(tokio::time::sleep(CHECK_EVERY)).await.is_none();
            if stopped || until.is_some_and(|until| Instant::now() > until) {
                break;
            }
        }
        if logged_at.is_some() {
            self.waited += began.elapsed();
        }
        self.checked = Some(Instant::now());
        Ok(())
    }

    pub fn waited(self) -> Waited {
        Waited { waited_s: self.waited.as_secs(), ..self.total }
    }

    /// Waits until the minimum time for the targets of the last page has passed, if an operator has limited them.
    async fn keep_pace(&mut self) {
        let (began, targets) = self.pace;
        if let Some(each_second) = self.health.servers.control.targets_per_second() {
            self.pause(pace(targets, each_second).saturating_sub(began.elapsed())).await;
        }
        self.pace = (Instant::now(), 0);
    }

    async fn pause(&self, pause: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }
}

impl Health {
    /// Describes the busy server, or returns `None` if no server is busy. A limit of 0 means no limit.
    async fn too_much(
        &self,
        publisher: Option<&Publisher>,
        backlog: &mut Backlog,
        load: &mut Load,
    ) -> Result<Option<Wait>> {
        let limits = &self.limits;
        if limits.threads_running_max > 0 {
            let running = self.servers.store.threads_running().await?;
            load.threads_running = running;
            if running > limits.threads_running_max {
                let words = format!("MySQL runs {running} threads, above the limit of {}", limits.threads_running_max);
                return Ok(Some(Wait { count: |waits| &mut waits.threads_running, words }));
            }
            if let Some(site) = &self.site {
                let running = site.threads_running().await?;
                if running > limits.threads_running_max {
                    let words = format!(
                        "the site's MySQL runs {running} threads, above the limit of {}",
                        limits.threads_running_max
                    );
                    return Ok(Some(Wait { count: |waits| &mut waits.threads_running, words }));
                }
            }
        }
        load.note(self.servers.store.batches_behind().await?, Instant::now());
        if limits.redis_latency_max_ms > 0 {
            let asked = Instant::now();
            self.servers.cache.ping().await?;
            let latency = asked.elapsed();
            if latency > Duration::from_millis(limits.redis_latency_max_ms) {
                let (latency, max) = (latency.as_millis(), limits.redis_latency_max_ms);
                let words = format!("Redis answers after {latency} ms, above the limit of {max} ms");
                return Ok(Some(Wait { count: |waits| &mut waits.redis_latency, words }));
            }
        }
        if let Some(publisher) = publisher.filter(|_| limits.queue_depth_max > 0) {
            let in_use = InUse::read(&self.servers.store, &self.servers.broker).await?;
            for (_, queue) in in_use.partitions.queues() {
                let (messages, _) = backlog.of(publisher, queue).await?;
                if messages > limits.queue_depth_max {
                    let words =
                        format!("{queue} has {messages} messages, above the limit of {}", limits.queue_depth_max);
                    return Ok(Some(Wait { count: |waits| &mut waits.queue_depth, words }));
                }
            }
        }
        Ok(self.lagging().await?.map(|words| Wait { count: |waits| &mut waits.replica_lag, words }))
    }

    async fn lagging(&self) -> Result<Option<String>> {
        if self.replicas.is_empty() {
            return Ok(None);
        }
        let max = self.limits.max_lag.0;
        let stamp = self.servers.store.stamp(self.number).await?;
        for (replica, store) in &self.replicas {
            let lag = match self.lag_of(store, stamp).await {
                Ok(lag) => lag,
                Err(error) => return Ok(Some(format!("the replica {replica} can't be read: {error:#}"))),
            };
            let behind = match lag {
                Some(lag) if lag <= max => continue,
                Some(lag) => format!("{:.1} s", lag.as_secs_f32()),
                None => "its data is older than this run".to_owned(),
            };
            return Ok(Some(format!(
                "the replica {replica} is behind: {behind}, above the limit of {:.1} s",
                max.as_secs_f32()
            )));
        }
        Ok(None)
    }

    /// Returns as soon as the lag is certainly less or more than `max`. `None` if the replica has no time stamp of the
    /// run yet.
    async fn lag_of(&self, replica: &Store, stamp: Micros) -> Result<Option<Duration>> {
        let max = self.limits.max_lag.0;
        let asked = Instant::now();
        loop {
            let seen = replica.stamp_seen(self.number).await?;
            // An old time stamp on the replica does not prove a lag, because the run can have been busy since that
            // time. The replica is too far behind only if it still lacks the new time stamp after `max`.
            let age = |seen: Micros| Duration::from_micros((stamp.0 - seen.0).max(0).unsigned_abs());
            let lag = seen.map(|seen| age(seen) + if seen < stamp { asked.elapsed() } else { Duration::ZERO });
            if lag.is_some_and(|lag| lag <= max) || asked.elapsed() > max {
                return Ok(lag);
            }
            tokio::time::sleep(REPLICA_CHECK_EVERY).await;
        }
    }
}

/// Whether MySQL has room for a second page. A `threads_running_max` of 0 means no limit.
fn has_room(threads_running: u64, threads_running_max: u64) -> bool {
    threads_running_max == 0 || threads_running <= threads_running_max / ROOM_DIVISOR
}

/// At most a second, because pages are sized for a second. A page that an operator throttles on the way can exceed the
/// limit.
fn pace(targets: usize, each_second: u32) -> Duration {
    Duration::from_secs_f64((targets as f64 / f64::from(each_second.max(1))).min(1.0))
}

/// Returns the size of a page that would have taken `target_ms`. The result is between half of `page` and twice `page`.
fn next_page(page: usize, target_ms: u64, took: Duration) -> usize {
    let took_us = took.as_micros().max(1);
    let wanted = page as u128 * u128::from(target_ms) * 1_000 / took_us;
    usize::try_from(wanted).unwrap_or(usize::MAX).clamp(page / 2, page * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consumers_are_behind_while_they_say_so_and_write_batches() {
        let (mut load, began) = (Load::default(), Instant::now());
        let checks = [(0, Some(5)), (1, Some(6)), (2, Some(6)), (3, Some(6)), (4, Some(7)), (5, None), (6, Some(9))];
        let is_behind = checks.map(|(second, batches)| {
            load.note(batches, began + Duration::from_secs(second));
            load.is_behind
        });
        assert_eq!(is_behind, [false, true, true, false, true, false, false]);
    }

    #[test]
    fn a_second_page_is_read_only_while_few_threads_run() {
        for (running, max, room) in [(8, 64, true), (9, 64, false), (1, 7, false), (1, 8, true), (500, 0, true)] {
            assert_eq!(has_room(running, max), room, "{running} of {max}");
        }
    }

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
