//! Faults of RabbitMQ: the broker crashes, freezes, blocks publishers, closes connections and channels, and loses a
//! queue.

use std::time::Duration;

use anyhow::Result;
use tallyd_rabbitmq::Broker;
use tokio::time::{Instant, sleep, sleep_until};

use super::{Allows, Fault, Server, then_undo};
use crate::dice::Dice;
use crate::site::{Daemon, PARTITIONS, Site};

/// Number of kills, which must be higher than the delivery limit of a queue.
const DEATHS: usize = 25;

/// Time limit for all kills together.
const DYING_MAX: Duration = Duration::from_secs(300);

/// How long to wait until a killed daemon runs again.
const LISTENING_MAX: Duration = Duration::from_secs(10);

pub fn all() -> Vec<Fault> {
    vec![
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-killed",
            "RabbitMQ gets SIGKILL and is started again",
            |site, dice, hold| Box::pin(super::killed(site, dice, hold, Server::Rabbitmq)),
        ),
        Fault::new(Server::Rabbitmq, "rabbitmq-frozen", "SIGSTOP of RabbitMQ", |site, dice, hold| {
            Box::pin(super::frozen(site, dice, hold, Server::Rabbitmq))
        })
        .hold(8, 20),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-stopped",
            "stop_app, which closes all connections, then start_app",
            |site, dice, hold| Box::pin(stopped(site, dice, hold)),
        ),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-stopped-redis-flushed",
            "stop_app, then FLUSHALL of Redis, then start_app",
            |site, dice, hold| Box::pin(stopped_and_flushed(site, dice, hold)),
        )
        .allows(Allows::WhatOnlyRedisKnew),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-memory-alarm",
            "RabbitMQ's memory alarm: publishers are blocked",
            |site, dice, hold| Box::pin(memory_alarm(site, dice, hold)),
        ),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-disk-alarm",
            "RabbitMQ's disk alarm: publishers are blocked",
            |site, dice, hold| Box::pin(disk_alarm(site, dice, hold)),
        ),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-connections-closed",
            "close_all_connections every two seconds",
            |site, dice, hold| Box::pin(connections_closed(site, dice, hold)),
        ),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-ack-timeout",
            "RabbitMQ closes a channel if its consumer does not acknowledge a message within a second",
            |site, dice, hold| Box::pin(ack_timeout(site, dice, hold)),
        )
        .hold(10, 20),
        Fault::new(
            Server::Rabbitmq,
            "rabbitmq-queue-deleted",
            "queues are deleted with their messages",
            |site, dice, hold| Box::pin(queue_deleted(site, dice, hold)),
        )
        .allows(Allows::WhatWasQueued),
        Fault::new(
            Server::Daemon,
            "twenty-five-deaths",
            "all daemons are killed 25 times, each with as many messages in flight as allowed",
            |site, dice, hold| Box::pin(deaths(site, dice, hold)),
        )
        .hold(60, 90),
    ]
}

async fn stopped(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let begun = async {
        site.stack.rabbitmqctl(&["stop_app"]).await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, async { site.stack.rabbitmqctl(&["start_app"]).await.map(drop) }).await
}

async fn stopped_and_flushed(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let begun = async {
        site.stack.rabbitmqctl(&["stop_app"]).await?;
        let mut redis = site.stack.redis().await?;
        let () = redis::cmd("FLUSHALL").query_async(&mut redis).await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, async { site.stack.rabbitmqctl(&["start_app"]).await.map(drop) }).await
}

async fn memory_alarm(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let watermark = |limit: &'static str| async move {
        site.stack.rabbitmqctl(&["set_vm_memory_high_watermark", limit]).await.map(drop)
    };
    let begun = async {
        watermark("0.0000001").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, watermark("0.4")).await
}

async fn disk_alarm(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let limit =
        |limit: &'static str| async move { site.stack.rabbitmqctl(&["set_disk_free_limit", limit]).await.map(drop) };
    let begun = async {
        limit("1000000GB").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, limit("50MB")).await
}

async fn connections_closed(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    while Instant::now() < until {
        site.stack.rabbitmqctl(&["close_all_connections", "torture"]).await?;
        sleep(Duration::from_secs(2)).await;
    }
    Ok(())
}

/// Sets how long a consumer can keep a message without acknowledging it. A channel reads this limit when it opens.
async fn patience(site: &Site, timeout_ms: u32, tick_ms: u32) -> Result<()> {
    let set = format!(
        "application:set_env(rabbit, consumer_timeout, {timeout_ms}), \
         application:set_env(rabbit, channel_tick_interval, {tick_ms})."
    );
    site.stack.rabbitmqctl(&["eval", &set]).await?;
    site.stack.rabbitmqctl(&["close_all_connections", "torture"]).await.map(drop)
}

async fn ack_timeout(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let begun = async {
        patience(site, 1_000, 500).await?;
        while Instant::now() < until {
            sleep(Duration::from_secs(1)).await;
            // The batches and their messages wait for this lock. If MySQL is unreachable, the batches wait without this
            // lock.
            let locked = site.stack.lock_partitions(Instant::now() + Duration::from_secs(3)).await;
            if locked.is_err() {
                sleep(Duration::from_secs(1)).await;
            }
        }
        Ok(())
    };
    then_undo(begun, patience(site, 1_800_000, 60_000)).await
}

async fn queue_deleted(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    while Instant::now() < until {
        let broker = Broker::new(&site.admin_config().amqp)?;
        let queue = broker.queue(u16::try_from(dice.below(u64::from(PARTITIONS))).unwrap());
        let link = broker.connect("torture").await?;
        let options = lapin::options::QueueDeleteOptions::default();
        link.call("delete a queue", link.channel.queue_delete(queue.into(), options)).await?;
        sleep_until(until.min(Instant::now() + Duration::from_millis(1_000 + dice.below(4_000)))).await;
    }
    Ok(())
}

/// Kills all daemons again and again. During the kills, a lock in MySQL prevents the daemons from writing batches. So
/// each killed daemon has received the allowed maximum of messages, and has written no message.
async fn deaths(site: &Site, _: Dice, _: Duration) -> Result<()> {
    let dying = async {
        for _ in 0..DEATHS {
            let logged: Vec<usize> = site.daemons.iter().map(|daemon| daemon.logged()).collect();
            for daemon in &site.daemons {
                daemon.kill().await?;
            }
            listening(site, &logged).await;
            // Gives the broker time to send its messages.
            sleep(Duration::from_millis(500)).await;
        }
        anyhow::Ok(())
    };
    let lock = async {
        loop {
            // If MySQL is unreachable, no batch is written either.
            let _ = site.stack.lock_partitions(Instant::now() + DYING_MAX).await;
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        died = dying => died,
        () = lock => Ok(()),
    }
}

/// Waits until the log of one daemon says that this daemon consumes all partitions. Reads only the part of each log
/// after the given length. The wait has a time limit, because the broker can be unreachable.
async fn listening(site: &Site, logged: &[usize]) {
    let until = Instant::now() + LISTENING_MAX;
    let all = usize::from(PARTITIONS);
    let listens =
        |daemon: &Daemon, logged: usize| daemon.log_from(logged).matches(r#""event":"consuming""#).count() >= all;
    while Instant::now() < until && !site.daemons.iter().zip(logged).any(|(daemon, logged)| listens(daemon, *logged)) {
        sleep(Duration::from_millis(50)).await;
    }
}
