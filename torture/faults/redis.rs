//! Faults of Redis. The server crashes, freezes, loses data, has no memory left, fails over, or runs a delayed command.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use redis::aio::MultiplexedConnection;
use tallyd_core::keys::Keys;
use tallyd_core::model::{Kind, Target, TargetId};
use tallyd_redis::Cache;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::{Allows, Fault, Server, then_undo};
use crate::checker::SEEN;
use crate::dice::Dice;
use crate::site::{Site, redis_at};
use crate::users::TARGETS;

/// The script with which a daemon repairs a counter. The script adds the measured drift (the counter's error) to the
/// counter.
const REPAIR: &str = include_str!("../../crates/redis/lua/repair.lua");

/// One of the run's free ports.
const REPLICA_PORT: u16 = 30;

/// Time limit for a repair by a daemon. Several runs can be necessary, because each run waits for events in flight.
const REPAIR_MAX: Duration = Duration::from_secs(120);

/// The time between two drifts that the fault makes.
const DRIFT_EVERY: Duration = Duration::from_secs(10);

/// How long to wait until the replica has the master's data.
const SYNC_MAX: Duration = Duration::from_secs(20);

pub fn all() -> Vec<Fault> {
    vec![
        Fault::new(
            Server::Redis,
            "redis-killed",
            "Redis gets SIGKILL, and starts with the data on its disk",
            |site, dice, hold| Box::pin(super::killed(site, dice, hold, Server::Redis)),
        ),
        Fault::new(
            Server::Redis,
            "redis-emptied",
            "Redis gets SIGKILL, and starts without data",
            |site, dice, hold| Box::pin(emptied(site, dice, hold)),
        )
        .allows(Allows::WhatOnlyRedisKnew),
        Fault::new(Server::Redis, "redis-frozen", "SIGSTOP of Redis", |site, dice, hold| {
            Box::pin(super::frozen(site, dice, hold, Server::Redis))
        }),
        Fault::new(Server::Redis, "redis-flushed", "FLUSHALL", |site, dice, hold| Box::pin(flushed(site, dice, hold)))
            .allows(Allows::WhatOnlyRedisKnew),
        Fault::new(
            Server::Redis,
            "redis-memory-full",
            "Redis has no memory left, and rejects writes",
            |site, dice, hold| Box::pin(memory_full(site, dice, hold)),
        ),
        Fault::new(Server::Redis, "redis-scripts-flushed", "SCRIPT FLUSH, twice a second", |site, dice, hold| {
            Box::pin(again(site, dice, hold, &["SCRIPT", "FLUSH"]))
        }),
        Fault::new(
            Server::Redis,
            "redis-clients-killed",
            "CLIENT KILL of all clients, twice a second",
            |site, dice, hold| Box::pin(again(site, dice, hold, &["CLIENT", "KILL", "TYPE", "normal"])),
        ),
        Fault::new(
            Server::Redis,
            "redis-repair-late",
            "a repair reaches Redis long after the daemon has stopped waiting for it",
            |site, dice, hold| Box::pin(repair_late(site, dice, hold)),
        )
        .hold(6, 20),
        Fault::new(
            Server::Redis,
            "redis-other-type",
            "keys of other types replace three buckets of counters, until the fault deletes these keys",
            |site, dice, hold| Box::pin(other_type(site, dice, hold)),
        ),
        Fault::new(
            Server::Redis,
            "redis-other-type-beside",
            "keys of other types replace the keys of a filter and of a board, until the fault deletes these keys",
            |site, dice, hold| Box::pin(other_type_beside(site, dice, hold)),
        )
        .allows(Allows::WhatOnlyRedisKnew),
        Fault::new(
            Server::Redis,
            "redis-failover",
            "a replica that lacks the newest writes becomes the master; later the old master becomes the master again",
            |site, dice, hold| Box::pin(failover(site, dice, hold)),
        )
        .allows(Allows::WhatOnlyRedisKnew),
    ]
}

async fn emptied(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    site.stack.kill(Server::Redis).await?;
    let file = site.stack.folder(Server::Redis).join("appendonlydir");
    if file.exists() {
        std::fs::remove_dir_all(file)?;
    }
    sleep(hold).await;
    site.stack.start(&[Server::Redis]).await
}

async fn flushed(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let mut redis = site.stack.redis().await?;
    let () = redis::cmd("FLUSHALL").query_async(&mut redis).await?;
    sleep(hold).await;
    Ok(())
}

