//! The configuration: typed, validated, redacted. config.toml at the repository's root explains every key; a test
//! holds that file against these types and their defaults.
//!
//! The way: file -> schema (names, types, bounds) -> environment (`TALLYD__SECTION__KEY`), held against the schema, too -> types -> files of
//! passwords and certificates -> cross-checks. All problems are reported, not just the first, each with the file and the line, or the variable, that it comes from.

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

/// Shorter than the `TimeoutStopSec` of systemd/tallyd.service (90 s), or systemd would kill what still drains.
const DRAIN_MAX_S_MAX: u64 = 80;

#[derive(Debug, thiserror::Error)]
#[error("the configuration can't be used:\n  {}", .0.join("\n  "))]
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
    /// The process as a whole.
    pub daemon: Daemon,
    /// What is logged, and how.
    pub log: Log,
    /// The port for those who look after it.
    pub admin: Admin,
    /// HTTP for API servers: `tallyd gateway`.
    pub gateway: Gateway,
    /// RabbitMQ.
    pub amqp: Amqp,
    /// MySQL or MariaDB.
    pub mysql: Mysql,
    /// Redis or Valkey.
    pub redis: Redis,
    /// API servers in Rust.
    pub client: ClickLimits,
    /// Bloom filters of who likes what.
    pub filter: Filter,
    /// Events to rows.
    pub consumer: Consumer,
    /// Drift found and repaired.
    pub reconcile: Reconcile,
    /// Closed boards saved.
    pub archive: Archive,
    /// Names of what is counted, with their codes (1 to 255) in MySQL.
    pub kinds: Kinds,
    /// Names of the numbers, with their codes (1 to 255) in MySQL and their place in a Redis field.
    pub metrics: Metrics,
    /// Names that are gone although MySQL has numbers of theirs.
    pub retired: Retired,
    /// How metrics count that don't count as usual.
    #[serde(rename = "rule")]
    pub rules: Vec<Rule>,
    /// Numbers whose truth is another table.
    #[serde(rename = "recount")]
    pub recounts: Vec<Recount>,
    /// Tables of the site that `tallyd import` copies.
    #[serde(rename = "import")]
    pub imports: Vec<Import>,
    /// Events of a site's own JSON, on an exchange of its own.
    #[serde(rename = "map")]
    pub maps: Vec<Map>,
    /// Tables of the site that `tallyd export` keeps current.
    #[serde(rename = "export")]
    pub exports: Vec<Export>,
    /// The leaderboards.
    #[serde(rename = "board")]
    pub boards: Vec<Board>,
}

/// `[daemon]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Seconds that a stop may take until open batches and runs are given up. Shorter than the unit's `TimeoutStopSec`.
    #[schemars(range(min = 1, max = DRAIN_MAX_S_MAX))]
    pub drain_max_s: u64,
    /// The time zone of schedules: an IANA name.
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
    /// A filter: a level, or `target=level` pairs with commas (`info,tallyd::consumer=debug`).
    pub level: String,
    /// How lines look.
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
    /// Events that one transaction writes at most.
    #[schemars(range(min = 1, max = 30_000))]
    pub batch_events_max: usize,
    /// Bytes of bodies that one transaction writes at most.
    #[schemars(range(min = 1 << 16, max = 256 << 20))]
    pub batch_bytes_max: usize,
    /// How long the ledger remembers which `count` events were applied; older ones are refused.
    pub applied_event_keep: Pause,
    /// Dead letters that are open at most; each partition has its part.
    #[schemars(range(min = 1_000, max = 10_000_000))]
    pub dead_letters_max: u64,
    /// Milliseconds that a batch waits for more events, from its first one.
    #[schemars(range(min = 0, max = 10_000))]
    pub linger_ms: u64,
    /// Writes rows in the slower way, which uses no user variables (deprecated in MySQL).
    pub reads_first: bool,
    /// How far an event's `at` may be ahead of this machine's clock.
    pub future_max: Pause,
    /// How long a batch is kept while MySQL is away, before its messages are given back to the broker.
    pub database_away_max: Pause,
}

/// How many dead letters of one of so many partitions may be open, where `max` may be of all.
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
    /// When closed periods are looked for: a cron pattern of five or six fields; empty for never.
    pub cron: String,
    /// Members that one page copies: the longest single call of Redis grows with it.
    #[schemars(range(min = 1, max = 10_000))]
    pub page_members: usize,
}

impl Default for Archive {
    fn default() -> Self {
        Self { cron: "0 10 * * * *".to_owned(), page_members: 500 }
    }
}

impl Config {
    /// How many partitions this configuration has: those of `[amqp]`, and one for each map.
    pub fn partitions(&self) -> u16 {
        // Maps have numbers up to 99, each once.
        self.amqp.partitions + u16::try_from(self.maps.len()).unwrap_or(u16::MAX)
    }

    /// The MySQL servers that `[[import]]` and `[[export]]` name: the block, what problems call it, and the server.
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
