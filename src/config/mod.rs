//! The configuration: typed, validated, with hidden secrets. A test compares config.toml at the repository's root with
//! these types and their defaults. The doc comments of the keys become the descriptions in the JSON Schema.
//!
//! The steps: file -> check against the schema (names, types, bounds) -> environment (`TALLYD__SECTION__KEY`), also
//! checked against the schema -> types -> files of passwords and certificates -> cross-checks. All problems are
//! reported, not just the first. Each names its file and line, or its variable.

mod admin;
mod board;
mod check;
mod export;
mod filter;
mod gateway;
mod handle;
mod import;
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
use tallyd_core::event::Terms;

pub use crate::runtime::log::Format as LogFormat;
pub use admin::{Admin, Listen, NoAddress, SOCKET};
pub use check::is_name;
pub use export::{Export, Writes as ExportWrites};
pub(crate) use filter::FILTER_GAP_MAX;
pub use filter::Filter;
pub use gateway::Gateway;
pub use handle::{ConfigHandle, Derived};
pub use import::{Import, Reads};
pub use key::{Key, Origin, Origins};
pub use load::{DEFAULT_PATH, Loaded, examine, load, load_admin, load_environment, parse};
pub use password::read_token;
pub use problem::Problem;
pub use reconcile::{EventClock, Reconcile};
pub use recount::Recount;
pub use reload::Reload;
pub use retired::Retired;
pub use schema::schema;
pub use tallyd_connect::address::ServerUrl;
pub use tallyd_connect::secret::Secret;
pub use tallyd_connect::tls::{Identity, Tls};
pub use tallyd_core::board::Board;
pub use tallyd_core::click_limits::ClickLimits;
pub use tallyd_core::kinds::{Kinds, LIKE, Metrics};
pub use tallyd_core::mapping::Map;
pub use tallyd_core::partition::PartitionBy;
pub use tallyd_core::pause::{Pause, parse_pause};
pub use tallyd_core::rules::{Rule, Ruled, Rules, Writes};
pub use tallyd_core::writers::Writers;
pub use tallyd_mysql::config::Mysql;
pub use tallyd_rabbitmq::config::{Amqp, QueueType};
pub use tallyd_redis::config::{Also, Redis};
pub use tls::{is_external, read_authorities, ssl_mode};

/// Shorter than the `TimeoutStopSec` of systemd/tallyd.service (90 s). Otherwise systemd would kill a daemon that still
/// drains.
const DRAIN_MAX_S_MAX: u64 = 80;

#[derive(Debug, thiserror::Error)]
#[error("the configuration is invalid:\n  {}", .0.join("\n  "))]
pub struct ConfigError(pub Vec<String>);

impl From<Vec<Problem>> for ConfigError {
    fn from(problems: Vec<Problem>) -> Self {
        Self(problems.iter().map(Problem::to_string).collect())
    }
}

/// The whole of config.toml.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The process: how it stops, and the time zone of its schedules.
    pub daemon: Daemon,
    /// Level and format of the log.
    pub log: Log,
    /// The read-only HTTP port for operators: status page, metrics, health, counters.
    pub admin: Admin,
    /// The HTTP port of `tallyd gateway`, for API servers. The daemon doesn't use it.
    pub gateway: Gateway,
    /// The RabbitMQ broker, its queues and partitions.
    pub amqp: Amqp,
    /// The MySQL (8 or later) or MariaDB (10.11 or later) server.
    pub mysql: Mysql,
    /// The Redis (7 or later) or Valkey (8 or later) servers, and the layout of the counters.
    pub redis: Redis,
    /// Settings of `tallyd gateway` and of API servers in Rust. The daemon doesn't use them.
    pub client: ClickLimits,
    /// Bloom filters that answer whether a user likes a popular target, without MySQL. Use the same settings in all
    /// daemons and API servers.
    pub filter: Filter,
    /// How the daemon writes events to MySQL.
    pub consumer: Consumer,
    /// How the daemon compares the counters in Redis with MySQL, and repairs drift.
    pub reconcile: Reconcile,
    /// How the daemon saves finished boards to MySQL.
    pub archive: Archive,
    /// Kinds of targets, with their codes (1 to 255) in MySQL. Never change the meaning of a code.
    pub kinds: Kinds,
    /// Numbers of a target, with their codes (1 to 255) in MySQL and in Redis. `like` is required. Never change the
    /// meaning of a code.
    pub metrics: Metrics,
    /// Names removed from `[kinds]` and `[metrics]` while MySQL still has numbers with their codes.
    pub retired: Retired,
    /// How a metric counts, if it does not count as usual.
    #[serde(rename = "rule")]
    pub rules: Vec<Rule>,
    /// Numbers that another table determines. `tallyd recount` corrects them.
    #[serde(rename = "recount")]
    pub recounts: Vec<Recount>,
    /// Old tables that `tallyd import` copies.
    #[serde(rename = "import")]
    pub imports: Vec<Import>,
    /// Events in your own JSON, from your own exchange.
    #[serde(rename = "map")]
    pub maps: Vec<Map>,
    /// Old tables that `tallyd export` keeps current after the cut-over.
    #[serde(rename = "export")]
    pub exports: Vec<Export>,
    /// Leaderboards, one block for each board and period.
    #[serde(rename = "board")]
    pub boards: Vec<Board>,
}

