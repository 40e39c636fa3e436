//! Reads the numbers of many targets from Redis. Reads from MySQL the numbers that Redis doesn't have.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::debug;

use super::error::require;
use super::site::Known;
use super::{Client, Result};
use tallyd_core::chain::Chain;
use tallyd_core::model::{Metric, Target};
use tallyd_redis::read::Found;

/// The largest number of targets of one call of [`Client::read`].
pub const READ_TARGETS_MAX: usize = 1_000;

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
pub struct Numbers(Vec<(Metric, Number)>);

impl Numbers {
    /// Returns the target's number for the given metric, for example its likes. Returns `None` if no server knows the
    /// number now, or if the site card lacks the metric.
    pub fn get(&self, metric: Metric) -> Option<Number> {
        self.0.iter().find_map(|(of, number)| (*of == metric).then_some(*number))
    }
}

/// The answers of Redis for targets, with the site card that was used.
pub struct Looked {
    known: Arc<Known>,
    found: Vec<Found>,
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
    /// All numbers are unknown until the client has seen a site card.
    ///
    /// # Errors
    /// [`Invalid`](super::ClientError::Invalid) for more targets; [`Redis`](super::ClientError::Redis). If only MySQL
    /// fails, the call succeeds.
    pub async fn read(&self, targets: &[Target]) -> Result<Vec<Numbers>> {
        let looked = self.find(targets).await?;
        Ok(self.complete(targets, Some(looked)).await)
    }

    /// Does the first half of [`Client::read`]: asks Redis. Use it if each half needs its own time limit.
    ///
    /// # Errors
    /// As [`Client::read`].
    pub async fn find(&self, targets: &[Target]) -> Result<Looked> {
        let in_range = targets.len() <= READ_TARGETS_MAX;
        require(in_range, || format!("a call reads at most {READ_TARGETS_MAX} targets"))?;
        let known = self.sites.current().await;
        if !known.site.is_known {
            return Ok(Looked { known, found: Vec::new() });
        }
        let (names, metrics) = (&known.site.names, known.site.metrics.codes());
        let found = known.cache.read(names, &metrics, targets).await?;
        if found.contains(&Found::Missing) {
            let missing = targets.iter().zip(&found).filter(|(_, found)| **found == Found::Missing);
            // Reading must not fail if this write fails, for instance because the server is a replica.
            if let Err(error) = known.cache.note_missing(names, missing.map(|(target, _)| *target)).await {
                debug!(event = "missing-unnoted", "{}", Chain(&error));
            }
        }
        Ok(Looked { known, found })
    }

    /// Does the second half of [`Client::read`]: asks MySQL for the targets that Redis did not know. `looked` is `None`
    /// if Redis did not answer.
    pub async fn complete(&self, targets: &[Target], looked: Option<Looked>) -> Vec<Numbers> {
        let (known, found) = match looked {
            Some(Looked { known, found }) => (known, found),
            None => (self.sites.current().await, vec![Found::Unknown; targets.len()]),
        };
        // Only a card says which kind a code stands for.
        let is_named = |target: &Target| known.site.is_known && known.site.names.get(target.kind).is_some();
        let values = |place: usize| if let Some(Found::Known(values)) = found.get(place) { Some(values) } else { None };
        let unknown = targets.iter().enumerate().filter(|(place, target)| values(*place).is_none() && is_named(target));
        let asked: Vec<Target> = unknown.map(|(_, target)| *target).collect();
        let mut stored = None;
        if !asked.is_empty()
            && let Ok(_permit) = self.reads.try_acquire()
        {
            stored = self.numbers_breaker.ask(|| self.store.numbers(&asked)).await.ok();
        }
        let stored = |target: &Target| stored.as_ref().filter(|_| is_named(target));
        let metrics = known.site.metrics.codes();
        let of = |(place, target): (usize, &Target)| numbers(&known, &metrics, *target, values(place), stored(target));
        targets.iter().enumerate().map(of).collect()
    }
}

fn numbers(
    known: &Known,
    metrics: &[Metric],
    target: Target,
    values: Option<&Vec<i64>>,
    stored: Option<&HashMap<(Target, Metric), i64>>,
) -> Numbers {
    let number = |(place, metric): (usize, &Metric)| {
        let (value, source) = match values {
            Some(values) => (*values.get(place)?, Source::Redis),
            None => (stored?.get(&(target, *metric)).copied().unwrap_or(0), Source::Mysql),
        };
        let is_below = value < 0 && !known.site.ruled(target.kind, *metric).below_zero;
        Some((*metric, Number { value: if is_below { 0 } else { value }, source }))
    };
    Numbers(metrics.iter().enumerate().filter_map(number).collect())
}
