//! Tells clients in Redis who counts which numbers, so that a site can change that while users click.
//!
//! To the daemon: A: a daemon reloads; it adds these numbers to Redis from its next batch on, and announces it. B: clients read that, within ten
//! seconds. What they count between A and B counts twice.
//!
//! To API servers: A: a daemon is told to reload, and announces the change. B: clients read it, within ten seconds, and count. C: the new
//! configuration is in force, and the daemon stops to count. What clients count between B and C counts twice. Where MySQL does not have a user's
//! last click yet, the next one can count wrongly; its event is right all the same. A reconcile of what has changed makes the numbers exact.
//!
//! The daemon that started or reloaded last decides. Others only say it again where Redis has lost it.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, ConfigHandle, Writers};
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::servers::Servers;
use tallyd_redis::Cache;

/// How often it looks whether Redis still has it.
const EVERY: Duration = Duration::from_secs(10);

/// After this all clients follow an announcement: they read it every ten seconds, and have half a second for that.
const FOLLOWED: Duration = Duration::from_secs(11);

/// Messages that may wait when API servers begin to count: daemons write as many within a second.
const MESSAGES_MAX: u64 = 10_000;

/// Rows of the outbox that may. Each is a batch.
const ROWS_MAX: u64 = 100;

/// Announces who counts what, and keeps it announced, until the stop.
pub(super) async fn run(cache: Cache, mut live: ConfigHandle, beat: Heartbeat, stop: CancellationToken) {
    let mut outage = Outage::new("announcing who counts which numbers");
    let mut announced = None;
    while !stop.is_cancelled() {
        let config = live.current();
        let writers = Writers::from(&*config).encode(&config.kinds, &config.metrics);
        let is_known = announced.as_ref() == Some(&writers);
        let announcing = async {
            if is_known { cache.restore_writers(&writers).await } else { cache.announce_writers(&writers).await }
        };
        let pause = match beat.during(announcing).await {
            Ok(()) => {
                outage.over();
                announced = Some(writers);
                EVERY
            }
            Err(error) => outage.failed(&format!("{:#}", anyhow::Error::from(error))),
        };
        tokio::select! {
            () = beat.pause(pause, &stop) => {}
            () = live.changed() => {}
        }
    }
}

/// Prepares for `new`, which is in force next. Where API servers are to count what the daemon counts `now`, returns once they do.
///
/// # Errors
/// [`ConfigError`]: too many events or rows of the outbox wait. Or a server cannot be asked.
pub(super) async fn prepare(servers: &Servers, now: &Config, new: &Config, stop: &CancellationToken) -> Result<()> {
    let writers = Writers::from(new);
    if !writers.hands_to_api(&Writers::from(now), &now.kinds, &now.metrics) {
        return Ok(());
    }
    const MESSAGES: &str = "ask RabbitMQ for events that wait";
    let publisher = servers.broker.connect_publisher("writers").await.context(MESSAGES)?;
    let messages = publisher.waiting(&servers.broker).await.context(MESSAGES)?;
    let rows = servers.store.outbox_rows().await.context("ask MySQL for rows of the outbox that wait")?;
    if messages > MESSAGES_MAX || rows > ROWS_MAX {
        let problem = format!(
            "[[rule]] writer = \"api\" where the daemon counts until now: {messages} events wait in the queues and {rows} rows in the outbox, \
             allowed are {MESSAGES_MAX} and {ROWS_MAX}. Reload again once the daemons have caught up (tallyd status)"
        );
        return Err(ConfigError(vec![problem]).into());
    }
    servers.cache.announce_writers(&writers.encode(&new.kinds, &new.metrics)).await?;
    stop.run_until_cancelled(tokio::time::sleep(FOLLOWED)).await;
    Ok(())
}
