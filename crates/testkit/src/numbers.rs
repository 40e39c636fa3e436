//! Reads the numbers in Redis as they are stored, without the code that the daemon and clients read them with.

use std::collections::{BTreeMap, HashMap};

use redis::aio::MultiplexedConnection;
use tallyd_core::keys::Keys;
use tallyd_core::layout::Form;
use tallyd_core::model::{CounterKey, Kind, Metric, Target, TargetId};
use tallyd_core::period::PeriodKind;

use super::{Model, World};

impl World {
    pub async fn redis_counters(&self) -> BTreeMap<Target, i64> {
        let like = self.config.metrics.like();
        let numbers = self.redis_numbers(&mut self.redis().await, &self.cache.keys).await;
        numbers
            .into_iter()
            .filter(|((_, metric), _)| *metric == like)
            .map(|((target, _), likes)| (target, likes))
            .collect()
    }

    pub async fn redis_numbers(&self, redis: &mut MultiplexedConnection, keys: &Keys) -> BTreeMap<CounterKey, i64> {
        let mut numbers = BTreeMap::new();
        for (name, code) in &self.config.kinds.0 {
            let kind = (name.as_str(), Kind(*code));
            if keys.layout().form == Form::Packed {
                packed(redis, keys, kind, &self.config.metrics.codes(), &mut numbers).await;
            } else {
                for metric in self.config.metrics.codes() {
                    plain(redis, keys, kind, metric, &mut numbers).await;
                }
            }
        }
        numbers.retain(|_, number| *number != 0);
        numbers
    }

    /// Fails unless both layouts in Redis have exactly the model's likes, and the numbers that MySQL has of all other
    /// metrics. Also compares the boards of likes that are never closed.
    pub async fn assert_redis_equals(&self, model: &Model) {
        self.assert_redis_equals_on(&mut self.redis().await, model).await;
    }

    /// Like [`World::assert_redis_equals`], on another server than the one in `[redis] url`.
    pub async fn assert_redis_equals_on(&self, redis: &mut MultiplexedConnection, model: &Model) {
        let like = self.config.metrics.like();
        let mut likes = model.counters();
        likes.retain(|_, count| *count != 0);
        let mut expected: BTreeMap<CounterKey, i64> =
            likes.iter().map(|(target, count)| ((*target, like), *count)).collect();
        let metrics = self.config.metrics.codes();
        let others = |(_, metric): &CounterKey| *metric != like && metrics.contains(metric);
        expected.extend(self.numbers().await.into_iter().filter(|(number, _)| others(number)));
        let also = self.cache.also(&self.config.redis, &self.config.metrics).unwrap();
        for keys in [Some(&self.cache.keys), also.as_ref().map(|also| &also.keys)].into_iter().flatten() {
            assert_same(&keys.layout().to_string(), &self.redis_numbers(redis, keys).await, &expected);
        }
        for rule in self.config.rules.iter().filter(|rule| rule.metric == self.config.metrics.name(like)) {
            let Some(board) = &rule.board else { continue };
            let ranks = |it: &&tallyd_base::config::Board| &it.name == board && it.score == [rule.metric.clone()];
            if self.config.boards.iter().filter(ranks).any(|it| it.period == PeriodKind::Total) {
                let mut expected = likes.clone();
                let of = rule.kind.as_ref().and_then(|kind| self.config.kinds.named(kind));
                expected.retain(|target, _| of.is_none_or(|kind| target.kind == kind));
                let expected = expected.into_iter().map(|(target, likes)| (target.id, likes)).collect();
                assert_same(board, &scores(redis, &self.cache.keys.board(board, "total")).await, &expected);
            }
        }
    }

    async fn numbers(&self) -> BTreeMap<CounterKey, i64> {
        let sql = "SELECT kind, target_id, metric, CAST(SUM(value) AS SIGNED) FROM counter \
                   GROUP BY kind, target_id, metric HAVING SUM(value) <> 0";
        let rows: Vec<(u8, u64, u8, i64)> = sqlx::query_as(sql).fetch_all(&self.pool).await.unwrap();
        let number =
            |(kind, id, metric, value)| ((Target { kind: Kind(kind), id: TargetId(id) }, Metric(metric)), value);
        rows.into_iter().map(number).collect()
    }
}

fn assert_same<K: Ord + Copy + std::fmt::Debug>(what: &str, found: &BTreeMap<K, i64>, expected: &BTreeMap<K, i64>) {
    let keys: std::collections::BTreeSet<&K> = found.keys().chain(expected.keys()).collect();
    let of = |numbers: &BTreeMap<K, i64>, key| numbers.get(key).copied().unwrap_or(0);
    let differing: Vec<String> = keys
        .into_iter()
        .filter(|key| of(found, key) != of(expected, key))
        .map(|key| format!("{key:?} is {} instead of {}", of(found, key), of(expected, key)))
        .collect();
    assert!(
        differing.is_empty(),
        "{what} in Redis: {} differ: {:?}",
        differing.len(),
        &differing[..differing.len().min(9)]
    );
}

async fn packed(
    redis: &mut MultiplexedConnection,
    keys: &Keys,
    (name, kind): (&str, Kind),
    metrics: &[Metric],
    numbers: &mut BTreeMap<CounterKey, i64>,
) {
    for bucket in 0..keys.buckets() {
        let key = keys.counters(name, bucket);
        let fields: HashMap<String, String> = redis::cmd("HGETALL").arg(&key).query_async(redis).await.unwrap();
        for (field, text) in fields.iter().filter(|(field, _)| !field.starts_with('_')) {
            let target = Target { kind, id: TargetId(field.parse().unwrap()) };
            let values: Vec<i64> = text.split(',').map(|value| value.parse().unwrap()).collect();
            let value = |metric: &Metric| values.get(usize::from(metric.0) - 1).copied().unwrap_or(0);
            numbers.extend(metrics.iter().map(|metric| ((target, *metric), value(metric))));
        }
    }
}

async fn plain(
    redis: &mut MultiplexedConnection,
    keys: &Keys,
    kind: (&str, Kind),
    metric: Metric,
    numbers: &mut BTreeMap<CounterKey, i64>,
) {
    let pattern = keys.pattern(kind.0, metric).unwrap();
    let found: Vec<String> = redis::cmd("KEYS").arg(pattern).query_async(redis).await.unwrap();
    for key in found {
        let Some(target) = keys.target(&key, kind, metric) else { continue };
        let command = match keys.layout().form {
            Form::Entity => redis::cmd("HGET").arg(&key).arg(keys.metric(metric)).to_owned(),
            _ => redis::cmd("GET").arg(&key).to_owned(),
        };
        let number: Option<i64> = command.query_async(redis).await.unwrap();
        numbers.insert((target, metric), number.unwrap_or(0));
    }
}

async fn scores(redis: &mut MultiplexedConnection, key: &str) -> BTreeMap<TargetId, i64> {
    let all = redis::cmd("ZRANGE").arg(key).arg(0).arg(-1).arg("WITHSCORES").to_owned();
    let scores: Vec<(String, f64)> = all.query_async(redis).await.unwrap();
    scores.into_iter().map(|(member, score)| (TargetId(member.parse().unwrap()), score as i64)).collect()
}
