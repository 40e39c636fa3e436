//! A target's counters in Redis, in `counter` and in the like records, side by side.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use serde::Serialize;

use crate::config::Config;
use tallyd_core::model::{Metric, Target};
use tallyd_mysql::Store;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;
use tallyd_redis::read::Found;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetNumbers {
    pub target: String,
    pub numbers: Vec<Number>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Number {
    pub metric: String,
    pub redis: Option<i64>,
    pub counter: i64,
    pub rows: Option<i64>,
}

/// Reads all counters of a target. Redis can count an event in flight before MySQL counts this event.
pub async fn of(config: &Config, store: &Store, cache: &Cache, target: Target) -> Result<TargetNumbers> {
    let (like, metrics) = (config.metrics.like(), config.metrics.codes());
    let found = cache.read(&KindNames::new(&config.kinds), &metrics, &[target]).await?;
    let redis: BTreeMap<Metric, i64> = match found.into_iter().next() {
        Some(Found::Known(values)) => metrics.into_iter().zip(values).collect(),
        _ => BTreeMap::new(),
    };
    let counters = store.numbers(&[target]).await?;
    let (truths, _) = store.truths(&[(target, like)], Some(like), None).await?;
    let rows = truths.get(&(target, like)).and_then(|truth| truth.rows);
    let mut names: Vec<(Metric, &String)> = config.metrics.0.iter().map(|(name, code)| (Metric(*code), name)).collect();
    names.sort_unstable();
    let number = |(metric, name): (Metric, &String)| Number {
        metric: name.clone(),
        redis: redis.get(&metric).copied(),
        counter: counters.get(&(target, metric)).copied().unwrap_or(0),
        rows: (metric == like).then(|| rows.unwrap_or(0)),
    };
    let numbers = names.into_iter().map(number).collect();
    Ok(TargetNumbers { target: format!("{}:{}", config.kinds.name(target.kind), target.id), numbers })
}

impl fmt::Display for TargetNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or = |number: &Option<i64>, word: &str| number.map_or_else(|| word.to_owned(), |number| number.to_string());
        writeln!(f, "{}", self.target)?;
        write!(f, "  {:<20}{:>14}{:>14}{:>14}", "metric", "Redis", "counter", "rows")?;
        for Number { metric, redis, counter, rows } in &self.numbers {
            write!(f, "\n  {metric:<20}{:>14}{counter:>14}{:>14}", or(redis, "unknown"), or(rows, "-"))?;
        }
        Ok(())
    }
}
