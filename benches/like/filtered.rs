//! Prepares the same targets with Bloom filters: writes rows of old likes, and builds filters from these rows.

use anyhow::{Result, ensure};
use sqlx::AssertSqlSafe;
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{self, RunOptions};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::progress::ProgressSink;
use tallyd_base::servers::Servers;
use tallyd_filters::Filters;
use tokio_util::sync::CancellationToken;

use crate::TARGETS;
use crate::common::world::World;

/// The number of users who like each target.
const LIKERS: u64 = 10;

/// Number of targets whose rows one statement writes.
const AT_ONCE: u64 = 500;

/// Writes the rows and builds the filters before any event is published. If events were already published, the filter
/// run would wait until a consumer commits its fence (its marker in the queues). The wait would never end, because no
/// consumer runs here. Returns the configuration for a client that uses filters.
pub async fn prepare(world: &World) -> Result<Config> {
    for first in (1..=TARGETS).step_by(AT_ONCE as usize) {
        let targets = first..=TARGETS.min(first + AT_ONCE - 1);
        // These users are different from the users of the benchmark's likes.
        let row = |target: u64, user: u64| format!("(1, {target}, {}, 0, UTC_TIMESTAMP(6))", (1_u64 << 50) + user);
        let likes: Vec<String> =
            targets.clone().flat_map(|target| (0..LIKERS).map(move |user| row(target, user))).collect();
        let counters: Vec<String> =
            targets.map(|target| format!("(1, {target}, 1, 0, {LIKERS}, UTC_TIMESTAMP(6))")).collect();
        for (table, columns, rows) in [
            ("like_record", "user_id, is_del, update_at", likes),
            ("counter", "metric, slot, value, update_at", counters),
        ] {
            let sql = format!("INSERT INTO {table} (kind, target_id, {columns}) VALUES {}", rows.join(", "));
            sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await?;
        }
    }
    let mut config = world.config.clone();
    config.filter.likes_min = LIKERS;
    config.filter.asked = true;
    let servers = Servers::new(&config)?;
    let (filters, options, stop) = (Filters::new(&config), RunOptions::default(), CancellationToken::new());
    let Ran::Ended(report) = run::once(&servers, &config, &filters, options, ProgressSink::Log, &stop).await? else {
        anyhow::bail!("another process builds filters")
    };
    ensure!(report.built == TARGETS, "not all filters were built: {report}");
    Ok(config)
}