async fn memory_full(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let begun = async {
        let mut redis = site.stack.redis().await?;
        let () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(1).query_async(&mut redis).await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.reset_redis()).await
}

async fn again(site: &Site, _: Dice, hold: Duration, command: &[&str]) -> Result<()> {
    let until = Instant::now() + hold;
    let mut redis = site.stack.redis().await?;
    while Instant::now() < until {
        let mut asked = redis::cmd(command[0]);
        asked.arg(&command[1..]);
        let _: redis::Value = asked.query_async(&mut redis).await?;
        sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

fn keys(site: &Site) -> Result<Keys> {
    let config = site.admin_config();
    Ok(Cache::new(&config.redis, &config.metrics)?.keys)
}

/// Replaces some buckets with keys of another type.
async fn other_type(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let keys = keys(site)?;
    let mut bucket = || u32::try_from(dice.below(u64::from(keys.buckets()))).unwrap();
    let chosen = [bucket(), bucket(), bucket()].map(|bucket| keys.counters("video", bucket));
    replaced(site, hold, &chosen).await
}

/// Replaces the keys of a target's filter and of a board with keys of another type.
async fn other_type_beside(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let keys = keys(site)?;
    let target = Target { kind: Kind(1), id: TargetId(1 + dice.below(TARGETS)) };
    let [_, config, added] = keys.filter("video", target);
    let of_board = [keys.board(SEEN, "total"), keys.board_added(SEEN), keys.board_mark(SEEN, "total")];
    let [board, places, mark] = of_board;
    replaced(site, hold, &[config, added, board, places, mark]).await
}

/// Replaces keys with keys of another type.
async fn replaced(site: &Site, hold: Duration, chosen: &[String]) -> Result<()> {
    const DELETE: &str = "if redis.call('TYPE', KEYS[1]).ok == ARGV[1] then redis.call('DEL', KEYS[1]) end";
    // The command that writes the key, and the key's type after that.
    const WRITES: [(&str, &str); 3] = [("SET", "string"), ("RPUSH", "list"), ("SADD", "set")];
    let mut redis = site.stack.redis().await?;
    let begun = async {
        for (key, (write, _)) in chosen.iter().zip(WRITES.iter().cycle()) {
            let mut pipe = redis::pipe();
            pipe.atomic().del(key).cmd(write).arg(key).arg("nothing of tallyd");
            pipe.exec_async(&mut redis).await?;
        }
        sleep(hold).await;
        Ok(())
    };
    let undo = async {
        let mut redis = site.stack.redis().await?;
        for (key, (_, of_type)) in chosen.iter().zip(WRITES.iter().cycle()) {
            let () = redis::Script::new(DELETE).key(key).arg(of_type).invoke_async(&mut redis).await?;
        }
        Ok(())
    };
    then_undo(begun, undo).await
}

/// Makes a drift (a wrong counter in Redis), and delays the repair before it reaches Redis. The run that sent the
/// repair fails. Other runs repair the drift. Then the delayed repair arrives.
async fn repair_late(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let script = redis::Script::new(REPAIR);
    let lines = &site.all_lines(Server::Redis)[1..];
    let mut redis = site.stack.redis().await?;
    for line in lines {
        line.hold_from(script.get_hash().as_bytes());
    }
    let holds = || lines.iter().any(|line| line.holds());
    let begun = async {
        let given_up = Instant::now() + REPAIR_MAX;
        while Instant::now() < given_up && !holds() {
            drift(site, &mut redis, &mut dice).await?;
            let again = Instant::now() + DRIFT_EVERY;
            while Instant::now() < again && !holds() {
                sleep(Duration::from_millis(50)).await;
            }
        }
        ensure!(holds(), "no daemon repaired anything in {REPAIR_MAX:?}");
        sleep(hold).await;
        Ok(())
    };
    let undo = async {
        // Now the delayed repair arrives. The run that sent the repair ended long ago.
        lines.iter().for_each(|line| line.release());
        sleep(Duration::from_millis(500)).await;
        lines.iter().for_each(|line| line.clear());
        Ok(())
    };
    then_undo(begun, undo).await
}

/// Changes the number of likes of one existing target, in Redis only.
async fn drift(site: &Site, redis: &mut MultiplexedConnection, dice: &mut Dice) -> Result<()> {
    const CHANGE: &str = r"
        local fields = redis.call('HKEYS', KEYS[1])
        for _, field in ipairs(fields) do
            if string.match(field, '^%d+$') then
                local first, rest = string.match(redis.call('HGET', KEYS[1], field), '^(%-?%d+)(.*)$')
                return redis.call('HSET', KEYS[1], field, string.format('%d', first + ARGV[1]) .. rest)
            end
        end";
    let pattern = format!("{}:c:{{*", site.name);
    let mut keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query_async(redis).await?;
    keys.sort();
    if keys.is_empty() {
        return Ok(());
    }
    let key = &keys[usize::try_from(dice.below(keys.len() as u64)).unwrap()];
    let by = 1 + dice.below(3);
    let _: redis::Value = redis::Script::new(CHANGE).key(key).arg(by).invoke_async(redis).await?;
    Ok(())
}

async fn failover(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let port = site.stack.port_base + REPLICA_PORT;
    let accounts = site.stack.folder(Server::Redis).join("accounts");
    let (mut replica, url) = (start_replica(port, &accounts)?, format!("redis://127.0.0.1:{port}/"));
    let (address, master) = (format!("127.0.0.1:{port}"), site.stack.host_port(Server::Redis));
    let begun = async {
        let mut new = answering(&url).await?;
        follow(&mut new, &master).await?;
        // From now on, the new master gets no more data from the old master.
        replicaof(&mut new, "NO", "ONE").await?;
        sleep(hold / 2).await;
        lead(site, &address);
        sleep(hold / 2).await;
        let mut old = site.stack.redis().await?;
        replicaof_address(&mut old, &address).await?;
        synced(&mut old).await?;
        Ok(())
    };
    let undo = async {
        // The fault blocks writes until the old master has all data of the new master.
        if let Ok(mut new) = redis_at(&url).await {
            let _: Result<(), _> =
                redis::cmd("CLIENT").arg("PAUSE").arg(1_000).arg("WRITE").query_async(&mut new).await;
            sleep(Duration::from_millis(300)).await;
        }
        site.reset_redis().await?;
        lead(site, &master);
        site.mend_lines(Server::Redis);
        Ok(())
    };
    let done = then_undo(begun, undo).await;
    replica.kill().await?;
    done
}

fn lead(site: &Site, address: &str) {
    for line in site.all_lines(Server::Redis) {
        line.lead(address.to_owned());
        line.cut();
    }
}

/// Starts a replica. `accounts` is the master's file of accounts. The replica needs this file, because replication does
/// not copy accounts.
fn start_replica(port: u16, accounts: &Path) -> Result<Child> {
    let program = ["redis-server", "valkey-server"]
        .into_iter()
        .find(|program| std::process::Command::new(program).arg("--version").output().is_ok())
        .context("find redis-server")?;
    Command::new(program)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--repl-diskless-load", "swapdb"])
        .args(["--dir", std::env::temp_dir().to_str().unwrap()])
        .arg("--aclfile")
        .arg(accounts)
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("start a replica")
}

async fn answering(url: &str) -> Result<MultiplexedConnection> {
    let until = Instant::now() + SYNC_MAX;
    loop {
        match redis_at(url).await {
            Ok(connection) => return Ok(connection),
            Err(error) => ensure!(Instant::now() < until, "the replica did not start: {error:#}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn follow(replica: &mut MultiplexedConnection, master: &str) -> Result<()> {
    replicaof_address(replica, master).await?;
    synced(replica).await
}

async fn replicaof_address(replica: &mut MultiplexedConnection, master: &str) -> Result<()> {
    let (host, port) = master.split_once(':').context("an address has a port")?;
    replicaof(replica, host, port).await
}

async fn replicaof(replica: &mut MultiplexedConnection, host: &str, port: &str) -> Result<()> {
    Ok(redis::cmd("REPLICAOF").arg(host).arg(port).query_async(replica).await?)
}

async fn synced(replica: &mut MultiplexedConnection) -> Result<()> {
    let until = Instant::now() + SYNC_MAX;
    loop {
        let info: String = redis::cmd("INFO").arg("replication").query_async(replica).await?;
        if info.contains("master_link_status:up") && info.contains("master_sync_in_progress:0") {
            return Ok(());
        }
        ensure!(Instant::now() < until, "the replica did not follow the master: {info}");
        sleep(Duration::from_millis(50)).await;
    }
}
