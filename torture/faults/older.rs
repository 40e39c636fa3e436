//! Faults that restore a server from an older copy.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tallyd_core::keys::LOADED;
use tallyd_core::model::{Target, TargetId, UserId};
use tallyd_redis::Cache;
use tokio::process::Command;
use tokio::time::{Instant, sleep};

use super::{Allows, Fault, Server, daemon, then_undo};
use crate::dice::Dice;
use crate::history::{Answer, Call, What, now};
use crate::site::Site;
use crate::users::VIDEO;
use tallyd_testkit::scripts::{ApiServer, Clicked};

/// Only this file uses targets and users with this id or higher ids.
const COLD: u64 = 3_000_000;
const USER: u64 = 3_000_000;

/// Number of targets that get likes only after the copy was taken.
const COLD_TARGETS: u64 = 20;

/// Without a full reconcile, the daemons must repair Redis within this time.
const REPAIRED_MAX: Duration = Duration::from_secs(90);

/// MySQL loses boards that were already archived. The daemons must archive these boards again within this time. Archive
/// runs are due every 15 seconds.
const ARCHIVED_MAX: Duration = Duration::from_secs(60);

/// Two schedules for full reconciles: the schedule of the site's configuration, and an empty schedule that starts no
/// full reconcile.
const FULL: (&str, &str) = ("full_cron = \"0,30 * * * * *\"", "full_cron = \"\"");

pub fn all() -> Vec<Fault> {
    vec![
        Fault::new(
            Server::Redis,
            "redis-older",
            "Redis restarts from a copy that is older than `[reconcile] overlap`",
            |site, dice, hold| Box::pin(redis(site, dice, hold)),
        )
        .allows(Allows::WhatOnlyRedisKnew)
        .hold(30, 40),
        Fault::new(Server::Mysql, "mysql-older", "MySQL is restored from a copy of its data", |site, dice, hold| {
            Box::pin(mysql(site, dice, hold))
        })
        .allows(Allows::WhatMysqlKnew),
    ]
}

async fn redis(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let folder = site.stack.folder(Server::Redis);
    let (data, copy) = (folder.join("appendonlydir"), folder.join("older"));
    let begun = async {
        fulls(site, FULL.1).await?;
        take(&data, &copy).await?;
        like_cold(site).await?;
        sleep(hold).await;
        site.stack.kill(Server::Redis).await?;
        put_back(&copy, &data)?;
        site.stack.start(&[Server::Redis]).await?;
        cold_is_right(site).await
    };
    let undo = async {
        site.stack.start(&[Server::Redis]).await?;
        fulls(site, FULL.0).await
    };
    then_undo(begun, undo).await
}

/// Sets the schedule of the daemons' full reconciles.
async fn fulls(site: &Site, when: &str) -> Result<()> {
    for daemon in &site.daemons {
        site.configure(daemon, |text| text.replace(FULL.0, when))?;
        daemon::reload(daemon, "\"reloaded\"").await?;
    }
    Ok(())
}

/// Sends likes for targets that get no other likes. If Redis loses these likes later, a reconcile finds the loss only
/// if the reconcile also compares rows that are older than the overlap.
async fn like_cold(site: &Site) -> Result<()> {
    let client = ApiServer::new(&site.direct_config());
    // Each injection of this fault uses a different user.
    let user = USER + now().unsigned_abs() / 1_000_000 % 1_000_000;
    for target in COLD..COLD + COLD_TARGETS {
        let begin = now();
        let clicked = client.like(Target { kind: VIDEO, id: TargetId(target) }, UserId(user), &[]).await?;
        let event = match clicked {
            Clicked::Published(event) => event,
            clicked => clicked.counted().context("a new user's like must count")?.event,
        };
        let (what, answer) = (What::Like { target, user, liked: true }, Answer::Done { at: event.at.0 });
        site.recorder.call(Call { begin, end: now(), who: u32::MAX, what, answer });
    }
    Ok(())
}

