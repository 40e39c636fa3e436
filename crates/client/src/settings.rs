//! The settings of a client: addresses, logins and time limits. Everything else comes from the site card.

use std::time::Duration;

use tallyd_mysql::config::Mysql;
use tallyd_rabbitmq::config::Amqp;
use tallyd_redis::config::Redis;

/// The settings of a [`Client`](crate::Client).
///
/// The site card says which kinds, metrics, boards and rules the site has, which layout the counters have, and how
/// events are published. The client ignores the fields with these settings, with one exception: until the client has
/// seen a card, it publishes to the exchange `{amqp.prefix}.events`. By default all servers are on 127.0.0.1.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The broker's addresses, login and time limit.
    pub amqp: Amqp,
    /// The primary MySQL server, which the client asks if Redis can't answer.
    pub mysql: Mysql,
    /// The addresses, login and time limit of Redis. Also `key_prefix`, if it is not `tally:`.
    pub redis: Redis,
    /// How many clicks a user can make.
    pub limits: ClickLimits,
    /// The minimum time between two lists of events. Events that calls publish meanwhile wait for this time at most,
    /// and then go as one list of up to 100 events, with one confirm: this costs the broker a fraction. An event after
    /// a longer pause goes at once. Zero: no call waits for another one. By default 2 ms, at most `[amqp] timeout_ms`.
    pub group: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            amqp: Amqp::default(),
            mysql: Mysql::default(),
            redis: Redis::default(),
            limits: ClickLimits::default(),
            group: Duration::from_millis(2),
        }
    }
}

/// The limit of each user's clicks. By default there is none.
#[derive(Clone, Copy, Debug)]
pub struct ClickLimits {
    /// The maximum number of likes and unlikes of a user per window. 0: no limit.
    pub rate_likes_max: u32,
    /// The length of a window, from the user's first click.
    pub rate_window: Duration,
}

impl Default for ClickLimits {
    fn default() -> Self {
        Self { rate_likes_max: 0, rate_window: Duration::from_secs(60) }
    }
}
