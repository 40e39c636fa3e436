//! Simulates the site: many users click at the same time, at a steady pace. An API server of the test kit counts or publishes the
//! clicks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use tallyd_base::config::Config;
use tallyd_client::Event;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tallyd_rabbitmq::Broker;
use tallyd_testkit::scripts::{ApiServer, Clicked, Counted, LikeError};
use tokio::sync::RwLock;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::dice::{Dice, Zipf};
use crate::model::{Model, Pair, TARGETS, USERS};

/// The kinds of targets, with the codes that dev/demo writes into the configuration.
///
/// The daemon counts likes of videos, which is the default: the site only publishes them. The site's API servers count
/// likes of articles in Redis, before they publish them.
pub const VIDEO: Kind = Kind(1);
pub const ARTICLE: Kind = Kind(2);

/// Returns the kind's name in the configuration.
pub fn name(kind: Kind) -> &'static str {
    if kind == VIDEO { "video" } else { "article" }
}

/// The percentage of clicks on articles.
const ARTICLES_PERCENT: u64 = 25;

/// The number of clicks that are in flight at the same time.
const IN_FLIGHT: u64 = 64;

/// The percentage of clicks by users who return to a target, mostly to unlike it.
const AGAIN_PERCENT: u64 = 20;

/// A click can be late. If the delay is at most this time, a user makes the click immediately. If the delay is longer,
/// the users skip the click.
const BEHIND_MAX: Duration = Duration::from_millis(100);

/// The number of attempts to publish a click while the broker is unreachable, and the pause between two attempts.
const PUBLISH_TRIES: u32 = 40;
const PUBLISH_PAUSE: Duration = Duration::from_millis(500);

/// The site, and the model of its clicks.
pub struct Site {
    pub server: ApiServer,
    pub broker: Broker,
    /// The demo closes this gate while it compares articles in Redis with the model, so that no click is in flight to Redis.
    pub gate: RwLock<()>,
    /// The count of clicks that the broker has confirmed.
    pub published: AtomicU64,
    model: Mutex<Model>,
    zipf: Zipf,
    next: Mutex<Instant>,
    /// The time from one click to the next.
    pace: Duration,
}

impl Site {
    pub fn new(config: &Config, clicks_a_second: u32) -> Result<Self> {
        Ok(Self {
            server: ApiServer::new(config),
            broker: Broker::new(&config.amqp)?,
            gate: RwLock::default(),
            published: AtomicU64::default(),
            model: Mutex::default(),
            zipf: Zipf::new(TARGETS),
            next: Mutex::new(Instant::now()),
            pace: Duration::from_secs(1) / clicks_a_second.max(1),
        })
    }

    /// Locks the model. If another task panicked while it held the lock, the demo is already ending.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the users. Each task ends at `stop`, or with an error.
    pub fn start(self: &Arc<Self>, stop: &CancellationToken) -> JoinSet<Result<()>> {
        let mut users = JoinSet::new();
        for stream in 0..IN_FLIGHT {
            let (site, stop) = (Arc::clone(self), stop.clone());
            users.spawn(async move {
                let mut dice = Dice::new(stream);
                while stop.run_until_cancelled(site.turn()).await.is_some() {
                    site.click(&mut dice).await?;
                }
                Ok(())
            });
        }
        users
    }

    /// Waits until the next click is due.
    async fn turn(&self) {
        let turn = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            *next = (*next + self.pace).max(now.checked_sub(BEHIND_MAX).unwrap_or(now));
            *next
        };
        tokio::time::sleep_until(turn).await;
    }

    /// Makes one click of a user, and publishes it until the broker confirms.
    async fn click(&self, dice: &mut Dice) -> Result<()> {
        let kind = if dice.below(100) < ARTICLES_PERCENT { ARTICLE } else { VIDEO };
        let (pair, liked) = self.choose(kind, dice);
        if kind == ARTICLE {
            let counted = self.count(pair, liked).await?;
            return self.publish(&counted.event).await;
        }
        let Pair { target, user } = pair;
        let server = &self.server;
        let clicked = if liked { server.like(target, user, &[]).await } else { server.unlike(target, user, &[]).await };
        let event = match clicked {
            Ok(Clicked::Published(event)) => {
                self.published.fetch_add(1, Ordering::Relaxed);
                event
            }
            Err(LikeError::NotConfirmed { event, .. }) => {
                self.publish(&event).await?;
                event
            }
            other => bail!("a click on a video should only be published: {other:?}"),
        };
        self.model().clicked(&event);
        Ok(())
    }

    /// Counts a click on an article in Redis. The caller must publish its event.
    pub async fn count(&self, pair: Pair, liked: bool) -> Result<Counted> {
        let _open = self.gate.read().await;
        let counted = self.server.count(pair.target, pair.user, liked, &[]).await?;
        self.model().clicked(&counted.event);
        Ok(counted)
    }

    /// Chooses the next click. Returns the pair, and whether the click is a like.
    pub fn choose(&self, kind: Kind, dice: &mut Dice) -> (Pair, bool) {
        loop {
            let again = if dice.below(100) < AGAIN_PERCENT { self.model().any(kind, dice) } else { None };
            let pair = again.unwrap_or_else(|| Pair {
                target: Target { kind, id: TargetId(self.zipf.roll(dice)) },
                user: UserId(dice.below(USERS) + 1),
            });
            if let Some(liked) = self.model().begin(pair) {
                return (pair, liked);
            }
        }
    }

    /// Publishes until the broker confirms. A repeated event is harmless.
    pub async fn publish(&self, event: &LikeEvent) -> Result<()> {
        let mut tries = 1;
        while let Err(error) = self.server.publish(&Event::Like(*event), None).await {
            if tries == PUBLISH_TRIES {
                return Err(error.into());
            }
            tries += 1;
            tokio::time::sleep(PUBLISH_PAUSE).await;
        }
        self.published.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
