//! Reads the numbers of many targets from Redis. Reads from MySQL the numbers that Redis doesn't have.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::error::require;
use super::{Client, Result};
use tallyd_core::chain::Chain;
use tallyd_core::model::{Metric, Target};
use tallyd_redis::read::Found;

/// The timeout of a query to MySQL.
const ASK_MAX: Duration = Duration::from_secs(5);

/// How long the client does not ask MySQL after MySQL failed to answer.
const AWAY_FOR: Duration = Duration::from_secs(5);

/// The largest number of targets of one call of [`Client::read`].
pub const READ_TARGETS_MAX: usize = 1_000;

/// The instant until which the client does not ask MySQL, because MySQL failed to answer.
pub(super) type Unasked = std::sync::Mutex<Option<Instant>>;

/// The server that a number was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Redis. Redis has all changes that the daemon has written to MySQL, and all changes that API servers have counted.
    Redis,
    /// MySQL, because Redis has lost the number, or the daemon is still loading it. Changes of the last moments are
    /// missing.
    Mysql,
}

/// One number of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// The number. The value is never below zero, unless the number's rule says `below_zero`.
    pub value: i64,
    /// The server that the number was read from.
    pub source: Source,
}

/// A target's numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers(BTreeMap<Metric, Number>);

impl Numbers {
    /// Returns the target's number for the given metric, for example its likes. Returns `None` if no server knows the
    /// number now, or if `[metrics]` does not name the metric.
    pub fn get(&self, metric: Metric) -> Option<Number> {
        self.0.get(&metric).copied()
    }
}

impl Client {
    /// Reads the numbers of all metrics for each of up to [`READ_TARGETS_MAX`] `targets`, in the order of `targets`.
    /// The call makes one round trip to Redis for each 500 targets. If Redis does not know some of the targets, the
    /// call also makes one query to MySQL for each kind of these targets.
    ///
    /// The call records in Redis which numbers are lost, and a daemon loads these numbers within seconds. Until then,
    /// at most four calls at a time ask MySQL. Further calls return `None` for these numbers. A number that is below
    /// zero for a moment is returned as zero, unless its rule says `below_zero`.
    ///
    /// # Errors
    /// [`Invalid`](super::ClientError::Invalid) for more targets; [`Redis`](super::ClientError::Redis). If only MySQL
    /// fails, the call succeeds.
    pub async fn read(&self, targets: &[Target]) -> Result<Vec<Numbers>> {
        let found = self.find(targets).await?;
        Ok(self.complete(targets, &found).await)
    }

    /// Does the first half of [`Client::read`]: asks Redis. Use it if each half needs its own time limit.
    ///
    /// # Errors
    /// As [`Client::read`].
    pub async fn find(&self, targets: &[Target]) -> Result<Vec<Found>> {
        let in_range = targets.len() <= READ_TARGETS_MAX;
        require(in_range, || format!("a call reads at most {READ_TARGETS_MAX} targets"))?;
        let found = self.cache.read(&self.names, &self.metrics, targets).await?;
        if found.contains(&Found::Missing) {
            let missing = targets.iter().zip(&found).filter(|(_, found)| **found == Found::Missing);
            // Reading must not fail if this write fails, for instance because the server is a replica.
            if let Err(error) = self.cache.note_missing(&self.names, missing.map(|(target, _)| *target)).await {
                debug!(event = "missing-unnoted", "{}", Chain(&error));
            }
        }
        Ok(found)
    }

    /// Does the second half of [`Client::read`]: asks MySQL for the targets that Redis did not know.
    pub async fn complete(&self, targets: &[Target], found: &[Found]) -> Vec<Numbers> {
        let unknown = targets.iter().zip(found).filter(|(_, found)| !matches!(found, Found::Known(_)));
        let asked: Vec<Target> = unknown.map(|(target, _)| *target).collect();
        let mut stored = None;
        if !asked.is_empty()
            && let Ok(_permit) = self.reads.try_acquire()
        {
            stored = self.ask_mysql(self.store.numbers(&asked)).await;
        }
        targets.iter().zip(found).map(|(target, found)| self.numbers(*target, found, stored.as_ref())).collect()
    }

    fn numbers(&self, target: Target, found: &Found, stored: Option<&HashMap<(Target, Metric), i64>>) -> Numbers {
        let known = if let Found::Known(values) = found { Some(values) } else { None };
        let number = |(place, metric): (usize, &Metric)| {
            let (value, source) = match known {
                Some(values) => (*values.get(place)?, Source::Redis),
                None => (stored?.get(&(target, *metric)).copied().unwrap_or(0), Source::Mysql),
            };
            let least = if self.rules.of(target.kind, *metric).below_zero { i64::MIN } else { 0 };
            Some((*metric, Number { value: value.max(least), source }))
        };
        Numbers(self.metrics.iter().enumerate().filter_map(number).collect())
    }

    /// Asks MySQL. Returns `None` if MySQL fails to answer in time, or failed recently.
    async fn ask_mysql<T>(&self, question: impl Future<Output = tallyd_mysql::Result<T>>) -> Option<T> {
        let away = |until| *self.unasked.lock().unwrap_or_else(PoisonError::into_inner) = until;
        let is_away = *self.unasked.lock().unwrap_or_else(PoisonError::into_inner);
        if is_away.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        match tokio::time::timeout(ASK_MAX, question).await {
            Ok(Ok(answer)) => {
                away(None);
                return Some(answer);
            }
            Ok(Err(error)) => say_unasked(is_away, &Chain(&error).to_string()),
            Err(_) => say_unasked(is_away, "MySQL did not answer in time"),
        }
        away(Some(Instant::now() + AWAY_FOR));
        None
    }
}

/// Logs the first failure of an outage. `former` is set if MySQL had already failed before.
fn say_unasked(former: Option<Instant>, error: &str) {
    if former.is_none() {
        warn!(event = "mysql-unasked", error, "MySQL failed: numbers that Redis has lost stay unknown: {error}");
    }
}
