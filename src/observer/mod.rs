//! Looks at the servers every few seconds, for those who look at the daemon: which of them answer, how full the queues are, how
//! runs of jobs ended, whoever ran them, how boards stand.
//!
//! It is no part of the work: its connections are its own and few, each read is small or by an index, all have time
//! limits, and the servers are asked at once, so that one that is away keeps nobody from being told of the others. What is
//! not known any more stays as it was; that its server is away is told beside it.

mod boards;
mod jobs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::broker::{self, Broker, Publisher};
use crate::cache::Cache;
use crate::config::{Config, Live};
use crate::marks::Marks;
use crate::model::Micros;
use crate::runtime::progress::Beat;
use crate::status::{Board, Job, Reconciled, Server};
use crate::store::Store;
use crate::store::partitions::Owner;
use crate::vitals::{POINT_EVERY, SERVERS, vitals};
use jobs::Runs;

/// How often servers, queues and partitions are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How often jobs are, which costs some reads of MySQL.
const JOBS_EVERY: Duration = Duration::from_secs(10);

/// How often boards and dead letters are, which costs some more.
const BOARDS_EVERY: Duration = Duration::from_secs(30);

/// How long a server may take to answer before it is said to be away.
const ANSWER_MAX: Duration = Duration::from_secs(4);

/// What was seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    /// When.
    pub at: Option<Micros>,
    /// In the order of [`SERVERS`].
    pub servers: Vec<Server>,
    /// Messages and consumers of each partition's queue.
    pub queues: BTreeMap<u16, (u64, u64)>,
    /// Messages in the queue of what the broker has given up on.
    pub returned: Option<u64>,
    /// Who writes which partition.
    pub owners: Vec<Owner>,
    /// Rows of the outbox that are not in Redis yet.
    pub outbox_rows: Option<u64>,
    /// Jobs and modes.
    pub jobs: Vec<Job>,
    /// The reconciler's last runs, the oldest first.
    pub reconciles: Vec<Reconciled>,
    /// Boards.
    pub boards: Vec<Board>,
    /// Open dead letters by reason.
    pub dead_letters: Option<BTreeMap<String, u64>>,
}

/// What all look at.
pub type Sight = watch::Receiver<Arc<Observed>>;

/// The task.
pub struct Observer {
    live: Live,
    store: Store,
    cache: Cache,
    broker: Broker,
    /// Kept open; one that failed is not given back, and made anew.
    link: Option<Publisher>,
    /// Queues that are not there, or that this account may not ask for: not asked for until [`BOARDS_EVERY`] is over.
    missing: BTreeSet<String>,
    runs: Runs,
    seen: Observed,
    sender: watch::Sender<Arc<Observed>>,
}

impl Observer {
    /// With what it will have seen.
    pub fn new(live: &Live, store: Store, cache: Cache, broker: Broker) -> (Self, Sight) {
        let (sender, sight) = watch::channel(Arc::default());
        let (runs, seen) = (Runs::default(), Observed::default());
        let (link, missing) = (None, BTreeSet::new());
        (Self { live: live.clone(), store, cache, broker, link, missing, runs, seen, sender }, sight)
    }

    /// Looks until the stop.
    pub async fn run(mut self, beat: Beat, stop: CancellationToken) -> String {
        let (mut jobs, mut boards, mut point) = (Rest::default(), Rest::default(), Rest::default());
        while !stop.is_cancelled() {
            let began = Instant::now();
            let config = self.live.now();
            let looked = async {
                self.look(&config).await;
                if self.is_up("mysql") && jobs.is_over(JOBS_EVERY) {
                    self.look_at_jobs(&config).await;
                }
                if self.is_up("mysql") && self.is_up("redis") && boards.is_over(BOARDS_EVERY) {
                    self.missing.clear();
                    self.look_at_boards(&config).await;
                }
            };
            if stop.run_until_cancelled(beat.during(looked)).await.is_none() {
                break;
            }
            if point.is_over(POINT_EVERY) {
                let queued =
                    self.is_up("rabbitmq").then(|| self.seen.queues.values().map(|(messages, _)| messages).sum());
                vitals().pulse.beat(Micros::now(), vitals().committed.get(), vitals().lag.get(), queued);
            }
            self.seen.at = Some(Micros::now());
            self.sender.send_replace(Arc::new(self.seen.clone()));
            beat.pause(LOOK_EVERY.saturating_sub(began.elapsed()), &stop).await;
        }
        "observer".to_owned()
    }