/// Waits until Redis and MySQL have equal counts for these targets. Targets that are missing in Redis are ignored.
async fn cold_is_right(site: &Site) -> Result<()> {
    let config = site.admin_config();
    let keys = Cache::new(&config.redis, &config.metrics)?.keys;
    let (until, mut redis) = (Instant::now() + REPAIRED_MAX, site.stack.redis().await?);
    let sql = "SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 1 AND target_id BETWEEN ? AND ? GROUP BY target_id";
    loop {
        let counters: Vec<(u64, i64)> =
            sqlx::query_as(sql).bind(COLD).bind(COLD + COLD_TARGETS - 1).fetch_all(site.pool()).await?;
        let (mut wrong, mut known) = (Vec::new(), 0);
        for (id, likes) in &counters {
            let bucket = keys.bucket(Target { kind: VIDEO, id: TargetId(*id) });
            let key = keys.counters("video", bucket);
            let (loaded, number): (Option<String>, Option<String>) =
                redis::cmd("HMGET").arg(key).arg(LOADED).arg(id).query_async(&mut redis).await?;
            // Until the bucket is loaded, clients read MySQL. The daemons load buckets at most three times an hour.
            if loaded.is_none() {
                continue;
            }
            known += 1;
            let number = number.as_deref().and_then(|values| values.split(',').next()?.parse().ok()).unwrap_or(0);
            wrong.extend((number != *likes).then_some((*id, number, *likes)));
        }
        if wrong.is_empty() && known > 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "{REPAIRED_MAX:?} after Redis came back, {} of {known} targets in Redis are wrong: target, Redis, MySQL {:?}",
            wrong.len(),
            wrong.first()
        );
        sleep(Duration::from_millis(500)).await;
    }
}

async fn mysql(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let folder = site.stack.folder(Server::Mysql);
    let (data, copy) = (folder.join("data"), folder.join("older"));
    let begun = async {
        site.stack.stop(Server::Mysql).await?;
        take(&data, &copy).await?;
        site.stack.start(&[Server::Mysql]).await?;
        sleep(hold).await;
        // As in a real restore, no daemon runs during the restore. After the restore, the daemons repair the remaining
        // data.
        for daemon in &site.daemons {
            daemon.stop().await?;
        }
        site.stack.stop(Server::Mysql).await?;
        site.lost_at.store(now(), Ordering::Relaxed);
        put_back(&copy, &data)?;
        site.stack.start(&[Server::Mysql]).await?;
        Ok(())
    };
    let undo = async {
        site.stack.start(&[Server::Mysql]).await?;
        for daemon in &site.daemons {
            daemon.start().await;
        }
        Ok(())
    };
    then_undo(begun, undo).await?;
    archived_again(site).await
}

/// Waits for an archive run after the restore. Before this archive run, the boards that were archived after the copy
/// was taken exist only in Redis. If another fault emptied Redis before the archive run, these boards would be lost
/// permanently.
async fn archived_again(site: &Site) -> Result<()> {
    const LAST: &str = "SELECT CAST(COALESCE(MAX(run), 0) AS UNSIGNED) FROM job_run WHERE mode = 'closed'";
    const DONE: &str =
        "SELECT CAST(COALESCE(MAX(run), 0) AS UNSIGNED) FROM job_run WHERE mode = 'closed' AND outcome = 'done'";
    let restored: u64 = sqlx::query_scalar(LAST).fetch_one(site.pool()).await?;
    let until = Instant::now() + ARCHIVED_MAX;
    loop {
        let run: u64 = sqlx::query_scalar(DONE).fetch_one(site.pool()).await?;
        if run > restored {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "no archive run after run {restored} finished within {ARCHIVED_MAX:?} after the restore"
        );
        sleep(Duration::from_millis(500)).await;
    }
}

async fn take(data: &Path, copy: &Path) -> Result<()> {
    if copy.exists() {
        // This copy is from an earlier injection that failed.
        std::fs::remove_dir_all(copy)?;
    }
    let copied = Command::new("cp").args(["-a", "--sparse=always"]).arg(data).arg(copy).output().await?;
    ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
    Ok(())
}

fn put_back(copy: &Path, data: &Path) -> Result<()> {
    std::fs::remove_dir_all(data)?;
    Ok(std::fs::rename(copy, data)?)
}
