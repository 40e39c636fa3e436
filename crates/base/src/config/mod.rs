//! The configurations of the daemon and of the gateway, with typed and checked values and with hidden secrets. A test
//! compares config.toml at the repository's root with these types and their defaults. The doc comments of the keys
//! become the descriptions in the JSON Schema.
//!
//! The steps: file -> check against the schema (names, types, bounds) -> environment (`TALLYD__SECTION__KEY`), also
//! checked against the schema -> types -> files of passwords and certificates -> cross-checks. All problems are
//! reported, not just the first. Each problem names its file and line, or its variable.

mod admin;
mod board;
mod card;
mod check;
mod filter;
mod handle;
mod key;
mod load;
mod map;
mod password;
mod problem;
mod reconcile;
mod recount;
mod reload;
mod retired;
mod rule;
mod schema;
mod shape;
mod shown;
mod tls;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_core::day::Day;
use tallyd_core::event::Terms;

pub use crate::runtime::log::Format as LogFormat;
pub use admin::{
    Admin, Listen, NoAddress, SOCKET, listen_problems, load_admin, read_token as read_port_token, token_problems,
};
pub use check::{complete_mysql, is_name};
pub use filter::FILTER_GAP_MAX;
pub use filter::Filter;
pub use handle::{ConfigHandle, Derived};
pub use key::{Key, Origin, Origins};
pub use load::{
    DEFAULT_PATH, Loaded, Read, checked, examine, finished, load, load_environment, parse, read, read_file, typed,
};
pub use password::{SECRETS, read_token};
pub use problem::{Fault, Faults, Problem};
pub use reconcile::{EventClock, Reconcile};
pub use recount::Recount;
pub use reload::Reload;
pub use retired::Retired;
pub use rule::shared_boards;
pub use schema::{File, of_daemon, schema, schema_of};
pub use tallyd_connect::address::ServerUrl;
pub use tallyd_connect::login::Login;
pub use tallyd_connect::secret::Secret;
pub use tallyd_connect::tls::{Identity, Tls};
pub use tallyd_core::board::Board;
pub use tallyd_core::kinds::{Kinds, LIKE, Metrics};
pub use tallyd_core::mapping::Map;
pub use tallyd_core::partition::PartitionBy;
pub use tallyd_core::pause::{Pause, parse_pause};
pub use tallyd_core::rules::{Rule, Ruled, Rules, Writes};
pub use tallyd_mysql::config::Mysql;
pub use tallyd_rabbitmq::config::{Amqp, QueueType};
pub use tallyd_redis::config::{Also, Redis};
pub use tls::{is_external, read_authorities, ssl_mode};

/// `TimeoutStopSec` of systemd/tallyd.service (90 s) is longer than this limit. Otherwise systemd would kill a daemon
/// that is still draining.
const DRAIN_MAX_S_MAX: u64 = 80;

#[derive(Debug, thiserror::Error)]
#[error("the configuration is invalid:\n  {}", .0.join("\n  "))]
pub struct ConfigError(pub Vec<String>);

impl From<Vec<Problem>> for ConfigError {
    fn from(problems: Vec<Problem>) -> Self {
        Self(problems.iter().map(Problem::to_string).collect())
    }
}

/// All settings of config.toml.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How the process stops, and the time zone of its schedules.
    pub daemon: Daemon,
    /// Level and format of the log.
    pub log: Log,
    /// Read-only HTTP port for operators: status page, metrics, health, counters.
    pub admin: Admin,
    /// RabbitMQ, its queues and partitions.
    pub amqp: Amqp,
    /// MySQL 8 or later, or MariaDB 10.11 or later.
    pub mysql: Mysql,
    /// The server with the counters: Redis 7 or later, or Valkey 8 or later.
    pub redis: Redis,
    /// Bloom filters of popular targets. All daemons need the same settings.
    pub filter: Filter,
    /// How the daemon writes events to MySQL.
    pub consumer: Consumer,
    /// How the daemon compares Redis counters with MySQL and repairs drift.
    pub reconcile: Reconcile,
    /// How the daemon saves finished boards to MySQL.
    pub archive: Archive,
    /// Kinds of targets, with their codes (1 to 255) in MySQL. Never reuse a code.
    pub kinds: Kinds,
    /// Numbers of a target, with their codes (1 to 255) in MySQL and Redis. `like` is required. Never reuse a code.
    pub metrics: Metrics,
    /// Removed names whose numbers MySQL still has. tallyd refuses the removal of unlisted names.
    pub retired: Retired,
    /// Exceptions to how metrics are counted.
    #[serde(rename = "rule")]
    pub rules: Vec<Rule>,
    /// Numbers that another table determines. `tallyd admin recount` corrects them.
    #[serde(rename = "recount")]
    pub recounts: Vec<Recount>,
    /// Events in your own JSON, from your own exchange.
    #[serde(rename = "map")]
    pub maps: Vec<Map>,
    /// Leaderboards, one block for each board and period.
    #[serde(rename = "board")]
    pub boards: Vec<Board>,
}

/// `[daemon]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Seconds for a stop, before the daemon abandons open batches and runs. Must be shorter than the unit's
    /// `TimeoutStopSec` (90 s).
    #[schemars(range(min = 1, max = DRAIN_MAX_S_MAX))]
    pub drain_max_s: u64,
    /// Time zone of schedules: an IANA name like `Europe/Berlin`. Boards have separate time zones.
    pub time_zone: String,
}

impl Default for Daemon {
    fn default() -> Self {
        Self { drain_max_s: 45, time_zone: "UTC".to_owned() }
    }
}

