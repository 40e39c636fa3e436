//! Who counts which numbers, as daemons announce it in Redis. Clients follow, so that a site can change it while users click.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::{info, warn};

use super::gateway::HINT_MAX;
use tallyd_core::kinds::{Kinds, Metrics};
use tallyd_core::writers::Writers;
use tallyd_redis::Cache;

/// How old the last answer can be.
const EVERY: Duration = Duration::from_secs(10);

/// The last announcement that was read. Until there is one, the rules of the client's own settings hold.
pub(super) struct Followed {
    kinds: Kinds,
    metrics: Metrics,
    /// `None` before Redis was asked.
    known: RwLock<Option<Arc<Writers>>>,
    /// As the client's own rules say.
    own: Arc<Writers>,
    /// When Redis was asked last. Held by the call that asks.
    asked: Mutex<Option<Instant>>,
}

impl Followed {
    pub(super) fn new(kinds: &Kinds, metrics: &Metrics, own: Writers) -> Self {
        let (kinds, metrics) = (kinds.clone(), metrics.clone());
        Self { kinds, metrics, known: RwLock::default(), own: Arc::new(own), asked: Mutex::default() }
    }

    /// As of the last ten seconds. One call asks Redis; the others continue with what is known, except before the first answer.
    pub(super) async fn writers(&self, cache: &Cache) -> Arc<Writers> {
        let mut asked = match (self.asked.try_lock(), self.known()) {
            (Ok(asked), _) => asked,
            (Err(_), Some(known)) => return known,
            (Err(_), None) => self.asked.lock().await,
        };
        let is_due = asked.is_none_or(|asked| asked.elapsed() >= EVERY);
        let writers = match self.known() {
            Some(known) if !is_due => return known,
            known => known.unwrap_or_else(|| Arc::clone(&self.own)),
        };
        let writers = self.ask(cache, &writers).await.map_or(writers, Arc::new);
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&writers));
        *asked = Some(Instant::now());
        writers
    }

    /// The announcement, where there is one that differs from `known`.
    async fn ask(&self, cache: &Cache, known: &Writers) -> Option<Writers> {
        // Where Redis does not answer, other calls say so.
        let text = timeout(HINT_MAX, cache.writers()).await.ok()?.ok()??;
        let Some(writers) = Writers::decode(&text, &self.kinds, &self.metrics) else {
            warn!(
                event = "writers-unread",
                text,
                "{} does not say who counts which numbers: {text}",
                cache.keys.writers()
            );
            return None;
        };
        if writers == *known {
            return None;
        }
        info!(event = "writers-changed", text, "API servers count these numbers in Redis from now on: {text}");
        Some(writers)
    }

    fn known(&self) -> Option<Arc<Writers>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