    /// Asks all servers at once.
    async fn look(&mut self, config: &Config) {
        let Self { store, cache, broker, link, missing, .. } = self;
        let (mysql, redis, rabbitmq) = tokio::join!(
            timed(look_at_mysql(store)),
            timed(async { Ok(cache.ping().await?) }),
            timed(look_at_queues(broker, link, missing, config.amqp.partitions)),
        );
        self.note(0, &mysql);
        self.note(1, &redis);
        self.note(2, &rabbitmq);
        if let (Ok((owners, outbox_rows)), _) = mysql {
            (self.seen.owners, self.seen.outbox_rows) = (owners, Some(outbox_rows));
        }
        if let Ok((queues, returned)) = rabbitmq.0 {
            (self.seen.queues, self.seen.returned) = (queues, returned);
        }
    }

    fn is_up(&self, server: &str) -> bool {
        self.seen.servers.iter().any(|seen| seen.server == server && seen.up)
    }

    /// Notes whether a server answers.
    fn note<T>(&mut self, place: usize, (asked, took): &(Result<T>, Duration)) {
        let servers = &mut self.seen.servers;
        if servers.len() <= place {
            servers.resize_with(place + 1, Server::default);
        }
        let (Some(seen), Some(name)) = (servers.get_mut(place), SERVERS.get(place)) else { return };
        let up = asked.is_ok();
        if seen.up != up || seen.since == 0 {
            seen.since = Micros::now().0;
        }
        (seen.server, seen.up, seen.look_s) = ((*name).to_owned(), up, took.as_secs_f64());
        seen.reason = asked.as_ref().err().map(|error| format!("{error:#}"));
    }

    async fn look_at_jobs(&mut self, config: &Config) {
        let now = Micros::now();
        let (jobs, _) = timed(self.runs.look(&self.store, config, now)).await;
        if let Some(jobs) = told(jobs, "jobs") {
            self.seen.jobs = jobs;
            self.seen.reconciles = self.runs.reconciles();
        }
        let (open, _) = timed(async { Ok(self.store.open_dead_letters().await?) }).await;
        if let Some(open) = told(open, "dead letters") {
            self.seen.dead_letters = Some(open.into_iter().collect());
        }
    }

    async fn look_at_boards(&mut self, config: &Config) {
        let (boards, _) = timed(boards::look(config, &self.store, &self.cache, Micros::now())).await;
        if let Some(boards) = told(boards, "boards") {
            self.seen.boards = boards;
        }
    }
}

/// Since when something was last done.
#[derive(Default)]
struct Rest(Option<Instant>);

impl Rest {
    /// Whether it is time to do it again; it is done then.
    fn is_over(&mut self, every: Duration) -> bool {
        // A look that came a moment early is none too many.
        let over = self.0.is_none_or(|done| done.elapsed() + Duration::from_millis(100) >= every);
        if over {
            self.0 = Some(Instant::now());
        }
        over
    }
}

/// What was told. A failure is seen at the next look, too: that its server is away.
fn told<T>(asked: Result<T>, what: &str) -> Option<T> {
    asked.inspect_err(|error| debug!(event = "look-failed", what, "{what} could not be looked at: {error:#}")).ok()
}

/// What was answered in time, and how long it took.
async fn timed<T>(ask: impl Future<Output = Result<T>>) -> (Result<T>, Duration) {
    let began = Instant::now();
    let asked = tokio::time::timeout(ANSWER_MAX, ask).await;
    let asked = asked.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {} s", ANSWER_MAX.as_secs())));
    (asked, began.elapsed())
}

/// Who writes which partition, and how far Redis is behind the outbox.
async fn look_at_mysql(store: &Store) -> Result<(Vec<Owner>, u64)> {
    let owners = store.partition_owners().await?;
    // What is added first: it never passes the other.
    let applied: Marks = store.outbox_applied().await?;
    let written = store.outbox_numbers().await?;
    let rows = written.iter().map(|(partition, last)| last.saturating_sub(applied.of(partition))).sum();
    Ok((owners, rows))
}

/// Messages and consumers of the partitions' queues, and what the broker has given up on.
async fn look_at_queues(
    broker: &Broker,
    link: &mut Option<Publisher>,
    missing: &mut BTreeSet<String>,
    partitions: u16,
) -> Result<(BTreeMap<u16, (u64, u64)>, Option<u64>)> {
    let mut depths = BTreeMap::new();
    let all = (0..partitions).map(|partition| (Some(partition), broker.queue(partition)));
    for (partition, queue) in all.chain([(None, broker.returned())]) {
        if missing.contains(&queue) {
            continue;
        }
        let open = match link.take() {
            Some(open) => open,
            None => broker.connect_publisher("observer").await?,
        };
        match open.depth(&queue).await {
            Ok(depth) => {
                depths.insert(partition, (u64::from(depth.messages), u64::from(depth.consumers)));
                *link = Some(open);
            }
            // The answer has cost the channel.
            Err(error) if broker::is_refusal(&error) => drop(missing.insert(queue)),
            Err(error) => return Err(error),
        }
    }
    let returned = depths.remove(&None).map(|(messages, _)| messages);
    Ok((depths.into_iter().filter_map(|(partition, depth)| Some((partition?, depth))).collect(), returned))
}
