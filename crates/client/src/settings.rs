//! The settings of a client. The settings have the same sections as the daemon's configuration, and must agree with
//! that configuration.

use tallyd_core::board::Board;
use tallyd_core::click_limits::ClickLimits;
use tallyd_core::kinds::{Kinds, Metrics};
use tallyd_core::rules::Rule;
use tallyd_mysql::config::Mysql;
use tallyd_rabbitmq::config::Amqp;
use tallyd_redis::config::Redis;

/// The settings of a [`Client`](crate::Client). The settings must have the values of the daemon's configuration file.
/// With different names, codes, layouts or prefixes, the client and the daemon use different keys. Only accounts and
/// time limits may differ.
///
/// The defaults are the same as in the configuration file: all servers on 127.0.0.1, the kind `video`, the metric
/// `like`, no boards.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `[amqp]`: the broker, and how the client spreads likes over partitions (`partition_by`).
    pub amqp: Amqp,
    /// `[mysql]`: the primary server, which the client asks if Redis can't answer.
    pub mysql: Mysql,
    /// `[redis]`: the server, and the layout of the counters in it.
    pub redis: Redis,
    /// `[kinds]`: the names of kinds of targets, with their codes (1 to 255).
    pub kinds: Kinds,
    /// `[metrics]`: the names of the numbers, with their codes (1 to 255). One name is `like`.
    pub metrics: Metrics,
    /// The `[[board]]` blocks, which define the leaderboards.
    pub boards: Vec<Board>,
    /// The `[[rule]]` blocks, which define how events change each number, and whether API servers count it themselves.
    pub rules: Vec<Rule>,
    /// `[client]`: how many clicks a user can make.
    pub limits: ClickLimits,
    /// Whether `[filter] likes_min` is above zero. In that case, targets with many likes have Bloom filters, and the
    /// client asks the filter before MySQL.
    pub has_filters: bool,
}
