//! Faults of MySQL. The server crashes, freezes or rejects writes. Other clients lock rows, or use all of the server's
//! connections.

use std::time::Duration;

use anyhow::Result;
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};
use tokio::time::{Instant, sleep, sleep_until};

use super::{Fault, Server, then_undo};
use crate::dice::Dice;
use crate::site::Site;

/// MariaDB accepts no lower value for `max_connections`.
const CONNECTIONS_LEAST: u64 = 10;

/// Number of other clients that lock rows at the same time.
const RIVALS: u64 = 3;

pub fn all() -> Vec<Fault> {
    vec![
        Fault::new(Server::Mysql, "mysql-killed", "MySQL gets SIGKILL and is started again", |site, dice, hold| {
            Box::pin(super::killed(site, dice, hold, Server::Mysql))
        }),
        Fault::new(Server::Mysql, "mysql-frozen", "SIGSTOP of MySQL", |site, dice, hold| {
            Box::pin(super::frozen(site, dice, hold, Server::Mysql))
        })
        .hold(8, 20),
        Fault::new(Server::Mysql, "mysql-read-only", "MySQL is read-only", |site, dice, hold| {
            Box::pin(read_only(site, dice, hold))
        }),
        Fault::new(
            Server::Mysql,
            "mysql-connections-full",
            "other clients use all connections of MySQL",
            |site, dice, hold| Box::pin(connections_full(site, dice, hold)),
        ),
        Fault::new(
            Server::Mysql,
            "mysql-connections-killed",
            "KILL of all other connections, every second",
            |site, dice, hold| Box::pin(connections_killed(site, dice, hold)),
        ),
        Fault::new(
            Server::Mysql,
            "mysql-rivals",
            "other clients lock rows of counters and likes, so there are deadlocks and lock waits",
            |site, dice, hold| Box::pin(rivals(site, dice, hold)),
        ),
        Fault::new(
            Server::Mysql,
            "mysql-partitions-locked",
            "another client holds the partitions' rows for seconds",
            |site, dice, hold| Box::pin(partitions_locked(site, dice, hold)),
        ),
    ]
}

async fn read_only(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let begun = async {
        site.stack.mysql().await?.execute("SET GLOBAL read_only = 1").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.reset_mysql()).await
}

async fn connections_full(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let begun = async {
        let mut root = site.stack.mysql().await?;
        root.execute(AssertSqlSafe(format!("SET GLOBAL max_connections = {CONNECTIONS_LEAST}"))).await?;
        let mut rivals = Vec::new();
        // Daemons and users lose their connections. When one of them reconnects, it loses the new connection, too. In the
        // end the rivals hold all connections.
        while Instant::now() < until {
            if let Ok(rival) = site.stack.rival().await {
                rivals.push(rival);
            } else if (rivals.len() as u64) < CONNECTIONS_LEAST - 2 {
                kill_others(&mut root, &site.name, &mut rivals).await?;
            }
            sleep(Duration::from_millis(50)).await;
        }
        // To undo the fault, the run needs a connection. Daemons and users are also waiting for a free connection.
        let usual = format!("SET GLOBAL max_connections = {}", crate::site::CONNECTIONS);
        let _ = root.execute(AssertSqlSafe(usual)).await;
        for rival in rivals {
            let _ = rival.close().await;
        }
        Ok(())
    };
    then_undo(begun, site.reset_mysql()).await
}

async fn connections_killed(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let mut root = site.stack.mysql().await?;
    while Instant::now() < until {
        kill_others(&mut root, &site.name, &mut []).await?;
        sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// Ends all connections to the run's database, except those of the fault's clients and of root.
async fn kill_others(root: &mut MySqlConnection, name: &str, rivals: &mut [MySqlConnection]) -> Result<()> {
    let mut spared = Vec::new();
    for rival in rivals {
        let id: u64 = sqlx::query_scalar("SELECT CAST(CONNECTION_ID() AS UNSIGNED)").fetch_one(rival).await?;
        spared.push(id);
    }
    let sql = "SELECT CAST(id AS UNSIGNED) FROM information_schema.processlist \
        WHERE db = ? AND user <> SUBSTRING_INDEX(USER(), '@', 1)";
    let ids: Vec<u64> = sqlx::query_scalar(sql).bind(name).fetch_all(&mut *root).await?;
    for id in ids.into_iter().filter(|id| !spared.contains(id)) {
        // An error is ignored, because the connection may have ended already.
        let _ = root.execute(AssertSqlSafe(format!("KILL {id}"))).await;
    }
    Ok(())
}

async fn rivals(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let rivals = (0..RIVALS).map(|_| rival(site, Dice::new(dice.below(u64::MAX)), until));
    futures_util::future::try_join_all(rivals).await?;
    Ok(())
}

/// Locks rows in random order. Retries after a deadlock.
async fn rival(site: &Site, mut dice: Dice, until: Instant) -> Result<()> {
    let mut connection = site.stack.rival().await?;
    connection.execute("SET SESSION innodb_lock_wait_timeout = 2").await?;
    while Instant::now() < until {
        connection.execute("START TRANSACTION").await?;
        for _ in 0..2 + dice.below(6) {
            let sql = match dice.below(3) {
                0 => format!("UPDATE counter SET value = value WHERE kind = 1 AND target_id = {}", 1 + dice.below(100)),
                1 => format!(
                    "SELECT * FROM like_record WHERE kind = 1 AND target_id = {} FOR UPDATE",
                    1 + dice.below(100)
                ),
                _ => format!("SELECT * FROM partition_owner WHERE `partition` = {} FOR UPDATE", dice.below(3)),
            };
            if connection.execute(AssertSqlSafe(sql)).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(dice.below(200))).await;
        }
        connection.execute("ROLLBACK").await?;
        sleep(Duration::from_millis(dice.below(100))).await;
    }
    Ok(())
}

async fn partitions_locked(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    while Instant::now() < until {
        // Some locks last less than a batch's time limit, and some last longer.
        let held = Duration::from_millis(500 + dice.below(8_000));
        site.stack.lock_partitions(Instant::now() + held).await?;
        sleep_until(until.min(Instant::now() + Duration::from_millis(500))).await;
    }
    Ok(())
}
