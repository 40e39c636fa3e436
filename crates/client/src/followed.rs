//! Reads from Redis whether daemons or API servers count a number. Daemons write this announcement into Redis, and
//! clients read it. So a site can move the counting from daemons to API servers, or back, while users click.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::{info, warn};

use super::gateway::HINT_MAX;
use tallyd_core::chain::Chain;
use tallyd_core::kinds::{Kinds, Metrics};
use tallyd_core::model::Micros;
use tallyd_core::writers::{Announced, Writers};
use tallyd_redis::Cache;

/// The client uses an answer of Redis for at most this time.
const EVERY: Duration = Duration::from_secs(10);

/// The pause after a failure.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The last announcement. Until the client has read an announcement, it uses the rules of its own settings.
pub(super) struct Followed {
    kinds: Kinds,
    metrics: Metrics,
    /// `None` until the client has asked Redis.
    known: RwLock<Option<Arc<Announced>>>,
    /// The writer of each number according to the rules in the client's settings.
    own: Arc<Announced>,
    /// A call holds this lock while it reads the announcement from Redis.
    asked: Mutex<Asked>,
}

/// Says when the client must ask Redis next, and whether the last request failed.
#[derive(Default)]
struct Asked {
    /// The time of the next request to Redis. `None` before the first request.
    due: Option<Instant>,
    /// Whether the last request failed.
    has_failed: bool,
}

impl Followed {
    pub(super) fn new(kinds: &Kinds, metrics: &Metrics, own: Writers) -> Self {
        let (kinds, metrics) = (kinds.clone(), metrics.clone());
        Self { kinds, metrics, known: RwLock::default(), own: Arc::new(Announced::now(own)), asked: Mutex::default() }
    }

    /// Returns which side counts each number now.
    pub(super) async fn writers(&self, cache: &Cache) -> Arc<Writers> {
        Arc::clone(self.announced(cache).await.at(super::now()))
    }

    /// Returns the last announcement. While Redis answers, it is at most ten seconds old. Only one call asks Redis.
    /// Until Redis answers, the other calls use what the client already knows. If the client knows nothing yet, these
    /// calls wait.
    async fn announced(&self, cache: &Cache) -> Arc<Announced> {
        let mut asked = match (self.asked.try_lock(), self.known()) {
            (Ok(asked), _) => asked,
            (Err(_), Some(known)) => return known,
            (Err(_), None) => self.asked.lock().await,
        };
        let is_due = asked.due.is_none_or(|due| Instant::now() >= due);
        let known = match self.known() {
            Some(known) if !is_due => return known,
            known => known.unwrap_or_else(|| Arc::clone(&self.own)),
        };
        let answer = self.ask(cache).await;
        if let (Err(error), false) = (&answer, asked.has_failed) {
            let key = cache.keys.writers();
            warn!(
                event = "writers-unread",
                key, error, "reading {key} from Redis failed, and the client uses the last known writers: {error}"
            );
        }
        let next = if answer.is_ok() { EVERY } else { AGAIN_AFTER };
        *asked = Asked { due: Some(Instant::now() + next), has_failed: answer.is_err() };
        let announced = match answer {
            Ok(Some(news)) if news != *known => {
                let text = news.encode(&self.kinds, &self.metrics, Micros(0));
                info!(
                    event = "writers-changed",
                    text, "a daemon has announced which numbers API servers count: {text}"
                );
                Arc::new(news)
            }
            _ => known,
        };
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&announced));
        announced
    }

    /// Reads the announcement. Returns `None` if Redis has no announcement.
    async fn ask(&self, cache: &Cache) -> Result<Option<Announced>, String> {
        let asked = timeout(HINT_MAX, cache.writers()).await.map_err(|_| "Redis does not answer".to_owned())?;
        let Some(text) = asked.map_err(|error| Chain(&error).to_string())? else { return Ok(None) };
        let announced = Announced::decode(&text, &self.kinds, &self.metrics);
        announced.map(Some).ok_or_else(|| format!("the key does not hold an announcement of a daemon, but {text}"))
    }

    fn known(&self) -> Option<Arc<Announced>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
