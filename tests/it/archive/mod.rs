//! These tests run the archiver with real servers, and cause failures. At the end of each test, MySQL must have every
//! member exactly once. Until MySQL has all members of a zset, the archiver must not remove the zset from Redis.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod asked;
mod back;
mod clocks;
#[cfg(feature = "fault-points")]
mod crash;
mod daemons;
mod kept;
mod late;
mod pruned;
mod refused;
mod restored;
mod rivals;
mod saved;
#[cfg(feature = "fault-points")]
mod saved_crash;
mod script;
mod way;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common;
use common::World;
use common::private::Private;
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use saved::add;
use sqlx::{AssertSqlSafe, Row};
use tallyd::jobs::archive::{Archiver, JOB, Outcome, Report, Scope};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::{Job, RunOptions, once, run_as};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::progress::ProgressSink;
use tallyd_base::servers::Servers;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_mysql::Store;
use tallyd_mysql::jobs::Lock;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// 2026-11-21T12:00:00Z, a Saturday in week 47.
const NOW: Micros = Micros(1_795_262_400_000_000);

const DAY: Duration = Duration::from_secs(86_400);

/// A week after [`NOW`].
const LATER: Micros = Micros(NOW.0 + 7 * 86_400_000_000);

const WEEKLY: &str = "[archive]\npage_members = 7\n[[board]]\nname = \"likes\"\nperiod = \"week\"\n";

const ENDED_AT_ONCE: &str =
    "[archive]\npage_members = 7\n[[board]]\nname = \"likes\"\nperiod = \"week\"\nexpire_after = \"0s\"\n";

/// The members of a board with their scores.
type Board = BTreeMap<Vec<u8>, f64>;

/// Makes a board. Many of its members have equal scores, so the order of these members depends on Redis.
fn board(members: usize) -> Board {
    (0..members).map(|id| (format!("member-{id}").into_bytes(), (id % 17) as f64 + 1.0)).collect()
}

fn week(period: &str) -> BoardPeriod {
    BoardPeriod { board: "likes".to_owned(), period: period.to_owned() }
}

/// The value and the expiry of each key in Redis.
type Stored = BTreeMap<String, (Vec<u8>, i64)>;

/// A test environment, with methods that act as API servers, an operator and archivers.
struct Stage {
    world: World,
    servers: Servers,
    store: Store,
    redis: MultiplexedConnection,
    /// What the test has written to each board, in sum.
    written: BTreeMap<BoardPeriod, Board>,
}

impl Stage {
    async fn new(name: &str, settings: &str) -> Self {
        let world = World::new(name, settings).await;
        let servers = Servers::new(&world.config).unwrap();
        let redis = world.redis().await;
        Self { world, store: servers.store.clone(), servers, redis, written: BTreeMap::new() }
    }

    /// Makes an environment with the board of a period.
    async fn with_board(name: &str, settings: &str, period: &str, members: &Board) -> (Self, BoardPeriod) {
        let (mut stage, at) = (Self::new(name, settings).await, week(period));
        stage.write(&at, members).await;
        (stage, at)
    }

    /// Makes an environment with a board of last week, which is closed at [`NOW`].
    async fn with_closed(name: &str, settings: &str, members: &Board) -> (Self, BoardPeriod) {
        Self::with_board(name, settings, "2026-W46", members).await
    }

    /// Makes an environment with a board of last week, and archives it.
    async fn with_archived(name: &str, settings: &str, members: &Board) -> (Self, BoardPeriod) {
        let (stage, at) = Self::with_closed(name, settings, members).await;
        stage.archive(NOW).await;
        (stage, at)
    }

    /// Makes an environment with a board of this week, which is open at [`NOW`] and closed at [`LATER`].
    async fn with_open(name: &str, settings: &str, members: &Board) -> (Self, BoardPeriod) {
        Self::with_board(name, settings, "2026-W47", members).await
    }

    /// Makes an environment with a board of this week, and saves a snapshot of it.
    async fn with_saved(name: &str, settings: &str, members: &Board) -> (Self, BoardPeriod) {
        let (stage, at) = Self::with_open(name, settings, members).await;
        stage.save_all(false).await;
        (stage, at)
    }

