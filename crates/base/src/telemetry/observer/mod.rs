//! Queries the servers every few seconds, for the status and the metrics. The observer checks which servers answer. The
//! observer also reads the depths of the queues, the results of runs, and the state of the boards.
//!
//! The observer must not disturb the work. The observer has a few separate connections. Each read is small or uses an
//! index, and has a time limit. The observer queries the servers at the same time, so a server that does not answer
//! does not delay the other servers' data. If a query fails, the last known values stay, and the status reports that
//! the server is unreachable or that the query failed. Only the depths of queues are dropped, because they are unknown
//! without the broker.

mod boards;
mod jobs;
mod queues;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{self, Config, ConfigHandle};
use crate::partitions::InUse;
use crate::runtime::clock;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::telemetry::{Observed, ObservedReceiver, POINT_EVERY, Server, ServerStatus, telemetry};
pub use jobs::JobMode;
use jobs::RecentRuns;
use queues::Queues;
use tallyd_connect::pace::pace;
use tallyd_mysql::Store;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;

const LOOK_EVERY: Duration = Duration::from_secs(5);

/// If a server does not answer, the servers are queried again soon, so that the end of an outage is seen soon.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Jobs are read less often, because they need several reads of MySQL.
const JOBS_EVERY: Duration = Duration::from_secs(10);

/// Boards are read even less often, because they need more reads.
const BOARDS_EVERY: Duration = Duration::from_secs(30);

const LETTERS_EVERY: Duration = Duration::from_secs(10);

/// If there are many dead letters, a count of them can take longer than [`SLOW`]. After such a count, the daemon waits
/// this additional time before the next count.
const LETTERS_SLOWLY: Duration = Duration::from_secs(600);

/// If the last count got no answer, the next count is delayed by this time. Either the count was too slow, or MySQL was
/// unreachable.
const LETTERS_AFTER_FAILURE: Duration = Duration::from_secs(30);
const SLOW: Duration = Duration::from_millis(500);

const ANSWER_MAX: Duration = Duration::from_secs(4);

/// The modes of all jobs with this configuration.
pub type Modes = Box<dyn Fn(&Config) -> Vec<JobMode> + Send>;

pub struct Observer {
    live: ConfigHandle,
    store: Store,
    cache: Cache,
    broker: Broker,
    queues: Queues,
    modes: Modes,
    runs: RecentRuns,
    failing: Failing,
    letters: Rest,
    seen: Observed,
    sender: watch::Sender<Arc<Observed>>,
}

impl Observer {
    pub fn new(
        live: &ConfigHandle,
        store: Store,
        cache: Cache,
        broker: Broker,
        modes: Modes,
    ) -> (Self, ObservedReceiver) {
        // The first call adds no point. It only sets the start time of the first point.
        telemetry().pulse.beat(None);
        let (sender, observed) = watch::channel(Arc::default());
        let observer = Self {
            live: live.clone(),
            store,
            cache,
            queues: Queues::new(broker.clone()),
            broker,
            modes,
            runs: RecentRuns::default(),
            failing: Failing::default(),
            letters: Rest::default(),
            seen: Observed::default(),
            sender,
        };
        (observer, observed)
    }

