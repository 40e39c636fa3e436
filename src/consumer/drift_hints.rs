//! Hints for the next `changed` reconcile, which lists targets by the time of their newest event. It would not list a target whose events
//! are applied late (a dead letter that is replayed, an event that an API server has kept), and an earlier reconcile may have taken them
//! off Redis.

use std::time::Duration;

use sqlx::MySqlConnection;

use crate::config::{Derived, Rules, Writes};
use tallyd_core::model::{CounterKey, Difference, Micros};
use tallyd_mysql::{StoreError, changed};

/// Targets that one batch keeps at most.
const KEPT_MAX: usize = 1_000;

/// Keeps hints of what is applied late.
pub(super) struct DriftHints {
    /// `[reconcile] overlap`.
    overlap: Derived<Duration>,
}

impl DriftHints {
    pub fn new(overlap: Derived<Duration>) -> Self {
        Self { overlap }
    }

    /// Keeps the counters of `differences` that the next reconcile would not list.
    pub async fn keep(
        &mut self,
        tx: &mut MySqlConnection,
        now: Micros,
        differences: &[Difference],
        rules: &Rules,
    ) -> Result<(), StoreError> {
        let looks_back: Duration = *self.overlap.get() / 2;
        let by_api = |it: &Difference| rules.of(it.target.kind, it.metric).writer == Writes::Api;
        if late(differences, now.before(looks_back), by_api).is_empty() {
            return Ok(());
        }
        // A backlog is as old. But a run lists everything since the run before it, and no run has begun since then.
        let Some(began) = changed::last_reconcile(tx).await? else { return Ok(()) };
        let late = late(differences, began.before(looks_back), by_api);
        let late: Vec<(CounterKey, i64)> = late.into_iter().map(|key| (key, 0)).collect();
        changed::keep_hints(tx, &late).await?;
        Ok(())
    }
}

/// Differences that are older than `before`, of counters that API servers count in Redis, sorted by key.
fn late(differences: &[Difference], before: Micros, by_api: impl Fn(&Difference) -> bool) -> Vec<CounterKey> {
    let is_late = |it: &&Difference| it.delta != 0 && it.at < before && by_api(it);
    let mut late: Vec<CounterKey> =
        differences.iter().filter(is_late).map(|it| (it.target, it.metric)).take(KEPT_MAX).collect();
    late.sort_unstable();
    late
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_core::model::{Kind, Metric, Target, TargetId};

    #[test]
    fn only_changes_that_are_old_are_late() {
        let of = |id, metric, delta, at| Difference {
            target: Target { kind: Kind(1), id: TargetId(id) },
            metric: Metric(metric),
            delta,
            at: Micros(at),
        };
        let differences = [of(1, 3, 1, 9), of(1, 1, 1, 9), of(2, 1, 0, 9), of(3, 1, 1, 10), of(4, 1, 1, 9)];
        let found = late(&differences, Micros(10), |it| it.target.id != TargetId(4));
        let found: Vec<(u8, u64)> = found.iter().map(|(target, metric)| (metric.0, target.id.0)).collect();
        assert_eq!(found, [(1, 1), (3, 1)]);
        let many: Vec<Difference> = (0..5_000).map(|id| of(id, 1, 1, 1)).collect();
        assert_eq!(late(&many, Micros(10), |_| true).len(), KEPT_MAX);
    }
}
