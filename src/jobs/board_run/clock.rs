//! Reads the clocks of the host, MySQL and Redis for the jobs that work on boards. MySQL's clock decides when a period
//! is over. While the clocks differ, no period is treated as over (decision 0051).

use std::time::Duration;

use anyhow::Result;
use tracing::warn;

use super::periods::instant;
use tallyd_base::runtime::clock;
use tallyd_base::runtime::progress::spoken;
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_redis::Cache;

/// Largest accepted difference between the clocks. Time servers keep clocks within a second.
const APART_MAX: Duration = Duration::from_secs(120);

pub(in crate::jobs) struct Reading {
    pub now: Micros,
    /// Does not say which clock is wrong, because tallyd cannot know that.
    pub problem: Option<String>,
}

pub(in crate::jobs) fn log_problem(problem: &str) {
    warn!(event = "clocks-differ", problem, "{problem}");
}

pub(in crate::jobs) async fn read(store: &Store, cache: &Cache) -> Result<Reading> {
    let before = clock::now();
    let (mysql, _) = store.clock().await?;
    let redis = cache.now().await?;
    Ok(Reading { now: mysql, problem: apart([before, clock::now()], mysql, redis) })
}

/// The host's clock is read before and after the other clocks.
fn apart([before, after]: [Micros; 2], mysql: Micros, redis: Micros) -> Option<String> {
    let latest = after.max(mysql).max(redis).0 - (after.0 - before.0).max(0);
    let apart = (latest - before.min(mysql).min(redis).0).max(0).unsigned_abs();
    let apart = Duration::from_micros(apart);
    (apart > APART_MAX).then(|| {
        format!(
            "the clocks of this host, MySQL and Redis differ by {}: {}, {} and {}. No board is archived, saved or deleted until \
             they agree: synchronize the clocks",
            spoken(apart),
            instant(before),
            instant(mysql),
            instant(redis)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_clock_is_told_and_a_slow_answer_is_not() {
        let at = |seconds: i64| Micros(seconds * 1_000_000);
        assert_eq!(apart([at(1_000), at(1_000)], at(1_050), at(950)), None);
        assert_eq!(apart([at(1_000), at(1_300)], at(1_001), at(1_299)), None);
        for (host, mysql, redis) in [(2_000, 1_000, 1_000), (1_000, 2_000, 1_000), (1_000, 1_000, 2_000)] {
            for (host, mysql, redis) in [(host, mysql, redis), (3_000 - host, 3_000 - mysql, 3_000 - redis)] {
                let problem = apart([at(host), at(host)], at(mysql), at(redis)).unwrap();
                assert!(problem.contains("differ by 16 min"), "{problem}");
            }
        }
    }
}
