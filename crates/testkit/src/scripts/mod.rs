//! The API server of a site that counts before it publishes (`writer = "api"`). It calls the scripts of lua/, as docs/scripts.md
//! describes, and then publishes the event with the client (decision 0045). Numbers that the daemon counts are only
//! published.
//!
//! If the settings have a second layout (`[redis.also]`), each change is also made there, by a second call of the same
//! script.

mod boards;
mod counts;
mod error;
mod filters;
mod likes;

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::limited_client_of;
pub use counts::{Changed, Counting};
pub use error::{CountError, LikeError};
use filters::Shapes;
use tallyd_base::config::{Board, Config};
use tallyd_client::{ClickLimits, Client, ClientError, Event};
use tallyd_core::event::LikeEvent;
use tallyd_core::kinds::Kinds;
use tallyd_core::model::{Metric, Micros};
use tallyd_core::rules::{Rules, Writes};
use tallyd_mysql::Store;
use tallyd_redis::keys::KindNames;
use tallyd_redis::{Cache, CacheError, Script};

const CONNECTIONS: u32 = 16;

/// How many seconds Redis remembers a click, as docs/scripts.md recommends.
pub const RECENT_KEEP: u64 = 120;

/// The timeout of a query to MySQL, and how long the server does not ask again after MySQL failed to answer.
const ASK_MAX: Duration = Duration::from_secs(5);
const AWAY_FOR: Duration = Duration::from_secs(5);

static LIKE: Script = Script::new(include_str!("../../../../lua/like.lua"));
static TAKE_BACK: Script = Script::new(include_str!("../../../../lua/take_back.lua"));
static COUNT: Script = Script::new(include_str!("../../../../lua/count.lua"));
static REMEMBER: Script = Script::new(include_str!("../../../../lua/remember.lua"));
static NOTE_BESIDE: Script = Script::new(include_str!("../../../../lua/note_beside.lua"));

type Result<T, E = ClientError> = std::result::Result<T, E>;

/// An API server that counts before it publishes. It reads as its client does.
pub struct ApiServer {
    client: Client,
    cache: Cache,
    also: Option<Cache>,
    kinds: Kinds,
    names: KindNames,
    metric: Metric,
    boards: Vec<Board>,
    rules: Rules,
    store: Store,
    /// The instant until which the server does not ask MySQL, because MySQL failed to answer.
    unasked: Mutex<Option<Instant>>,
    recent_keep: u64,
    shapes: Option<Shapes>,
}

impl Deref for ApiServer {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnBoard<'a> {
    pub board: &'a str,
    /// The ranked user or object, for instance a video's id in decimal. Any bytes.
    pub member: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub event: LikeEvent,
    /// The target's count of likes after the click. `None` if Redis has lost the number. Also `None` after
    /// [`ApiServer::count`] in some layouts.
    pub count: Option<i64>,
    pub boards_failed: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clicked {
    Published(LikeEvent),
    Counted(Counted),
    /// The click changed nothing, and was not counted. The server published the user's last event again, because an
    /// earlier request may have failed to publish this event.
    Same {
        count: Option<i64>,
        at: Micros,
    },
    Limited {
        wait: Duration,
    },
}

impl Clicked {
    pub fn counted(self) -> Option<Counted> {
        if let Self::Counted(counted) = self { Some(counted) } else { None }
    }
}

/// Says whether Redis still counts a change that could not be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenBack {
    /// The change no longer counts. The caller can make the same call again.
    Yes,
    /// The change was not taken back. There are three possible reasons: another request can still publish the same event
    /// (a double click), the user has clicked again, or Redis does not remember the click.
    Overtaken,
    /// Redis failed to answer. The change may still count, until a reconcile corrects the number.
    Unknown,
}

impl ApiServer {
    pub fn new(config: &Config) -> Self {
        let Config { redis, metrics, kinds, .. } = config;
        let cache = Cache::new(redis, metrics).unwrap();
        Self {
            client: limited_client_of(config, ClickLimits::default()),
            also: cache.also(redis, metrics).unwrap(),
            cache,
            kinds: kinds.clone(),
            names: KindNames::new(kinds),
            metric: metrics.like(),
            boards: config.boards.clone(),
            rules: Rules::new(kinds, metrics, &config.rules),
            store: Store::new(&config.mysql, CONNECTIONS).unwrap(),
            unasked: Mutex::default(),
            recent_keep: RECENT_KEEP,
            shapes: config.filter.is_on().then(Shapes::default),
        }
    }

    pub fn limited(config: &Config, limits: ClickLimits) -> Self {
        Self { client: limited_client_of(config, limits), ..Self::new(config) }
    }

    #[must_use]
    pub fn remembering(self, recent_keep: u64) -> Self {
        Self { recent_keep, ..self }
    }

    pub async fn publish_counted(&self, counted: &Counted) -> Result<()> {
        self.client.publish(&Event::Like(counted.event), counted.count).await
    }

    fn is_by_daemon(&self, metric: Metric, kind: tallyd_core::model::Kind) -> bool {
        self.rules.of(kind, metric).writer == Writes::Daemon
    }

    async fn ask_mysql<T>(&self, question: impl Future<Output = tallyd_mysql::Result<T>>) -> Option<T> {
        let unasked = || self.unasked.lock().unwrap_or_else(PoisonError::into_inner);
        if unasked().is_some_and(|until| until > Instant::now()) {
            return None;
        }
        let answer = tokio::time::timeout(ASK_MAX, question).await.ok().and_then(Result::ok);
        *unasked() = if answer.is_some() { None } else { Some(Instant::now() + AWAY_FOR) };
        answer
    }
}

/// Returns true if the command did not run because a Cluster is moving the slot. Until the move ends, the slot's keys are
/// on two nodes.
fn is_of_a_moving_slot(error: &CacheError) -> bool {
    matches!(error, CacheError::Command { source, .. } if source.0.code() == Some("TRYAGAIN"))
}
