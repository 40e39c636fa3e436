//! Makes a site with many likes: fills MySQL in bulk, and loads or empties Redis.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use futures_util::TryStreamExt;
use futures_util::future::try_join_all;
use sqlx::{AssertSqlSafe, Row};
use tallyd_client::Event;
use tallyd_core::model::{Kind, Target, TargetId};
use tallyd_redis::Cache;
use tallyd_testkit::client_of;

use crate::child::{self, Ran};
use crate::common::contender::{Contender, Said};
use crate::common::preload;
use crate::common::wait;
use crate::common::workload::{USERS, Workload};
use crate::common::world::{Setup, World};

/// Mean number of like records per target.
const ROWS_PER_TARGET: u64 = 40;

/// Number of rows that one statement inserts.
const ROWS_PER_STATEMENT: usize = 10_000;

/// The number of likes in one group, and the time between two groups. Together, these two values give 4,000 likes a
/// second.
const ARRIVING_PER_TURN: usize = 80;
const TURN: Duration = Duration::from_millis(20);

/// The time limit for the queue to become empty after the last like, and the time between two checks.
const EMPTY_MAX: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Number of commands in a pipeline, as in tallyd.
const PIPELINE: usize = 500;

pub struct Site {
    world: World,
    cache: Cache,
    pub targets: u64,
}

impl Site {
    pub async fn open(name: &str, rows: u64) -> Result<Self> {
        let world = World::new(&format!("reconcile-{name}"), Setup::default()).await?;
        let cache = Cache::new(&world.config.redis, &world.config.metrics)?;
        let targets = rows / ROWS_PER_TARGET;
        println!("filling MySQL with the rows of {rows} likes for {targets} targets");
        fill(&world, rows, targets).await.context("fill MySQL")?;
        Ok(Self { world, cache, targets })
    }

    pub async fn close<T>(self, measured: Result<T>) -> Result<T> {
        let lost = self.lose().await;
        self.world.close(measured.and_then(|measured| lost.map(|()| measured))).await
    }

    pub async fn reconcile(&self, arguments: &[&str]) -> Result<Ran> {
        child::reconcile(&self.world, arguments).await
    }

    /// Measures how long the minimum work of any recount takes, in seconds: read each target's count from
    /// `like_record`.
    pub async fn bare_recount(&self) -> Result<f64> {
        let began = Instant::now();
        let sql = "SELECT kind, target_id, CAST(SUM(is_del = 0) AS SIGNED) FROM like_record GROUP BY kind, target_id";
        let mut rows = sqlx::query(sql).fetch(&self.world.pool);
        let mut targets = 0;
        while let Some(row) = rows.try_next().await? {
            let _: i64 = row.try_get(2)?;
            targets += 1;
        }
        ensure!(targets >= self.targets, "{targets} targets were counted");
        Ok(began.elapsed().as_secs_f64())
    }

    /// Measures the work that every rebuild must do: read `counter`, and write each count to Redis. Returns the time in
    /// seconds.
    pub async fn bare_hset(&self) -> Result<f64> {
        let counters: Vec<(u64, i64)> =
            sqlx::query_as("SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter GROUP BY kind, target_id")
                .fetch_all(&self.world.pool)
                .await?;
        let mut redis = self.world.redis().await?;
        let key = |id: u64| {
            let target = Target { kind: Kind(1), id: TargetId(id) };
            format!("bare:{}", self.cache.keys.counters("video", self.cache.keys.bucket(target)))
        };
        let began = Instant::now();
        let mut keys = BTreeMap::new();
        for piece in counters.chunks(PIPELINE) {
            let mut pipeline = redis::pipe();
            for (id, value) in piece {
                let key = key(*id);
                pipeline.hset(&key, id, value).ignore();
                keys.insert(key, ());
            }
            pipeline.exec_async(&mut redis).await?;
        }
        let seconds = began.elapsed().as_secs_f64();
        for key in keys.keys() {
            redis::cmd("UNLINK").arg(key).exec_async(&mut redis).await?;
        }
        Ok(seconds)
    }

    /// Removes all counters from Redis.
    pub async fn lose(&self) -> Result<()> {
        let mut redis = self.world.redis().await?;
        for bucket in 0..self.cache.keys.buckets() {
            redis::cmd("UNLINK").arg(self.cache.keys.counters("video", bucket)).exec_async(&mut redis).await?;
        }
        Ok(())
    }

    /// Marks some targets as changed since the last run: `thousandths` targets in every 1,000.
    pub async fn change(&self, thousandths: u64) -> Result<u64> {
        // All other targets must be older than the overlap, so that the run does not include these targets again.
        sqlx::query("UPDATE counter SET update_at = '2026-01-01' WHERE update_at > '2026-01-01'")
            .execute(&self.world.pool)
            .await?;
        let changed = sqlx::query("UPDATE counter SET update_at = NOW(6) WHERE target_id % 1000 < ?")
            .bind(thousandths)
            .execute(&self.world.pool)
            .await?;
        Ok(changed.rows_affected())
    }

