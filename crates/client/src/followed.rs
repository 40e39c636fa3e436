//! Daemons announce in Redis which side counts each number. Clients follow, so that a site can change it while users
//! click.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::{info, warn};

use super::gateway::HINT_MAX;
use tallyd_core::chain::Chain;
use tallyd_core::kinds::{Kinds, Metrics};
use tallyd_core::model::Micros;
use tallyd_core::writers::Writers;
use tallyd_redis::Cache;

/// The longest age of the last answer.
const EVERY: Duration = Duration::from_secs(10);

/// The pause after a failure.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The last announcement. Until there is one, the rules of the client's settings hold.
pub(super) struct Followed {
    kinds: Kinds,
    metrics: Metrics,
    /// `None` before Redis was asked.
    known: RwLock<Option<Arc<Writers>>>,
    /// The writers by the client's own rules.
    own: Arc<Writers>,
    /// Locked by the call that asks.
    asked: Mutex<Asked>,
}

/// When Redis is asked next.
#[derive(Default)]
struct Asked {
    /// `None` before the first time.
    due: Option<Instant>,
    /// Whether the last question failed.
    has_failed: bool,
}

impl Followed {
    pub(super) fn new(kinds: &Kinds, metrics: &Metrics, own: Writers) -> Self {
        let (kinds, metrics) = (kinds.clone(), metrics.clone());
        Self { kinds, metrics, known: RwLock::default(), own: Arc::new(own), asked: Mutex::default() }
    }

    /// Returns the writers as of the last ten seconds. One call asks Redis. The others continue with the known writers,
    /// but wait for the first answer.
    pub(super) async fn writers(&self, cache: &Cache) -> Arc<Writers> {
        let mut asked = match (self.asked.try_lock(), self.known()) {
            (Ok(asked), _) => asked,
            (Err(_), Some(known)) => return known,
            (Err(_), None) => self.asked.lock().await,
        };
        let is_due = asked.due.is_none_or(|due| Instant::now() >= due);
        let writers = match self.known() {
            Some(known) if !is_due => return known,
            known => known.unwrap_or_else(|| Arc::clone(&self.own)),
        };
        let answer = self.ask(cache).await;
        if let (Err(error), false) = (&answer, asked.has_failed) {
            let key = cache.keys.writers();
            warn!(
                event = "writers-unread",
                key, error, "reading {key} failed, the last known writers stay in force: {error}"
            );
        }
        let next = if answer.is_ok() { EVERY } else { AGAIN_AFTER };
        *asked = Asked { due: Some(Instant::now() + next), has_failed: answer.is_err() };
        let writers = match answer {
            Ok(Some(news)) if news != *writers => {
                let text = news.encode(&self.kinds, &self.metrics, Micros(0));
                info!(event = "writers-changed", text, "API servers count these numbers in Redis from now on: {text}");
                Arc::new(news)
            }
            _ => writers,
        };
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&writers));
        writers
    }

    /// Reads the announcement. `None` if there is none.
    async fn ask(&self, cache: &Cache) -> Result<Option<Writers>, String> {
        let asked = timeout(HINT_MAX, cache.writers()).await.map_err(|_| "Redis does not answer".to_owned())?;
        let Some(text) = asked.map_err(|error| Chain(&error).to_string())? else { return Ok(None) };
        let writers = Writers::decode(&text, &self.kinds, &self.metrics);
        writers.map(Some).ok_or_else(|| format!("it does not hold an announcement of a daemon, but {text}"))
    }

    fn known(&self) -> Option<Arc<Writers>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
