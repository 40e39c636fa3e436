//! Announces in Redis who counts each metric: the API servers or the daemon. So a site can change the writer of a
//! metric while users click.
//!
//! Each change is announced with an instant in the near future. Until then, all clients read the announcement. At this
//! instant, all clients change together, because Redis remembers the clicks that clients count, but not the clicks that
//! they only publish.
//!
//! Handover to the daemon. A: a daemon reloads. The daemon adds the counts of these metrics to Redis from its next
//! batch on, and announces the handover. B: clients stop counting. Each click that a client counts between A and B is
//! counted twice in Redis.
//!
//! Handover to API servers. A: a daemon gets the signal to reload, and announces the handover. B: clients start to
//! count. C: the new configuration is in force, and the daemon stops counting. Each click that a client counts between B
//! and C is counted twice in Redis. An event that a client published but did not count, and that the daemon receives
//! after C, is not counted in Redis. If MySQL does not have a user's last click yet, a client can count the next click
//! wrongly in Redis, although the click's event is correct. A reconcile of the changed targets makes the counters exact.
//!
//! Each announcement contains the instant at which its daemon started or was reloaded. The newest announcement is
//! valid. If several daemons change the same writers, the first announcement stays valid. Every ten seconds, a daemon
//! checks Redis. The daemon announces again if Redis has lost the announcement, or if Redis fell back to an older state
//! with an older announcement.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, Writers};
use crate::partitions::InUse;
use crate::runtime::clock;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::servers::Servers;
use tallyd_core::kinds::{Kinds, Metrics};
use tallyd_core::model::Micros;
use tallyd_core::writers::{self, Announced};
use tallyd_redis::Cache;

/// Interval between checks that Redis still has the announcement.
const EVERY: Duration = Duration::from_secs(10);

/// Time from an announcement to the instant at which clients change. By then, all clients have read the announcement:
/// they read it every ten seconds, and a read takes at most half a second.
const READ: Duration = Duration::from_secs(11);

/// Time for clients whose clocks are late.
const SKEW: Duration = Duration::from_secs(1);

/// API servers can't begin to count while more than this number of messages wait, or while more than this number of
/// outbox rows wait. The daemons can write this number of messages within a few seconds.
const WAITING_MAX: u64 = 10_000;

/// A reload waits for this time until RabbitMQ says how many events wait, and asks at this interval.
const ANSWER_MAX: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A daemon's announcement, and the instant at which the daemon decided on it.
#[derive(Clone, Debug)]
pub(super) struct Announcement {
    announced: Announced,
    kinds: Kinds,
    metrics: Metrics,
    since: Micros,
}

impl Announcement {
    /// Announces the writers that `config` defines, from now on.
    pub(super) fn of(config: &Config) -> Self {
        Self::change(Writers::from(config), Writers::from(config), config)
    }

    /// Announces that the writers change as soon as all clients have read this. The names of kinds and metrics come
    /// from `config`.
    fn change(before: Writers, after: Writers, config: &Config) -> Self {
        let since = clock::now();
        let announced = match before == after {
            true => Announced::now(after),
            false => Announced::now(before).then(since.after(READ), after),
        };
        Self { announced, kinds: config.kinds.clone(), metrics: config.metrics.clone(), since }
    }

    /// Writes the announcement to Redis, unless Redis has a newer one or one that leads to the same writers.
    async fn make(&self, cache: &Cache) -> Result<()> {
        let there = cache.writers().await?;
        let is_needed = there.is_none_or(|text| {
            let leads_to = Announced::decode(&text, &self.kinds, &self.metrics);
            writers::since(&text).is_none_or(|since| since < self.since)
                && leads_to.is_none_or(|there| there.last() != self.announced.last())
        });
        if is_needed {
            cache.announce_writers(&self.announced.encode(&self.kinds, &self.metrics, self.since)).await?;
        }
        Ok(())
    }
}

/// Keeps the latest announcement in Redis until `stop` is cancelled.
pub(super) async fn run(
    cache: Cache,
    mut decided: watch::Receiver<Announcement>,
    beat: Heartbeat,
    stop: CancellationToken,
) {
    let mut outage = Outage::new("announcing in Redis who counts each metric");
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
            // `Err` means that no further announcement can come.
            Ok(()) = decided.changed() => {}
        }
    }
}

/// Announces the writers when the configuration is reloaded.
pub(super) struct Decider {
    pub servers: Servers,
    pub decided: watch::Sender<Announcement>,
}

impl Decider {
    /// Prepares the change from the configuration `now` to the configuration `new`. If API servers must take over
    /// metrics from the daemon, the call returns after the API servers have started to count.
    ///
    /// # Errors
    /// [`ConfigError`] if too many events or outbox rows wait. Also fails if a server is unreachable. If clients can
    /// have read an announcement of `new` before the failure, the call announces `now` again.
    pub(super) async fn prepare(&self, now: &Config, new: &Config, stop: &CancellationToken) -> Result<()> {
        let (before, after) = (Writers::from(now), Writers::from(new));
        if !after.hands_to_api(&before, &now.kinds, &now.metrics) {
            return Ok(());
        }
        self.little_waits().await?;
        // API servers continue to count the metrics that the daemon takes over, until the daemon counts them.
        let announcement = Announcement::change(before.clone(), before.union(&after), new);
        let announced = announcement.make(&self.servers.cache).await;
        if announced.is_err() {
            // Redis may have received the announcement already, or may receive it later.
            self.decided.send_replace(Announcement::of(now));
            return announced;
        }
        self.decided.send_replace(announcement);
        stop.run_until_cancelled(tokio::time::sleep(READ + SKEW)).await;
        Ok(())
    }

    /// Announces the writers after the change from the configuration `before` to the configuration `now`, which is in
    /// force.
    pub(super) fn decide(&self, before: &Config, now: &Config) {
        let (before, after) = (Writers::from(before), Writers::from(now));
        self.decided.send_replace(Announcement::change(before.union(&after), after, now));
    }

    async fn little_waits(&self) -> Result<()> {
        const MESSAGES: &str = "read the number of waiting events from RabbitMQ";
        let Servers { broker, store, .. } = &self.servers;
        let in_use = InUse::read(store, broker).await?;
        let publisher = broker.connect_publisher("writers").await.context(MESSAGES)?;
        let began = Instant::now();
        let messages = loop {
            match publisher.waiting(&in_use.partitions).await.context(MESSAGES)? {
                Some(messages) => break messages,
                None if began.elapsed() > ANSWER_MAX => {
                    let problem = "[[rule]] changes writer from the daemon to \"api\": RabbitMQ does not say how many events wait in the queues. Reload again when each queue has a consumer";
                    return Err(ConfigError(vec![problem.to_owned()]).into());
                }
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        };
        let rows = store.outbox_rows().await.context("read the number of outbox rows from MySQL")?;
        if messages <= WAITING_MAX && rows <= WAITING_MAX {
            return Ok(());
        }
        let problem = format!(
            "[[rule]] changes writer from the daemon to \"api\": {messages} events wait in the queues and {rows} rows in the outbox, \
             at most {WAITING_MAX} of each are allowed. Reload again when `tallyd status` shows fewer"
        );
        Err(ConfigError(vec![problem]).into())
    }
}