/// `[log]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// error, warn, info, debug or trace, also per module: `info,tallyd::consumer=debug`. `RUST_LOG` overrides this
    /// level.
    pub level: String,
    /// Log format.
    pub format: LogFormat,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Auto }
    }
}

/// `[consumer]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Consumer {
    /// Maximum events per transaction. `[amqp] prefetch` must be at least twice this number.
    #[schemars(range(min = 1, max = 30_000))]
    pub batch_events_max: usize,
    /// Maximum bytes of message bodies per batch, to limit memory.
    #[schemars(range(min = 1 << 16, max = 256 << 20))]
    pub batch_bytes_max: usize,
    /// How long the daemon remembers `count` events, to count each once. Daemons reject count, set and reset events
    /// older than this. If daemons differ, the shortest time applies.
    // With a shorter time, the table `applied_event` could lose an event that the broker delivers again after an outage.
    // It has 32 days: the kept days, today, a day that is being emptied, and spare days for clock differences.
    #[schemars(extend("x-minimum" = "1h", "x-maximum" = "27d"))]
    pub applied_event_keep: Pause,
    /// Maximum number of open dead letters, divided equally among the partitions. Later dead letters go to the queue
    /// `tally.returned` if another configuration could accept them. Otherwise they are only counted.
    #[schemars(range(min = 1_000, max = 10_000_000))]
    pub dead_letters_max: u64,
    /// Minimum time in milliseconds between the starts of two writes of a partition. An event that comes later is written
    /// at once, and a full batch does not wait. A longer time saves commits, but adds latency.
    #[schemars(range(min = 0, max = 10_000))]
    pub linger_ms: u64,
    /// Read rows before writing: slower, but without user variables, which MySQL deprecates. Automatic if the server
    /// requires it.
    pub reads_first: bool,
    /// First day (in UTC) of events. The daemon rejects events with an earlier `at`, because their unit is probably
    /// wrong.
    pub at_min: Day,
    /// How far an event's `at` can be in the future. The daemon rejects other events: they would win over later events of
    /// the row.
    // A later event could belong to a day of the table `applied_event` that is being emptied.
    #[schemars(extend("x-maximum" = "1d"))]
    pub future_max: Pause,
    /// How long to keep a batch while MySQL is unreachable, before requeueing it. Must be shorter than RabbitMQ's
    /// `consumer_timeout` (default 30 minutes).
    pub database_away_max: Pause,
}

pub fn dead_letters_part(max: u64, partitions: u16) -> u64 {
    max / u64::from(partitions.max(1))
}

impl Default for Consumer {
    fn default() -> Self {
        Self {
            batch_events_max: 10_000,
            batch_bytes_max: 8 << 20,
            applied_event_keep: Pause::from_secs(7 * 86_400),
            dead_letters_max: 100_000,
            linger_ms: 10,
            reads_first: false,
            at_min: Day::first_of(2010),
            future_max: Pause::from_secs(300),
            database_away_max: Pause::from_secs(600),
        }
    }
}

/// `[archive]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Archive {
    /// When to look for finished periods. Empty: never.
    pub cron: String,
    /// Members per page. Larger pages make Redis calls longer.
    #[schemars(range(min = 1, max = 10_000))]
    pub page_members: usize,
}

impl Default for Archive {
    fn default() -> Self {
        Self { cron: "0 10 * * * *".to_owned(), page_members: 500 }
    }
}

/// A schedule of a section.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled<'a> {
    pub key: &'static str,
    /// The name of the mode or job, for people.
    pub name: &'static str,
    pub cron: &'a str,
    pub is_on: bool,
}

impl Config {
    /// They are checked, and `config check` shows them. Blocks have schedules of their own.
    pub fn schedules(&self) -> [Scheduled<'_>; 5] {
        let Self { reconcile, archive, filter, .. } = self;
        [
            ("reconcile.changed_cron", "changed", &reconcile.changed_cron, true),
            ("reconcile.full_cron", "full", &reconcile.full_cron, true),
            ("reconcile.scrub_cron", "scrub", &reconcile.scrub_cron, true),
            ("archive.cron", "archive", &archive.cron, true),
            ("filter.cron", "filters", &filter.cron, filter.is_on()),
        ]
        .map(|(key, name, cron, is_on)| Scheduled { key, name, cron, is_on })
    }

    pub fn partitions(&self) -> u16 {
        // The numbers of maps are unique and at most 99, so the sum fits into the type.
        self.amqp.partitions + u16::try_from(self.maps.len()).unwrap_or(u16::MAX)
    }

    fn servers_mut(&mut self) -> [(&'static str, &mut ServerUrl, &mut Login); 3] {
        let Self { amqp, mysql, redis, .. } = self;
        [
            ("amqp", &mut amqp.url, &mut amqp.login),
            ("mysql", &mut mysql.url, &mut mysql.login),
            ("redis", &mut redis.url, &mut redis.login),
        ]
    }
}

impl From<&Config> for Rules {
    fn from(config: &Config) -> Self {
        Self::new(&config.kinds, &config.metrics, &config.rules)
    }
}

impl From<&Config> for Terms {
    fn from(config: &Config) -> Self {
        Self {
            is_checked: true,
            kinds: config.kinds.0.clone(),
            metrics: config.metrics.0.clone(),
            at_min: config.consumer.at_min.begins(),
            future_max: config.consumer.future_max.0,
            applied_event_keep: config.consumer.applied_event_keep.0,
            rules: Rules::from(config),
            partition_by: config.amqp.partition_by,
        }
    }
}
