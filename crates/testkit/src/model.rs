//! A model that computes the expected result of events.

use std::collections::{BTreeMap, HashMap};

use super::World;
use sqlx::Row;
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};

type Pair = (Target, UserId);

type State = (Micros, bool);

#[derive(Default)]
pub struct Model {
    pub rows: HashMap<Pair, State>,
}

impl Model {
    pub fn apply(&mut self, event: &LikeEvent) {
        let new = (event.at, !event.liked);
        let row = self.rows.entry((event.target, event.user)).or_insert(new);
        *row = (*row).max(new);
    }

    pub fn counters(&self) -> BTreeMap<Target, i64> {
        let mut counters = BTreeMap::new();
        for ((target, _), (_, is_del)) in &self.rows {
            *counters.entry(*target).or_default() += i64::from(!is_del);
        }
        counters
    }
}

pub fn target(id: u64) -> Target {
    Target { kind: Kind(1), id: TargetId(id) }
}

pub fn body(event: &LikeEvent) -> (UserId, Vec<u8>) {
    (event.user, encode_like(event, "video", None))
}

impl World {
    /// Waits until Redis has all rows of the outbox. Then compares MySQL and Redis with the model. Call this before the
    /// first reconcile of the test, because a reconcile repairs what a daemon or a client did wrong.
    pub async fn assert_equals(&self, model: &Model) {
        self.assert_rows_equal(model).await;
        self.outbox_added().await;
        self.assert_redis_equals(model).await;
    }

    pub async fn assert_rows_equal(&self, model: &Model) {
        let rows = self.like_records().await;
        let span = |some: &HashMap<Pair, State>, other: &HashMap<Pair, State>| {
            let only = some.iter().filter(|(pair, _)| !other.contains_key(pair));
            let mut only: Vec<(Micros, Pair)> = only.map(|(pair, (at, _))| (*at, *pair)).collect();
            only.sort_unstable();
            (only.len(), only.first().copied(), only.last().copied())
        };
        if rows.len() != model.rows.len() || model.rows.keys().any(|pair| !rows.contains_key(pair)) {
            let (missing, extra) = (span(&model.rows, &rows), span(&rows, &model.rows));
            panic!(
                "MySQL has {} like records instead of {}; {} are missing, from {:?} to {:?}; {} are extra, from {:?} to {:?}; {}",
                rows.len(),
                model.rows.len(),
                missing.0,
                missing.1,
                missing.2,
                extra.0,
                extra.1,
                extra.2,
                self.whereabouts().await
            );
        }
        for (pair, state) in &model.rows {
            assert_eq!(rows.get(pair), Some(state), "the like record of {pair:?}");
        }
        let counters = self.counters().await;
        for (target, count) in model.counters() {
            assert_eq!(counters.get(&target).copied().unwrap_or(0), count, "the counter of {target:?}");
        }
    }

    async fn like_records(&self) -> HashMap<Pair, State> {
        let rows = sqlx::query(
            "SELECT kind, target_id, user_id, is_del, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED) FROM like_record",
        );
        rows.fetch_all(&self.pool)
            .await
            .unwrap()
            .iter()
            .map(|row| {
                let target = Target { kind: Kind(row.get(0)), id: TargetId(row.get(1)) };
                ((target, UserId(row.get(2))), (Micros(row.get(4)), row.get::<bool, _>(3)))
            })
            .collect()
    }

    async fn whereabouts(&self) -> String {
        let letters = self.count("SELECT COUNT(*) FROM dead_letter").await;
        let link = self.broker.connect("test").await.unwrap();
        let mut queues: Vec<String> = (0..self.broker.partitions()).map(|number| self.broker.queue(number)).collect();
        queues.push(format!("{}.returned", self.name));
        let mut text = format!("dead letters: {letters}");
        for queue in queues {
            text += &format!(", {queue}: {:?}", link.depth(&queue).await);
        }
        text
    }
}
