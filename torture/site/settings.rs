//! The configuration of a run. The configuration enables all features of tallyd, with frequent schedules and short
//! waits.

use tallyd_core::rules::Writes;

use crate::accounts::Accounts;

/// Addresses of the three servers, or of their proxies.
#[derive(Clone, Debug)]
pub struct Addresses {
    pub mysql: String,
    pub redis: String,
    pub amqp: String,
}

/// Number of queues over which the events are spread.
pub const PARTITIONS: u16 = 3;

/// Returns the configuration that all parts of a run share. `name` is unique on each server. If `admin` is empty, there
/// is no admin port.
pub fn text(name: &str, likes_by: Writes, addresses: &Addresses, admin: &str) -> String {
    let Addresses { mysql, redis, amqp } = addresses;
    let servers = format!(
        r#"[admin]
listen = "{admin}"
control = ""
[daemon]
drain_max_s = 20
[amqp]
url = "{amqp}"
prefix = "{name}"
partitions = {PARTITIONS}
prefetch = 1000
heartbeat_s = 2
timeout_ms = 5000
[mysql]
url = "{mysql}"
connect_timeout_ms = 3000
transaction_timeout_ms = 5000
[redis]
url = "{redis}"
key_prefix = "{name}:"
bucket_bits = 6
timeout_ms = 2000
"#
    );
    let writer = match likes_by {
        Writes::Api => "api",
        Writes::Daemon => "daemon",
    };
    let likes = format!("[[rule]]\nmetric = \"like\"\nwriter = \"{writer}\"\n");
    [&servers, WORK, METRICS, &likes, BOARDS].concat()
}

/// Returns the configuration of a gateway.
pub fn of_gateway(name: &str, Addresses { mysql, redis, amqp }: &Addresses) -> String {
    format!(
        r#"[gateway]
listen = "127.0.0.1:0"
[amqp]
url = "{amqp}"
timeout_ms = 5000
[mysql]
url = "{mysql}"
[redis]
url = "{redis}"
key_prefix = "{name}:"
timeout_ms = 2000
"#
    )
}

/// An account on the servers.
#[derive(Clone, Copy, Debug)]
pub enum Who {
    /// The administrator.
    Admin,
    Daemon,
    ApiServer,
}

impl Addresses {
    /// Returns the same addresses, with this database in the URL of MySQL.
    pub fn with_database(&self, name: &str) -> Self {
        Self { mysql: format!("{}{name}", self.mysql), ..self.clone() }
    }

    /// Returns the same addresses, with this account in each of them. The accounts of daemons and API servers have the
    /// rights that the files in `ops/` grant.
    pub fn of(&self, who: Who, accounts: &Accounts) -> Self {
        let of = |url: &str| match who {
            Who::Admin => url.to_owned(),
            Who::Daemon => accounts.of_daemon(url),
            Who::ApiServer => accounts.of_api(url),
        };
        Self { mysql: of(&self.mysql), redis: of(&self.redis), amqp: of(&self.amqp) }
    }
}

/// Dead letters are kept for hours, because the comparison at the end checks each of them.
const WORK: &str = r#"[consumer]
batch_events_max = 300
database_away_max = "10s"
dead_letters_max = 1_000_000
[reconcile]
changed_cron = "5,15,25,35,45,55 * * * * *"
full_cron = "0,30 * * * * *"
publish_grace = "1s"
fence_max = "15s"
overlap = "20s"
page_targets = 200
repair_targets_max_percent = 100
watch_every = "1s"
[archive]
cron = "*/15 * * * * *"
page_members = 50
[filter]
likes_min = 20
asked = true
cron = "*/10 * * * * *"
[log]
format = "json"
"#;

const METRICS: &str = r#"[kinds]
video = 1
post = 2
[metrics]
like = 1
view = 2
stock = 3
unread = 4
[[rule]]
metric = "view"
writer = "daemon"
board = "seen"
[[rule]]
metric = "stock"
writer = "api"
[[rule]]
metric = "unread"
settable = true
[[rule]]
metric = "like"
kind = "post"
board = "fans"
"#;

/// On the board `past`, users add scores only to past days. The periods of these days are already closed. The board
/// `fans` has only a few members at a time.
const BOARDS: &str = r#"[[board]]
name = "hot"
period = "day"
snapshot_every = "5s"
[[board]]
name = "hot"
period = "total"
snapshot_every = "5s"
[[board]]
name = "seen"
period = "day"
score = ["view"]
snapshot_every = "5s"
[[board]]
name = "seen"
period = "total"
score = ["view"]
snapshot_every = "5s"
[[board]]
name = "fans"
period = "total"
snapshot_every = "5s"
[[board]]
name = "past"
period = "day"
archive_grace = "0s"
snapshot_every = "5s"
"#;
