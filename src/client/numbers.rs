//! The numbers of many targets at once: from Redis, and from MySQL what Redis doesn't know.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::{debug, warn};

use super::Client;
use crate::cache::read::Found;
use crate::model::{Metric, Target};

/// How long MySQL has to say what Redis doesn't know.
const ASK_MAX: Duration = Duration::from_secs(5);

/// How long it isn't asked after it didn't.
const AWAY_FOR: Duration = Duration::from_secs(5);

/// Who knows a target's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Redis: every click until now is counted.
    Redis,
    /// MySQL, because Redis has lost them, or is still getting them back: clicks of the last moments are missing.
    Mysql,
    /// Neither of them, at the moment.
    Nobody,
}

/// A target's numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Who knows them.
    pub source: Source,
    /// By metric.
    values: BTreeMap<Metric, i64>,
}

impl Numbers {
    /// The number of that metric; none where nobody knows it, or it is not in `[metrics]`.
    pub fn get(&self, metric: Metric) -> Option<i64> {
        self.values.get(&metric).copied()
    }
}

impl Client {
    /// The numbers of all metrics for each of `targets`, in their order: from Redis in one round trip for some hundreds of them, and
    /// from MySQL, in one query for each kind, what Redis doesn't know. What is missing there is noted, so that a daemon loads it within
    /// seconds.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn read(&self, targets: &[Target]) -> Result<Vec<Numbers>> {
        let found = self.cache.read(&self.names, &self.metrics, targets).await?;
        let unknown: Vec<Target> = targets
            .iter()
            .zip(&found)
            .filter(|(_, found)| !matches!(found, Found::Known(_)))
            .map(|(target, _)| *target)
            .collect();
        let mut stored = None;
        if !unknown.is_empty() {
            let missing = targets.iter().zip(&found).filter(|(_, found)| **found == Found::Missing);
            // A hint: who reads must not fail for it, for instance on a replica.
            if let Err(error) = self.cache.note_missing(&self.names, missing.map(|(target, _)| *target)).await {
                debug!(event = "missing-unnoted", "{:#}", anyhow::Error::from(error));
            }
            stored = self.ask_mysql(self.store.numbers(&unknown)).await;
        }
        Ok(targets.iter().zip(found).map(|(target, found)| self.numbers(*target, found, stored.as_ref())).collect())
    }

    fn numbers(&self, target: Target, found: Found, stored: Option<&HashMap<(Target, Metric), i64>>) -> Numbers {
        match (found, stored) {
            (Found::Known(values), _) => {
                Numbers { source: Source::Redis, values: self.metrics.iter().copied().zip(values).collect() }
            }
            (_, Some(stored)) => {
                let value = |metric: &Metric| (*metric, stored.get(&(target, *metric)).copied().unwrap_or(0));
                Numbers { source: Source::Mysql, values: self.metrics.iter().map(value).collect() }
            }
            (_, None) => Numbers { source: Source::Nobody, values: BTreeMap::new() },
        }
    }

    /// What MySQL says; none where it doesn't answer in time, or lately didn't.
    pub(super) async fn ask_mysql<T>(&self, question: impl Future<Output = crate::store::Result<T>>) -> Option<T> {
        let away = |until| *self.mysql_away.lock().unwrap_or_else(PoisonError::into_inner) = until;
        let is_away = *self.mysql_away.lock().unwrap_or_else(PoisonError::into_inner);
        if is_away.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        match tokio::time::timeout(ASK_MAX, question).await {
            Ok(Ok(answer)) => {
                away(None);
                return Some(answer);
            }
            Ok(Err(error)) => say_unasked(is_away, &format!("{:#}", anyhow::Error::from(error))),
            Err(_) => say_unasked(is_away, "it has not answered in time"),
        }
        away(Some(Instant::now() + AWAY_FOR));
        None
    }
}

/// Once for an outage: `former` is set while it goes on.
fn say_unasked(former: Option<Instant>, error: &str) {
    if former.is_none() {
        warn!(
            event = "mysql-unasked",
            error,
            "MySQL can't say what users like, so clicks count without being asked about, nor what Redis has lost: {error}"
        );
    }
}
