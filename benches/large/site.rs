//! Writes the data of a site with many counters to MySQL, up to a million rows in each statement. The site's daemon has
//! a separate MySQL account.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use futures_util::future::try_join_all;
use sqlx::{AssertSqlSafe, MySqlPool};
use tallyd_core::event::LikeEvent;

use crate::child::{self, Ran};
use crate::common::contender::{Contender, Said};
use crate::common::cpu::peak_rss_mib;
use crate::common::wait;
use crate::common::workload::Workload;
use crate::common::world::{Setup, World, stack};
use tallyd_testkit::scripts::ApiServer;

/// The kind `comment` has no rows of the metric `share`.
const METRICS: &str = "[kinds]\nvideo = 1\ncomment = 2\n[metrics]\nlike = 1\nshare = 2\nview = 3\n";

/// A video and a comment together have five rows in `counter`: three for the video, two for the comment.
const ROWS_OF_TARGETS: u64 = 5;

/// The number of rows that one statement inserts.
const ROWS_PER_STATEMENT: u64 = 1_000_000;

/// The benchmark changes this percentage of targets.
const CHANGED_PERCENT: u64 = 1;

/// Pause between two groups of likes.
const TURN: Duration = Duration::from_millis(20);

/// The time limit for the queue to become empty after the last like, and the time between two checks.
const EMPTY_MAX: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(50);

pub struct Site {
    pub world: World,
    /// The daemon's account. The benchmark itself uses another account.
    pub account: String,
    targets: u64,
}

impl Site {
    /// Creates the tables, with this number of rows in `counter`, and empties Redis.
    pub async fn open(name: &str, rows: u64, bucket_bits: u32) -> Result<Self> {
        let setup = Setup { metrics: METRICS, ..Setup::default() };
        let mut world = World::new(name, setup).await?;
        let account = format!("bench_{}", std::process::id());
        configure(&mut world, &account, bucket_bits).await.context("create the daemon's account")?;
        let site = Self { world, account, targets: rows / ROWS_OF_TARGETS };
        site.fill().await.context("fill MySQL")?;
        Ok(site)
    }

    pub async fn close<T>(self, measured: Result<T>) -> Result<T> {
        let removed = self.remove().await;
        self.world.close(measured.and_then(|measured| removed.map(|()| measured))).await
    }

    async fn remove(&self) -> Result<()> {
        self.flush().await?;
        let drop = format!("DROP USER IF EXISTS '{}'@'%'", self.account);
        sqlx::raw_sql(AssertSqlSafe(drop)).execute(&self.world.pool).await?;
        Ok(())
    }

    pub async fn reconcile(&self, arguments: &[&str]) -> Result<Ran> {
        child::reconcile(&self.world, arguments).await
    }

    /// Deletes everything in Redis.
    pub async fn flush(&self) -> Result<()> {
        let mut redis = self.world.redis().await?;
        redis::cmd("FLUSHALL").arg("ASYNC").exec_async(&mut redis).await?;
        Ok(())
    }