    /// Like [`Stage::with_saved`], but Redis evicts boards when its memory is full.
    async fn evicting(name: &str, members: &Board) -> (Self, BoardPeriod, Private) {
        let redis = Private::start(&["--maxmemory-policy", "allkeys-lru"]).await;
        let settings = format!("[redis]\nurl = \"{}\"\n{WEEKLY}", redis.url());
        let (stage, at) = Self::with_saved(name, &settings, members).await;
        (stage, at, redis)
    }

    /// Runs a statement as another program does, which ignores tallyd's locks.
    async fn execute(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.world.pool).await.unwrap();
    }

    fn live(&self, at: &BoardPeriod) -> String {
        self.world.cache.keys.board(&at.board, &at.period)
    }

    fn frozen(&self, at: &BoardPeriod) -> String {
        self.world.cache.keys.frozen_board(&at.board, &at.period)
    }

    /// Adds the scores of `members` to the live zset, as an API server does.
    async fn write(&mut self, at: &BoardPeriod, members: &Board) {
        let key = self.live(at);
        for members in Vec::from_iter(members).chunks(500) {
            let mut pipeline = redis::pipe();
            for (member, score) in members {
                pipeline.zincr(&key, member, *score).ignore();
            }
            pipeline.query_async::<()>(&mut self.redis).await.unwrap();
        }
        self.note(at, members);
    }

    /// Notes what a test has written in another way.
    fn note(&mut self, at: &BoardPeriod, members: &Board) {
        add(self.written.entry(at.clone()).or_default(), members);
    }

    async fn exists(&mut self, key: &str) -> bool {
        self.redis.exists(key).await.unwrap()
    }

    async fn delete(&mut self, key: &str) {
        self.redis.del::<_, ()>(key).await.unwrap();
    }

    async fn ttl_s(&mut self, key: &str) -> i64 {
        self.redis.ttl(key).await.unwrap()
    }

    /// Returns the members of a zset by rank, highest score first.
    async fn ranked(&mut self, key: &str) -> Vec<(Vec<u8>, f64)> {
        self.redis.zrevrange_withscores(key, 0, -1).await.unwrap()
    }

    /// Returns how many rows the archive has. While a run copies a board, earlier places can be missing.
    async fn rows(&self) -> i64 {
        sqlx::query_scalar("SELECT COUNT(*) FROM leaderboard_archive").fetch_one(&self.world.pool).await.unwrap()
    }

    /// Returns the archived members, ordered by place. Fails if the places are wrong.
    async fn archived(&self, at: &BoardPeriod) -> Vec<(Vec<u8>, f64)> {
        let sql = "SELECT place, member, score FROM leaderboard_archive AS a WHERE board = ? AND period = ? AND copy = COALESCE( \
                (SELECT copy FROM leaderboard_period AS p WHERE p.board = a.board AND p.period = a.period), 0) ORDER BY place";
        let rows = sqlx::query(sql).bind(&at.board).bind(&at.period).fetch_all(&self.world.pool).await.unwrap();
        let places: Vec<u32> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(places, (1..=rows.len() as u32).collect::<Vec<_>>(), "{at}");
        rows.iter().map(|row| (row.get(1), row.get(2))).collect()
    }

    /// Checks that the archive has exactly these members, and has each member only once.
    async fn holds(&self, at: &BoardPeriod, expected: &Board) {
        let archived = self.archived(at).await;
        assert_eq!(archived.len(), expected.len(), "{at}");
        assert_eq!(archived.into_iter().collect::<Board>(), *expected, "{at}");
    }

    /// Checks that the archive has exactly what the test has written.
    async fn holds_all(&self, at: &BoardPeriod) {
        self.holds(at, &self.written[at]).await;
    }

    /// Checks that Redis has exactly what the test has written.
    async fn is_whole(&mut self, at: &BoardPeriod) {
        assert_eq!(self.in_redis(at).await, self.written[at], "{at}");
    }

    async fn state(&self, at: &BoardPeriod) -> Option<String> {
        let sql = "SELECT state FROM leaderboard_period WHERE board = ? AND period = ?";
        sqlx::query_scalar(sql).bind(&at.board).bind(&at.period).fetch_optional(&self.world.pool).await.unwrap()
    }

    /// Ends the current lease immediately.
    async fn end_lease(&self) {
        self.world.end_leases().await;
    }

    async fn take(&self) -> u64 {
        match self.store.take_job(JOB, "closed", "test").await.unwrap() {
            Lock::Taken(run) => run,
            held @ Lock::Held { .. } => panic!("{held:?}"),
        }
    }

    /// Claims the board for `run`, as an archive run does. Returns the generation, which identifies the data set of
    /// Redis.
    async fn claim(&self, run: u64) -> u64 {
        self.world.cache.claim_board("likes", run, &[]).await.unwrap()
    }

    fn archiver(&self, scope: &Scope, now: Micros) -> Archiver {
        let mut archiver = Archiver::new(&self.world.config, scope.clone());
        archiver.now = Some(now);
        archiver
    }

    /// Starts a run of another process, which has its own connections.
    fn rival<J>(&self, number: u64, job: J, stop: &CancellationToken) -> JoinHandle<anyhow::Result<Report>>
    where
        J: Job<Report = Report> + Send + 'static,
    {
        let (servers, stop) = (Servers::new(&self.world.config).unwrap(), stop.clone());
        let runtime = Handle::current();
        tokio::task::spawn_blocking(move || {
            let run = run_as(&servers, number, &job, RunOptions::default(), ProgressSink::Log, &stop);
            runtime.block_on(run).map_err(JobError::into_error)
        })
    }

    async fn archive_as(&self, run: u64, scope: &Scope, now: Micros) -> anyhow::Result<Report> {
        let (archiver, stop) = (self.archiver(scope, now), CancellationToken::new());
        let ran = run_as(&self.servers, run, &archiver, RunOptions::default(), ProgressSink::Log, &stop).await;
        ran.map_err(JobError::into_error)
    }

    /// Runs the job unless another run has the lock.
    async fn run_once(&self, job: &impl Job<Report = Report>) -> anyhow::Result<Ran<Report>> {
        let (config, stop) = (&self.world.config, CancellationToken::new());
        let run = once(&self.servers, config, job, RunOptions::default(), ProgressSink::Log, &stop);
        // The future of an unoptimized run is too large for the stack of a long test.
        Box::pin(run).await.map_err(JobError::into_error)
    }

    async fn run(&self, job: &impl Job<Report = Report>) -> anyhow::Result<Report> {
        match self.run_once(job).await? {
            Ran::Ended(report) => Ok(report),
            Ran::Held { owner, .. } => panic!("held by {owner}"),
        }
    }

    /// Runs the archiver to its end, as a daemon does.
    async fn archive(&self, now: Micros) -> Report {
        self.run(&self.archiver(&Scope::default(), now)).await.unwrap()
    }

    /// Returns all keys in Redis and the checksums of all tables that the archiver can change.
    async fn everything(&mut self) -> (Stored, Vec<Option<i64>>) {
        let pattern = format!("{}:*", self.world.name);
        let keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query_async(&mut self.redis).await.unwrap();
        let mut stored = Stored::new();
        for key in keys {
            let dump = redis::cmd("DUMP").arg(&key).query_async(&mut self.redis).await.unwrap();
            let expires = redis::cmd("PEXPIRETIME").arg(&key).query_async(&mut self.redis).await.unwrap();
            stored.insert(key, (dump, expires));
        }
        let sql =
            "CHECKSUM TABLE leaderboard_archive, leaderboard_period, leaderboard_snapshot, leaderboard_snapshot_period";
        let sums = sqlx::query(sql).fetch_all(&self.world.pool).await.unwrap();
        (stored, sums.iter().map(|row| row.get(1)).collect())
    }
}

fn outcomes(report: &Report) -> Vec<(&str, Outcome)> {
    report.periods.iter().map(|period| (period.period.as_str(), period.outcome)).collect()
}

fn reason<'a>(report: &'a Report, period: &str) -> &'a str {
    let found = report.periods.iter().find(|found| found.period == period).unwrap();
    found.reason.as_deref().unwrap_or_default()
}

/// Checks the reason that the report gives for a period.
#[track_caller]
fn says(report: &Report, period: &str, why: &str) {
    assert!(reason(report, period).contains(why), "{report:#}");
}
