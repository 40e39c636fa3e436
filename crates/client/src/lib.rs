//! The Rust client of tallyd for API servers. A [`Client`] publishes events: a user liked a target, or another number
//! changed. The client also reads likes, numbers and boards.
//!
//! The daemon counts: a call only publishes an event, and `at` is the time of this machine's clock. If a number's rule
//! is `writer = "api"`, [`Client::like`] and [`Client::add`] refuse it. Such a site calls the scripts in lua/ itself
//! (docs/scripts.md), and then publishes the event with [`Client::publish`] (decision 0043).
//!
//! Ids, targets and instants are types of `tallyd_core::model`, and exported here too. The ids of targets and users are
//! 1 to 2^63-1: the daemon rejects other events.

#![warn(missing_docs, unreachable_pub)]

pub mod boards;
mod changes;
mod error;
mod event;
mod filters;
pub mod gateway;
mod groups;
mod liked;
mod likes;
mod mysql;
mod names;
mod numbers;
mod settings;
mod site;
mod traced;

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::Semaphore;

pub use error::{ClientError, PublishError};
pub use event::{Change, Changed, Event, NUMBER_MAX};
use filters::Filters;
use groups::Groups;
pub use liked::{Liked, LikedBy, STATUS_TARGETS_MAX};
pub use likes::Clicked;
use mysql::Breaker;
pub use numbers::{Looked, Number, Numbers, READ_TARGETS_MAX, Source};
pub use settings::{ClickLimits, Settings};
use site::{Known, Sites, Unchecked};
use tallyd_core::card::Card;
pub use tallyd_core::card::CardError;
pub use tallyd_core::model::{Kind, Metric, Micros, Target, TargetId, UserId};
use tallyd_core::site::Site;
use tallyd_mysql::Store;
use tallyd_rabbitmq::Broker;
pub use tallyd_rabbitmq::BrokerError;
use tallyd_rabbitmq::config::Amqp;
use tallyd_redis::Cache;
pub use traced::traced;

/// The result of a call.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

const CONNECTIONS: u32 = 16;

/// The largest number of calls that read numbers from MySQL at the same time. Such a call reads numbers that Redis has
/// lost.
const READS: usize = 4;

/// Publishes likes and changes of other numbers, and reads. Share one client between all requests of a process, in an
/// [`Arc`]. The client has one connection to Redis (or to each node of a Cluster), one connection to RabbitMQ, and up to
/// 16 connections to MySQL. These connections serve many calls at the same time.
pub struct Client {
    sites: Arc<Sites>,
    unchecked_kinds: Unchecked,
    unchecked_metrics: Unchecked,
    groups: Groups,
    store: Store,
    numbers_breaker: Breaker,
    likes_breaker: Breaker,
    /// Limits how many calls can read numbers from MySQL at the same time.
    reads: Semaphore,
    limits: ClickLimits,
    filters: Filters,
}

impl Client {
    /// Makes a client for the servers in `settings`. The client connects with the first call, and connects again after
    /// each failure.
    ///
    /// The client reads the site card with the first call, at an unknown name, and every minute. If it can't read the
    /// card, it uses the last card. Without any card it publishes nevertheless: then RabbitMQ and the daemon check the
    /// events. All numbers are unknown until the client has seen a card.
    ///
    /// # Errors
    ///
    /// An address is invalid. The call does not connect to a server.
    pub fn new(settings: &Settings) -> Result<Self> {
        let Settings { amqp, mysql, redis, limits, group } = settings;
        Ok(Self {
            sites: Arc::new(Sites::new(Cache::found(redis)?, site_without_card(amqp))),
            unchecked_kinds: Unchecked::default(),
            unchecked_metrics: Unchecked::default(),
            // This limit is less than `[reconcile] publish_grace`.
            groups: Groups::new(Broker::new(amqp)?, *group, amqp.timeout() * 2),
            store: Store::new(mysql, CONNECTIONS)?.impatient(),
            numbers_breaker: Breaker::default(),
            likes_breaker: Breaker::default(),
            reads: Semaphore::new(READS),
            limits: *limits,
            filters: Filters::default(),
        })
    }

    /// Does the same as [`Client::new`], for a caller that has a card already. The client reads the card in Redis after
    /// a minute, or at an unknown name.
    ///
    /// # Errors
    ///
    /// An address is invalid, or [`CardError::Wrong`].
    pub fn with_card(settings: &Settings, card: &Card) -> Result<Self> {
        let (client, site) = (Self::new(settings)?, Site::try_from(card)?);
        let sites = Sites::seen(Cache::found(&settings.redis)?, site);
        Ok(Self { sites: Arc::new(sites), ..client })
    }

    /// Returns the site, as the last card describes it.
    pub async fn site(&self) -> Arc<Site> {
        Arc::clone(&self.sites.current().await.site)
    }

    /// Does the same as [`Client::site`], and first reads the card, unless the client has read it within the last
    /// second.
    pub async fn site_refreshed(&self) -> Arc<Site> {
        Arc::clone(&self.sites.refreshed().await.site)
    }

    /// Returns the last card's site, and Redis with its key names.
    ///
    /// # Errors
    /// [`ClientError::NoCard`].
    async fn known(&self) -> Result<Arc<Known>> {
        let known = self.sites.current().await;
        if known.site.is_known { Ok(known) } else { Err(ClientError::NoCard) }
    }
}

fn site_without_card(amqp: &Amqp) -> Site {
    Site { exchange: format!("{}.events", amqp.prefix), ..Site::default() }
}

fn now() -> Micros {
    Micros::from(SystemTime::now())
}