    /// Measures how many events per second the daemon drains, with or without reconciles at the same time. Also returns
    /// each reconcile that has ended before the queue was drained.
    pub async fn drain(&self, events: u64, beside: Option<&str>) -> Result<(f64, Vec<Ran>)> {
        preload::preload(&self.world, Workload::new(1).take(usize::try_from(events)?)).await?;
        let mut running = Contender::tallyd("tallyd", 1).start(&self.world, &[])?;
        while running.next().await? != Said::Consuming {}
        let began = Instant::now();
        let ended = Cell::new(false);
        let drained = async {
            let mut committed = 0;
            while committed < events {
                if let Said::Committed { events, .. } = running.next().await? {
                    committed += events;
                }
            }
            ended.set(true);
            Ok(events as f64 / began.elapsed().as_secs_f64())
        };
        let reconciles = async {
            let mut all = Vec::new();
            // Waits until the run ends, because the lease of this run would block the next run.
            while let (Some(mode), false) = (beside, ended.get()) {
                let ran = self.reconcile(&[mode, "--force", "--yes"]).await?;
                if !ended.get() {
                    all.push(ran);
                }
            }
            Ok::<Vec<Ran>, anyhow::Error>(all)
        };
        let measured = tokio::try_join!(drained, reconciles)?;
        running.stop().await?;
        self.forget_new_rows().await?;
        Ok(measured)
    }

    /// Publishes likes at this rate, until the task is aborted.
    async fn arrive(&self) -> Result<()> {
        let client = client_of(&self.world.config);
        let mut turn = tokio::time::interval(TURN);
        let mut likes = Workload::new(1);
        loop {
            turn.tick().await;
            let some: Vec<_> = likes.by_ref().take(ARRIVING_PER_TURN).map(Event::Like).collect();
            try_join_all(some.iter().map(|event| client.publish(event, None))).await?;
        }
    }

    /// While likes arrive, first measures [`Self::bare_hset`]. Then empties Redis, and measures the reload.
    pub async fn rebuild_under_load(&self) -> Result<(f64, Ran)> {
        let mut running = Contender::tallyd("tallyd", 1).start(&self.world, &[])?;
        while running.next().await? != Said::Consuming {}
        let beside = async {
            let bare_s = self.bare_hset().await?;
            self.lose().await?;
            let ran = self.reconcile(&["--changed", "--force", "--yes"]).await?;
            Ok::<(f64, Ran), anyhow::Error>((bare_s, ran))
        };
        let talking = async {
            loop {
                if let Err(error) = running.next().await {
                    return error;
                }
            }
        };
        let ran = tokio::select! {
            measured = beside => measured?,
            error = talking => return Err(error),
            arrived = self.arrive() => return arrived.and(Err(anyhow!("likes no longer arrive"))),
        };
        wait::until("the queue is empty", EMPTY_MAX, LOOK_EVERY, async || {
            Ok(self.world.assert_drained().await.is_ok())
        })
        .await?;
        running.stop().await?;
        self.forget_new_rows().await?;
        Ok(ran)
    }

    /// Removes the rows that a drain wrote to `like_record`, counts `counter` again from the remaining rows, and loads
    /// Redis. After this, the next round starts with the same data.
    async fn forget_new_rows(&self) -> Result<()> {
        sqlx::query("DELETE FROM like_record WHERE update_at > '2026-01-01'").execute(&self.world.pool).await?;
        sqlx::query("TRUNCATE counter").execute(&self.world.pool).await?;
        count(&self.world).await?;
        self.lose().await?;
        self.reconcile(&["--full"]).await?.expect_exact(self.targets)?;
        Ok(())
    }
}

impl Ran {
    /// Fails unless exactly `targets` targets were compared and all of them are right.
    pub fn expect_exact(self, targets: u64) -> Result<Self> {
        ensure!(
            (self.checked, self.exact) == (targets, targets),
            "{} checked, {} exact, expected {targets}",
            self.checked,
            self.exact
        );
        Ok(self)
    }
}

/// Distributes rows by Zipf 1.0: the target with rank i has 1/i of the rows of the first target.
async fn fill(world: &World, rows: u64, targets: u64) -> Result<()> {
    let harmonic: f64 = (1..=targets).map(|place| 1.0 / place as f64).sum();
    let mut values = Vec::with_capacity(ROWS_PER_STATEMENT);
    for id in 1..=targets {
        // Spreads popular targets over the ids, with a stride that has no common factor with the number of targets.
        let place = 1 + id.wrapping_mul(7_919) % targets;
        let count = ((rows as f64 / harmonic / place as f64) as u64).max(1);
        for user in 1..=count {
            // The workload that the consumer drains has 100,000 of these targets, and other users.
            values.push(format!("(1,{id},{},0,'2026-01-01')", USERS + user));
            if values.len() == ROWS_PER_STATEMENT {
                insert(world, &mut values).await?;
            }
        }
    }
    insert(world, &mut values).await?;
    count(world).await
}

async fn insert(world: &World, values: &mut Vec<String>) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let sql =
        format!("INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {}", values.join(","));
    values.clear();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await?;
    Ok(())
}

async fn count(world: &World) -> Result<()> {
    sqlx::query(
        "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) \
         SELECT kind, target_id, 1, 0, SUM(is_del = 0), MAX(update_at) FROM like_record GROUP BY kind, target_id",
    )
    .execute(&world.pool)
    .await?;
    Ok(())
}