    /// Inserts the rows in key order from a sequence. Each statement is small enough for one transaction. Each video is
    /// liked by one user.
    async fn fill(&self) -> Result<()> {
        let targets = self.targets;
        println!("filling MySQL with the rows of {targets} videos and {targets} comments");
        let at = "'2025-01-01' + INTERVAL seq DIV 1000 SECOND";
        let likes = format!(
            "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) SELECT 1, 1 + seq, 1, 0, {at}"
        );
        let counters = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at)";
        let videos = format!(
            "{counters} SELECT 1, 1 + seq DIV 3, 1 + seq MOD 3, 0, IF(seq MOD 3 = 0, 1, 1 + seq MOD 1000), {at}"
        );
        let comments = format!(
            "{counters} SELECT 2, 1 + seq DIV 2, IF(seq MOD 2 = 0, 1, 3), 0, IF(seq MOD 2 = 0, 0, 1 + seq MOD 1000), {at}"
        );
        for (select, rows) in [(likes, targets), (videos, 3 * targets), (comments, 2 * targets)] {
            for from in (0..rows).step_by(usize::try_from(ROWS_PER_STATEMENT)?) {
                let last = rows.min(from + ROWS_PER_STATEMENT) - 1;
                let sql = format!("{select} FROM seq_{from}_to_{last}");
                let made = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.world.pool).await;
                made.context("insert from a sequence (only MariaDB has sequences)")?;
            }
        }
        Ok(())
    }

    /// Marks one in a hundred targets as changed, all with the same time. Returns the number of changed counters.
    pub async fn change(&self) -> Result<u64> {
        let changed = sqlx::query("UPDATE counter SET update_at = UTC_TIMESTAMP(6) WHERE target_id % 100 < ?")
            .bind(CHANGED_PERCENT)
            .execute(&self.world.pool)
            .await?;
        Ok(changed.rows_affected())
    }

    /// Empties Redis while likes arrive, and reloads it. Returns the run, and the daemon's peak memory during the run.
    pub async fn reload_under_load(&self, rate: u32) -> Result<(Ran, f64)> {
        let mut running = Contender::tallyd("tallyd", 1).start(&self.world, &[])?;
        while running.next().await? != Said::Consuming {}
        let pid = running.pid()?;
        let beside = async {
            self.flush().await?;
            self.reconcile(&["--changed", "--force", "--yes"]).await
        };
        let talking = async {
            loop {
                if let Err(error) = running.next().await {
                    return error;
                }
            }
        };
        let ran = tokio::select! {
            ran = beside => ran?,
            error = talking => return Err(error),
            arrived = self.arrive(rate) => return arrived.and(Err(anyhow!("likes no longer arrive"))),
        };
        wait::until("the queue is empty", EMPTY_MAX, LOOK_EVERY, async || {
            Ok(self.world.assert_drained().await.is_ok())
        })
        .await?;
        let peak = peak_rss_mib(pid)?;
        running.stop().await?;
        ensure!(ran.rebuild_s > 0.0, "nothing was loaded");
        Ok((ran, peak))
    }

    /// Sends likes through the client at this rate, until the task is aborted.
    async fn arrive(&self, rate: u32) -> Result<()> {
        let client = ApiServer::new(&self.world.config);
        let per_turn = usize::try_from(u128::from(rate) * TURN.as_millis() / 1_000)?;
        let (mut turn, mut likes) = (tokio::time::interval(TURN), Workload::new(1));
        loop {
            turn.tick().await;
            let some: Vec<_> = likes.by_ref().take(per_turn).collect();
            let like = async |event: &LikeEvent| {
                let counted = client.count(event.target, event.user, true, &[]).await?;
                client.publish_counted(&counted).await
            };
            try_join_all(some.iter().map(like)).await?;
        }
    }
}

/// Writes two settings into the daemon's configuration: the number of buckets, and the daemon's own account, which
/// identifies its statements.
async fn configure(world: &mut World, account: &str, bucket_bits: u32) -> Result<()> {
    let path = world.config_path();
    let text = std::fs::read_to_string(&path)?.replace("[redis]\n", &format!("[redis]\nbucket_bits = {bucket_bits}\n"));
    std::fs::write(&path, &text)?;
    world.config = tallyd_base::config::load(&path)?;
    let admin_url = stack("MYSQL_URL")?;
    let mut url = url::Url::parse(&admin_url)?;
    let password = url.password().unwrap_or_default().to_owned();
    make(&world.pool, account, &password, &world.name).await?;
    url.set_username(account).map_err(|()| anyhow!("{admin_url} can't have another account"))?;
    Ok(std::fs::write(&path, text.replace(&admin_url, url.as_str()))?)
}

async fn make(pool: &MySqlPool, account: &str, password: &str, database: &str) -> Result<()> {
    let sql = format!(
        "CREATE USER IF NOT EXISTS '{account}'@'%' IDENTIFIED BY '{password}'; GRANT ALL ON {database}.* TO '{account}'@'%'"
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await?;
    Ok(())
}
