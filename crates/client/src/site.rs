//! Reads the site card: with the first call, at a name that the card lacks, and every minute. If the client can't read
//! the card, it keeps the last one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;
use tracing::{info, warn};

use super::gateway::HINT_MAX;
use tallyd_core::card::Card;
use tallyd_core::chain::Chain;
use tallyd_core::site::Site;
use tallyd_redis::Cache;

const CARD_KEPT: Duration = Duration::from_secs(60);

/// The shortest interval between two readings, for instance after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// The timeout of the first reading. Later readings have the timeout of other optional requests, because the client
/// has a card.
const FIRST_MAX: Duration = Duration::from_secs(2);

pub(crate) struct Known {
    pub(crate) site: Arc<Site>,
    pub(crate) cache: Cache,
}

pub(crate) struct Sites {
    cache: Cache,
    known: RwLock<Arc<Known>>,
    /// The last reading. The task that reads holds the lock.
    read: Arc<tokio::sync::Mutex<Option<Reading>>>,
    /// Whether the first reading has ended. Until then, all calls wait for it.
    has_read: AtomicBool,
}

#[derive(Clone, Copy)]
struct Reading {
    ended: Instant,
    has_card: bool,
}

impl Sites {
    pub(crate) fn new(cache: Cache, assumed: Site) -> Self {
        let known = RwLock::new(Arc::new(Known::new(&cache, assumed)));
        Self { cache, known, read: Arc::default(), has_read: AtomicBool::default() }
    }

    pub(crate) fn seen(cache: Cache, site: Site) -> Self {
        let reading = Reading { ended: Instant::now(), has_card: true };
        let read = Arc::new(Some(reading).into());
        Self { read, has_read: true.into(), ..Self::new(cache, site) }
    }

    /// Returns the last site. Reads the card before if this is due, but never waits for another call's reading, apart
    /// from the first.
    pub(crate) async fn current(self: &Arc<Self>) -> Arc<Known> {
        let read = Arc::clone(&self.read);
        let read = match self.has_read.load(Ordering::Relaxed) {
            true => read.try_lock_owned().ok(),
            false => Some(read.lock_owned().await),
        };
        if let Some(read) = read {
            let kept = |reading: &Reading| if reading.has_card { CARD_KEPT } else { PAUSE };
            if read.is_none_or(|reading| reading.ended.elapsed() >= kept(&reading)) {
                self.read(read).await;
            }
        }
        self.last()
    }

    /// Reads the card, unless this was done within the last second. Returns the last site.
    pub(crate) async fn refreshed(self: &Arc<Self>) -> Arc<Known> {
        let read = Arc::clone(&self.read).lock_owned().await;
        if read.is_none_or(|reading| reading.ended.elapsed() >= PAUSE) {
            self.read(read).await;
        }
        self.last()
    }

    fn last(&self) -> Arc<Known> {
        Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the card in a task. So a call with its own time limit never ends a reading, and all calls have its result.
    async fn read(self: &Arc<Self>, mut last: OwnedMutexGuard<Option<Reading>>) {
        let sites = Arc::clone(self);
        // The task fails only if it panics or if the runtime ends. Then the last card stays.
        let _ = tokio::spawn(async move { sites.read_now(&mut last).await }).await;
    }

    async fn read_now(&self, last: &mut Option<Reading>) {
        let limit = if self.has_read.load(Ordering::Relaxed) { HINT_MAX } else { FIRST_MAX };
        let read = match timeout(limit, self.site()).await {
            Ok(read) => read,
            Err(_) => Err(format!("Redis did not answer within {} ms", limit.as_millis())),
        };
        let could = last.is_none_or(|reading| reading.has_card);
        *last = Some(Reading { ended: Instant::now(), has_card: read.is_ok() });
        match read {
            Ok(site) => {
                if !could {
                    info!(event = "site-card-read", "the site card can be read again");
                }
                let known = Arc::new(Known::new(&self.cache, site));
                *self.known.write().unwrap_or_else(PoisonError::into_inner) = known;
            }
            Err(error) if could => warn!(
                event = "site-card-unread",
                error,
                "the site card can't be read: the client uses the last card, or publishes without checking names: {error}"
            ),
            Err(_) => {}
        }
        self.has_read.store(true, Ordering::Relaxed);
    }

    async fn site(&self) -> Result<Site, String> {
        let text = self.cache.site_card().await.map_err(|error| Chain(&error).to_string())?;
        let text = text.ok_or_else(|| format!("Redis has no key {}", self.cache.keys.site_card()))?;
        Card::decode(&text).and_then(|card| Site::try_from(&card)).map_err(|error| error.to_string())
    }
}

impl Known {
    fn new(cache: &Cache, site: Site) -> Self {
        let cache = cache.in_layout(&site.metrics, site.layout.clone());
        Self { site: Arc::new(site), cache }
    }
}

/// The names of kinds or metrics that callers have used while the client had no card. Each name has a code that only
/// this client uses. The codes count down from 255, because the codes of sites count up.
#[derive(Default)]
pub(crate) struct Unchecked(Mutex<BTreeMap<u8, String>>);

impl Unchecked {
    /// The smallest code. This bound limits the names that a client remembers.
    const CODE_MIN: u8 = 128;

    /// Returns the name's code. Returns `None` if there are too many names.
    pub(crate) fn code(&self, name: &str) -> Option<u8> {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((code, _)) = names.iter().find(|(_, known)| *known == name) {
            return Some(*code);
        }
        let code = names.keys().next().map_or(Some(u8::MAX), |code| code.checked_sub(1))?;
        (code >= Self::CODE_MIN).then(|| names.insert(code, name.to_owned()))?;
        Some(code)
    }

    pub(crate) fn name(&self, code: u8) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&code).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_silent_redis_stops_no_call_that_has_its_own_limit() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let config = tallyd_redis::config::Redis { url: url.as_str().into(), ..Default::default() };
        let sites = Arc::new(Sites::new(Cache::found(&config).unwrap(), Site::default()));
        let begun = Instant::now();
        while timeout(Duration::from_millis(100), sites.current()).await.is_err() {
            assert!(begun.elapsed() < FIRST_MAX * 10, "each call waits for Redis");
        }
        assert!(begun.elapsed() >= FIRST_MAX, "the first calls wait for the card");
    }

    #[test]
    fn a_name_keeps_its_code_and_their_number_is_limited() {
        let names = Unchecked::default();
        assert_eq!([names.code("post"), names.code("video"), names.code("post")], [Some(255), Some(254), Some(255)]);
        assert_eq!((names.name(254), names.name(1)), (Some("video".to_owned()), None));
        let codes = (0..200).filter_map(|number| names.code(&number.to_string())).count();
        assert_eq!((codes, names.code("one more"), names.code("post")), (126, None, Some(255)));
    }
}
