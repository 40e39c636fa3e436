//! What a client must know. It is made of the same sections as the daemon's configuration, and must agree with them.

use tallyd_core::board::Board;
use tallyd_core::click_limits::ClickLimits;
use tallyd_core::kinds::{Kinds, Metrics};
use tallyd_core::rules::Rule;
use tallyd_mysql::config::Mysql;
use tallyd_rabbitmq::config::Amqp;
use tallyd_redis::config::Redis;

/// The settings of a [`Client`](crate::Client). They must have the values of the daemon's configuration file: with other names, codes,
/// layouts or prefixes a client counts where the daemon does not look. Only accounts and time limits may differ.
///
/// The default is the configuration file's: all servers on 127.0.0.1, the kind `video`, the metric `like`, no boards.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `[amqp]`: the broker, and how likes are spread over partitions (`partition_by`).
    pub amqp: Amqp,
    /// `[mysql]`: the primary server, which is asked for what Redis does not know.
    pub mysql: Mysql,
    /// `[redis]`: the server, and how counters are laid out in it.
    pub redis: Redis,
    /// `[kinds]`: names of what is counted, with their codes (1 to 255).
    pub kinds: Kinds,
    /// `[metrics]`: names of the numbers, with their codes (1 to 255). One of them is `like`.
    pub metrics: Metrics,
    /// All blocks `[[board]]`: the leaderboards.
    pub boards: Vec<Board>,
    /// All blocks `[[rule]]`: how numbers count. Who counts them in Redis follows the daemons.
    pub rules: Vec<Rule>,
    /// `[client]`: how long clicks are remembered, and how many a user may make.
    pub limits: ClickLimits,
    /// Whether `[filter] likes_min` is above zero: targets with many likes have Bloom filters, which the client asks before MySQL.
    pub has_filters: bool,
}