    pub async fn run(mut self, beat: Heartbeat, stop: CancellationToken) {
        let (mut jobs, mut boards, mut point) = (Rest::default(), Rest::default(), Rest(Some(Instant::now())));
        while !stop.is_cancelled() {
            let began = Instant::now();
            let config = self.live.current();
            let looked = async {
                self.look(&config).await;
                if self.is_up(Server::Mysql) && jobs.is_over(pace(JOBS_EVERY)) {
                    self.look_at_jobs(&config).await;
                }
                if self.is_up(Server::Mysql) && self.is_up(Server::Redis) && boards.is_over(pace(BOARDS_EVERY)) {
                    self.look_at_boards(&config).await;
                }
            };
            if stop.run_until_cancelled(beat.during(looked)).await.is_none() {
                break;
            }
            if point.is_over(pace(POINT_EVERY)) {
                let queued = || self.seen.queues.values().map(|(messages, _)| messages).sum::<u64>();
                let unacked = telemetry()
                    .consumer
                    .partitions()
                    .iter()
                    .map(|(_, partition)| partition.unacked_messages())
                    .sum::<u64>();
                telemetry().pulse.beat(self.is_up(Server::Rabbitmq).then(|| queued() + unacked));
            }
            self.seen.at = Some(clock::now().0);
            self.sender.send_replace(Arc::new(self.seen.clone()));
            let every = if self.seen.servers.iter().all(|server| server.up) { LOOK_EVERY } else { LOOK_AGAIN };
            beat.pause(pace(every).saturating_sub(began.elapsed()), &stop).await;
        }
    }

    async fn look(&mut self, config: &Config) {
        let Self { store, cache, broker, queues, seen, .. } = self;
        // The partitions come from the previous round of queries, because MySQL and RabbitMQ are queried at the same
        // time.
        let partitions = match seen.in_use.count() {
            0 => broker.numbered(config.amqp.partitions),
            _ => seen.in_use.clone(),
        };
        let (((owners, took), rows), redis, (rabbitmq, depths)) = tokio::join!(
            async {
                let owners = async { Ok((store.partition_owners().await?, InUse::read(store, broker).await?)) };
                (timed(owners).await, timed(async { Ok(store.outbox_rows().await?) }).await.0)
            },
            timed(async { Ok(cache.ping().await?) }),
            async {
                let asked = timed(queues.ask()).await;
                let depths = match &asked.0 {
                    Ok(()) => Some(timed(queues.look(&partitions)).await.0),
                    Err(_) => None,
                };
                (asked, depths)
            },
        );
        self.note(Server::Mysql, &owners, took);
        self.note(Server::Redis, &redis.0, redis.1);
        self.note(Server::Rabbitmq, &rabbitmq.0, rabbitmq.1);
        if let (Ok((owners, in_use)), Ok(rows)) = (owners, rows) {
            (self.seen.owners, self.seen.outbox_rows) = (owners, Some(rows));
            self.seen.partitions_in_use = in_use.noted.map(|noted| noted.partitions);
            (self.seen.in_use, self.seen.maps) = (in_use.partitions, in_use.maps);
        }
        // Without the broker, the depths of its queues are unknown.
        let depths = depths.and_then(|depths| self.failing.note("reading the queue depths for the status", depths));
        let depths = depths.unwrap_or_default();
        (self.seen.queues, self.seen.returned) = (depths.queues, depths.returned);
    }

    fn is_up(&self, server: Server) -> bool {
        self.seen.servers.iter().any(|seen| seen.server == server && seen.up)
    }

    fn note<T>(&mut self, server: Server, asked: &Result<T>, took: Duration) {
        let before = self.seen.servers.iter().position(|seen| seen.server == server);
        let before = before.map(|place| self.seen.servers.remove(place));
        let since = before.filter(|before| before.up == asked.is_ok()).map_or(clock::now().0, |before| before.since);
        let (up, look_s) = (asked.is_ok(), took.as_secs_f64());
        // The list keeps the order of the queries.
        let reason = asked.as_ref().err().map(|error| format!("{error:#}"));
        self.seen.servers.push(ServerStatus { server, up, reason, since, look_s });
    }

    async fn look_at_jobs(&mut self, config: &Config) {
        let (jobs, _) = timed(self.runs.look(&self.store, (self.modes)(config), clock::now())).await;
        if let Some(jobs) = self.failing.note("reading the runs of jobs for the status", jobs) {
            self.seen.jobs = jobs;
            self.seen.reconciles = self.runs.reconciles();
            self.seen.last_reconciles = self.runs.last_reconciles();
        }
        if self.letters.is_over(pace(LETTERS_EVERY)) {
            let (open, took) = timed(async { Ok(self.store.open_dead_letters().await?) }).await;
            self.letters.pause(pause_of_letters(open.is_ok(), took));
            if let Some(open) = self.failing.note("counting the dead letters for the status", open) {
                self.see_letters(config, &open);
            }
        }
    }

