//! A target's numbers as each server has them, side by side.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

use crate::cache::Cache;
use crate::cache::keys::KindNames;
use crate::cache::read::Found;
use crate::config::{Config, LIKE};
use crate::model::{Metric, Target};
use crate::store::Store;

/// What is known of a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shown {
    /// `video:42`.
    pub target: String,
    /// By metric, in the order of their codes.
    pub numbers: Vec<Number>,
}

/// One number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Number {
    /// Its name.
    pub metric: String,
    /// In Redis; none where that is unknown, because Redis has lost it or is getting it back, or because it is not kept there.
    pub redis: Option<i64>,
    /// In MySQL's `counter`.
    pub counter: i64,
    /// Recounted from the like records; none of other metrics.
    pub rows: Option<i64>,
}

/// Asks for all of them. Events on the way are in Redis already and not yet in MySQL.
///
/// # Errors
/// The servers'.
pub async fn show(config: &Config, store: &Store, cache: &Cache, target: Target) -> Result<Shown> {
    let like = config.metrics.like();
    let found = cache.read(&KindNames::new(&config.kinds), &[like], &[target]).await?;
    let redis = match found.first() {
        Some(Found::Known(likes)) => likes.first().copied(),
        _ => None,
    };
    let counters = store.numbers(&[target]).await?;
    let rows = store.truths(like, &[target], true).await?.get(&target).and_then(|truth| truth.rows);
    let mut names: Vec<(Metric, &String)> = config.metrics.0.iter().map(|(name, code)| (Metric(*code), name)).collect();
    names.sort_unstable();
    let number = |(metric, name): (Metric, &String)| Number {
        metric: name.clone(),
        redis: redis.filter(|_| metric == like),
        counter: counters.get(&(target, metric)).copied().unwrap_or(0),
        rows: (metric == like).then(|| rows.unwrap_or(0)),
    };
    let numbers = names.into_iter().map(number).collect();
    Ok(Shown { target: format!("{}:{}", config.kinds.name(target.kind), target.id), numbers })
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_not = |number: Option<i64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        writeln!(f, "{}", self.target)?;
        write!(f, "  {:<20}{:>14}{:>14}{:>14}", "metric", "Redis", "counter", "rows")?;
        for Number { metric, redis, counter, rows } in &self.numbers {
            let unknown = metric == LIKE && redis.is_none();
            let redis = if unknown { "unknown".to_owned() } else { or_not(*redis) };
            write!(f, "\n  {metric:<20}{redis:>14}{counter:>14}{:>14}", or_not(*rows))?;
        }
        Ok(())
    }
}