/// `[daemon]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Seconds that a stop can take (1 to 80). Then the daemon abandons open batches and runs. Must be shorter than the
    /// unit's `TimeoutStopSec`, which is 90 s.
    #[schemars(range(min = 1, max = DRAIN_MAX_S_MAX))]
    pub drain_max_s: u64,
    /// Time zone of all schedules: an IANA name, for example `Europe/Berlin`. Boards have their own time zone.
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
    /// Log level: error, warn, info, debug or trace. Levels can be set per module: `info,tallyd::consumer=debug`. The
    /// variable `RUST_LOG` overrides it.
    pub level: String,
    /// Format of the log. `auto` selects text in a terminal, journald fields under systemd, and JSON otherwise.
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
    /// Most events that one transaction writes (1 to 30000). Twice this number must fit into `[amqp] prefetch`.
    #[schemars(range(min = 1, max = 30_000))]
    pub batch_events_max: usize,
    /// Most bytes of message bodies in one batch (65536 to 268435456). It limits the memory of the daemon when messages
    /// are large.
    #[schemars(range(min = 1 << 16, max = 256 << 20))]
    pub batch_bytes_max: usize,
    /// How long the daemon remembers which `count` events it applied (1h to 27d). A redelivered event counts once
    /// within this time. The daemon rejects older count, set and reset events. If daemons differ, the shortest time
    /// applies.
    pub applied_event_keep: Pause,
    /// Most open dead letters (1000 to 10000000), split equally between the partitions. When a partition's part is
    /// full, the daemon moves new ones to the queue `tally.returned` if another configuration could accept them. It
    /// only counts the others.
    #[schemars(range(min = 1_000, max = 10_000_000))]
    pub dead_letters_max: u64,
    /// Milliseconds that a batch waits for more events after its first one (0 to 10000). Raise it for larger batches,
    /// lower it for less latency.
    #[schemars(range(min = 0, max = 10_000))]
    pub linger_ms: u64,
    /// Read rows before writing them. This is slower, but uses no user variables, which MySQL deprecates. If a server
    /// doesn't support the faster way, the daemon uses this one automatically.
    pub reads_first: bool,
    /// How far an event's `at` can be ahead of this machine's clock, at most 1d. The daemon rejects an event further
    /// ahead, because it would win over every later event of the same row.
    pub future_max: Pause,
    /// How long the daemon keeps a batch while MySQL is unreachable. Then it returns the messages to the broker. Must
    /// be shorter than the broker's `consumer_timeout`, which is 30 minutes by default.
    pub database_away_max: Pause,
}

/// Most open dead letters of one partition, if all partitions together can have `max`.
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
            linger_ms: 5,
            reads_first: false,
            future_max: Pause::from_secs(300),
            database_away_max: Pause::from_secs(600),
        }
    }
}

/// `[archive]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Archive {
    /// When to look for finished periods, as a cron pattern. Empty: never.
    pub cron: String,
    /// Members copied per page (1 to 10000). A larger page means longer single calls to Redis.
    #[schemars(range(min = 1, max = 10_000))]
    pub page_members: usize,
}

impl Default for Archive {
    fn default() -> Self {
        Self { cron: "0 10 * * * *".to_owned(), page_members: 500 }
    }
}

impl Config {
    /// The number of partitions: those of `[amqp]`, and one for each map.
    pub fn partitions(&self) -> u16 {
        // Maps have unique numbers up to 99.
        self.amqp.partitions + u16::try_from(self.maps.len()).unwrap_or(u16::MAX)
    }

    /// The MySQL servers that `[[import]]` and `[[export]]` name: the block, its name in problems, and the server.
    fn site_servers(&self) -> impl Iterator<Item = (Key, &'static str, &Mysql)> {
        let imports = self.imports.iter().enumerate();
        let imports =
            imports.filter_map(|(place, it)| Some((import::source_key(place), "import.source", it.source.as_ref()?)));
        let exports = self.exports.iter().enumerate();
        imports.chain(
            exports.filter_map(|(place, it)| Some((export::server_key(place), "export.server", it.server.as_ref()?))),
        )
    }

    fn site_servers_mut(&mut self) -> impl Iterator<Item = (Key, &'static str, &mut Mysql)> {
        let imports = self.imports.iter_mut().enumerate();
        let imports =
            imports.filter_map(|(place, it)| Some((import::source_key(place), "import.source", it.source.as_mut()?)));
        let exports = self.exports.iter_mut().enumerate();
        imports.chain(
            exports.filter_map(|(place, it)| Some((export::server_key(place), "export.server", it.server.as_mut()?))),
        )
    }
}

impl From<&Config> for Rules {
    fn from(config: &Config) -> Self {
        Self::new(&config.kinds, &config.metrics, &config.rules)
    }
}

impl From<&Config> for Writers {
    fn from(config: &Config) -> Self {
        Self::new(&config.kinds, &config.metrics, &Rules::from(config))
    }
}

impl From<&Config> for Terms {
    fn from(config: &Config) -> Self {
        Self {
            kinds: config.kinds.0.clone(),
            metrics: config.metrics.0.clone(),
            future_max: config.consumer.future_max.0,
            applied_event_keep: config.consumer.applied_event_keep.0,
            rules: Rules::from(config),
            partition_by: config.amqp.partition_by,
        }
    }
}