    fn see_letters(&mut self, config: &Config, open: &[(String, String, u64)]) {
        let (mut reasons, mut queues) = (BTreeMap::new(), BTreeMap::new());
        for (queue, reason, count) in open {
            *reasons.entry(reason.clone()).or_default() += count;
            *queues.entry(queue).or_insert(0) += count;
        }
        let partitions = self.seen.in_use.count().max(config.amqp.partitions);
        let part = config::dead_letters_part(config.consumer.dead_letters_max, partitions);
        self.seen.dead_letters_full = Some(queues.into_values().max().unwrap_or(0) as f64 / part as f64);
        self.seen.dead_letters = Some(reasons);
    }

    async fn look_at_boards(&mut self, config: &Config) {
        let (boards, _) = timed(boards::look(config, &self.store, &self.cache, clock::now())).await;
        if let Some(boards) = self.failing.note("reading the boards for the status", boards) {
            self.seen.boards = boards;
        }
    }
}

/// The queries that fail although the servers answer. The log and the list of retried operations show these queries.
#[derive(Default)]
struct Failing(BTreeMap<&'static str, Outage>);

impl Failing {
    fn note<T>(&mut self, what: &'static str, asked: Result<T>) -> Option<T> {
        let outage = self.0.entry(what).or_insert_with(|| Outage::new(what));
        match asked {
            Ok(answer) => {
                outage.over();
                Some(answer)
            }
            Err(error) => {
                outage.failed(&format!("{error:#}"));
                None
            }
        }
    }
}

#[derive(Default)]
struct Rest(Option<Instant>);

impl Rest {
    fn is_over(&mut self, every: Duration) -> bool {
        // The loop can run slightly too early, so up to a tenth of a second is allowed.
        let over = self.0.is_none_or(|done| done.elapsed() + Duration::from_millis(100) >= every);
        if over {
            self.0 = Some(Instant::now());
        }
        over
    }

    fn pause(&mut self, more: Duration) {
        self.0 = self.0.map(|done| done + more);
    }
}

fn pause_of_letters(is_answered: bool, took: Duration) -> Duration {
    if !is_answered {
        LETTERS_AFTER_FAILURE
    } else if took > SLOW {
        LETTERS_SLOWLY
    } else {
        Duration::ZERO
    }
}

async fn timed<T>(ask: impl Future<Output = Result<T>>) -> (Result<T>, Duration) {
    let began = Instant::now();
    let asked = tokio::time::timeout(ANSWER_MAX, ask).await;
    let asked = asked.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {} s", ANSWER_MAX.as_secs())));
    (asked, began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_more_reads_is_read_less_often() {
        let seconds =
            [ANSWER_MAX, LOOK_EVERY, JOBS_EVERY, LETTERS_EVERY, POINT_EVERY, BOARDS_EVERY].map(|it| it.as_secs());
        assert_eq!(seconds, [4, 5, 10, 10, 10, 30]);
    }

    #[test]
    fn a_count_that_failed_is_tried_again_soon_and_one_that_is_slow_is_seldom_made() {
        let pause = |is_answered, ms| pause_of_letters(is_answered, Duration::from_millis(ms));
        assert_eq!((pause(true, 500), pause(true, 501)), (Duration::ZERO, LETTERS_SLOWLY));
        // MySQL did not answer within the limit, so the duration of the count is unknown.
        assert_eq!((pause(false, 1), pause(false, 4_000)), (LETTERS_AFTER_FAILURE, LETTERS_AFTER_FAILURE));
    }
}
