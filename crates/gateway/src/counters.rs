//! `GET /v1/counters?kind=video&ids=1,2,3&metrics=like,view`: counters from Redis. Counters that are missing in Redis
//! come from MySQL. If Redis is unreachable, all counters come from MySQL.

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;

use super::Shared;
use super::answer::{Answer, Refused};
use super::query::Query;
use tallyd_base::config::LIKE;
use tallyd_base::http::json;
use tallyd_client::{Numbers, Source};
use tallyd_core::model::{Metric, Target, TargetId};

/// The counters of targets, in the order of the request.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Counters {
    pub kind: String,
    pub counters: Vec<Counter>,
}

/// The counters of a target.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Counter {
    /// The target's id.
    pub id: String,
    pub source: NumberSource,
    /// The count of each metric, by the metric's name. Null means unknown, not zero.
    #[serde(flatten)]
    pub numbers: BTreeMap<String, Option<i64>>,
}

/// The server that returned the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum NumberSource {
    Redis,
    /// MySQL, because Redis lost the counters or is still loading them.
    Mysql,
    /// No server knows the counters at the moment.
    Unknown,
}

pub(super) async fn show(State(gate): Shared, RawQuery(query): RawQuery) -> Answer<Response> {
    let query = Query::parse(query.as_deref(), ["kind", "ids", "metrics"])?;
    let (name, ids) = (query.must("kind")?, query.ids()?);
    let asked: BTreeSet<&str> = query.get("metrics").unwrap_or(LIKE).split(',').collect();
    let _permit = gate.may_read()?;
    if !gate.client.site().await.is_known {
        let metrics: Vec<(String, Metric)> = asked.iter().map(|name| ((*name).to_owned(), Metric(0))).collect();
        let unknown = |id| counter(TargetId(id), &Numbers::default(), &metrics);
        let counters = ids.into_iter().map(unknown).collect();
        return Ok(json(StatusCode::OK, &Counters { kind: name.to_owned(), counters }));
    }
    let kind = gate.client.kind(name).await.map_err(|error| Refused::of_client(&error))?;
    let mut metrics = Vec::with_capacity(asked.len());
    for name in asked {
        let metric = gate.client.metric(name).await.map_err(|error| Refused::of_client(&error))?;
        metrics.push((name.to_owned(), metric));
    }
    let targets: Vec<Target> = ids.into_iter().map(|id| Target { kind, id: TargetId(id) }).collect();
    let looked = gate.hints.ask(gate.client.find(&targets)).await;
    let numbers = gate.client.complete(&targets, looked).await;
    let counters =
        targets.iter().zip(&numbers).map(|(target, numbers)| counter(target.id, numbers, &metrics)).collect();
    Ok(json(StatusCode::OK, &Counters { kind: name.to_owned(), counters }))
}

fn counter(id: TargetId, numbers: &Numbers, metrics: &[(String, Metric)]) -> Counter {
    let known = metrics.iter().find_map(|(_, metric)| numbers.get(*metric));
    let source = match known.map(|number| number.source) {
        Some(Source::Redis) => NumberSource::Redis,
        Some(Source::Mysql) => NumberSource::Mysql,
        None => NumberSource::Unknown,
    };
    let value = |(name, metric): &(String, Metric)| (name.clone(), numbers.get(*metric).map(|number| number.value));
    Counter { id: id.to_string(), source, numbers: metrics.iter().map(value).collect() }
}
