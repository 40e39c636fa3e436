//! Tells clients in Redis who counts which numbers, so that a site can change that while users click.
//!
//! To the daemon: A: a daemon reloads; it adds these numbers to Redis from its next batch on, and announces it. B: clients read that, within ten
//! seconds. What they count between A and B counts twice.
//!
//! To API servers: A: a daemon is told to reload, and announces the change. B: clients read it, within ten seconds, and count. C: the new
//! configuration is in force, and the daemon stops to count. What clients count between B and C counts twice. What was only published, and is
//! received after C, is not counted in Redis. Where MySQL does not have a user's last click yet, the next one can count wrongly; its event is right
//! all the same. A reconcile of what has changed makes the numbers exact.
//!
//! Each announcement has the instant at which its daemon started or was reloaded, and the newest one holds. A daemon looks every ten seconds, and
//! announces its own again where Redis has none or an older one: it was lost, or Redis went back.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, Writers};
use crate::partitions::InUse;
use crate::runtime::clock;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::servers::Servers;
use tallyd_core::model::Micros;
use tallyd_core::writers;
use tallyd_redis::Cache;

/// How often it looks whether Redis still has it.
const EVERY: Duration = Duration::from_secs(10);

/// After this clients follow an announcement: they read it every ten seconds, and have half a second for that.
const FOLLOWED: Duration = Duration::from_secs(11);

/// Messages that may wait when API servers begin to count, and rows of the outbox: daemons write as many within some seconds.
const WAITING_MAX: u64 = 10_000;

/// What a daemon announces, and since when.
#[derive(Clone, Debug)]
pub(super) struct Announcement {
    text: String,
    since: Micros,
}

impl Announcement {
    /// Decided now, with the names of that configuration.
    pub(super) fn new(writers: &Writers, config: &Config) -> Self {
        let since = clock::now();
        Self { text: writers.encode(&config.kinds, &config.metrics, since), since }
    }

    /// As the configuration says.
    pub(super) fn of(config: &Config) -> Self {
        Self::new(&Writers::from(config), config)
    }

    /// Announces it, unless Redis has a newer one.
    async fn make(&self, cache: &Cache) -> Result<()> {
        let there = cache.writers().await?;
        if there.as_deref().and_then(writers::since).is_none_or(|since| since < self.since) {
            cache.announce_writers(&self.text).await?;
        }
        Ok(())
    }
}

/// Keeps announced what was decided last, until the stop.
pub(super) async fn run(
    cache: Cache,
    mut decided: watch::Receiver<Announcement>,
    beat: Heartbeat,
    stop: CancellationToken,
) {
    let mut outage = Outage::new("announcing who counts which numbers");
    while !stop.is_cancelled() {
        let announcement = decided.borrow_and_update().clone();
        let pause = match beat.during(announcement.make(&cache)).await {
            Ok(()) => {
                outage.over();
                EVERY
            }
            Err(error) => outage.failed(&format!("{error:#}")),
        };
        tokio::select! {
            () = beat.pause(pause, &stop) => {}
            // An error: nobody is left who decides.
            Ok(()) = decided.changed() => {}
        }
    }
}

/// What the reloader decides.
pub(super) struct Decider {
    pub servers: Servers,
    pub decided: watch::Sender<Announcement>,
}

impl Decider {
    /// Prepares for `new`, which is in force next. Where API servers are to count what the daemon counts `now`, returns once they do.
    ///
    /// # Errors
    /// [`ConfigError`]: too many events or rows of the outbox wait. Or a server cannot be asked. Then `now` is announced again.
    pub(super) async fn prepare(&self, now: &Config, new: &Config, stop: &CancellationToken) -> Result<()> {
        let (before, after) = (Writers::from(now), Writers::from(new));
        if !after.hands_to_api(&before, &now.kinds, &now.metrics) {
            return Ok(());
        }
        self.little_waits().await?;
        // What goes the other way is still counted by API servers until the daemon counts it.
        let announcement = Announcement::new(&after.union(&before), new);
        let announced = announcement.make(&self.servers.cache).await;
        if announced.is_err() {
            // It may have been announced, or may be announced late.
            self.decided.send_replace(Announcement::of(now));
            return announced;
        }
        self.decided.send_replace(announcement);
        stop.run_until_cancelled(tokio::time::sleep(FOLLOWED)).await;
        Ok(())
    }

    /// Announces what is in force from now on.
    pub(super) fn decide(&self, config: &Config) {
        self.decided.send_replace(Announcement::of(config));
    }

    async fn little_waits(&self) -> Result<()> {
        const MESSAGES: &str = "ask RabbitMQ for events that wait";
        let Servers { broker, store, .. } = &self.servers;
        let in_use = InUse::read(store, broker).await?;
        let publisher = broker.connect_publisher("writers").await.context(MESSAGES)?;
        let messages = publisher.waiting(&in_use.partitions).await.context(MESSAGES)?;
        let rows = store.outbox_rows().await.context("ask MySQL for rows of the outbox that wait")?;
        if messages <= WAITING_MAX && rows <= WAITING_MAX {
            return Ok(());
        }
        let problem = format!(
            "[[rule]] writer = \"api\" where the daemon counts until now: {messages} events wait in the queues and {rows} rows in the outbox, \
             allowed are {WAITING_MAX} of each. Reload again once the daemons have caught up (tallyd status)"
        );
        Err(ConfigError(vec![problem]).into())
    }
}
