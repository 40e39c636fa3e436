//! Measures how the daemon drains a full queue.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sqlx::Row;
use tallyd_core::event::encode_count;
use tallyd_core::model::{Micros, TargetId};
use tokio::time::Instant;

use crate::Ran;
use crate::common::contender::Contender;
use crate::common::cpu::Processes;
use crate::common::model::Model;
use crate::common::preload::{preload, preload_messages, rest};
use crate::common::workload::{USERS, Workload};
use crate::common::world::{Setup, World, stack};

/// The kind of events in the queue. The events' targets follow Zipf 1.0 over 100,000 targets, except in the case with a
/// single hot target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Queue {
    /// Likes and unlikes.
    Likes,
    /// Events of the type `count`, for a metric that API servers count in Redis.
    Counts,
    /// Events of the type `count`, for a metric that the daemon counts in Redis. Each batch adds a row to the outbox
    /// table.
    CountsByDaemon,
    /// Events of the type `count`, all for a single target.
    HotCounts,
}

const BY_API: &str = "[metrics]\nlike = 1\nview = 2\n[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n";
const BY_DAEMON: &str = "[metrics]\nlike = 1\nview = 2\n";

impl Queue {
    pub const ALL: [Self; 4] = [Self::Likes, Self::Counts, Self::CountsByDaemon, Self::HotCounts];

    pub fn name(self) -> &'static str {
        match self {
            Self::Likes => "likes",
            Self::Counts => "counts",
            Self::CountsByDaemon => "counts-by-daemon",
            Self::HotCounts => "hot-counts",
        }
    }

    /// Fills the queue of a new world, drains it, and compares the counters with the model.
    pub async fn run(self, events: u64) -> Result<Ran> {
        let metrics = if self == Self::CountsByDaemon { BY_DAEMON } else { BY_API };
        let world = World::new(self.name(), Setup { metrics, ..Setup::default() }).await?;
        let ran = self.run_in(&world, events).await.with_context(|| self.name());
        world.close(ran).await
    }

    async fn run_in(self, world: &World, events: u64) -> Result<Ran> {
        let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
        let likes = Workload::new(1).take(usize::try_from(events)?);
        let mut sums = BTreeMap::new();
        if self == Self::Likes {
            preload(world, likes).await?;
        } else {
            let targets = likes.map(|event| if self == Self::HotCounts { TargetId(1) } else { event.target.id });
            preload_messages(world, counts(targets.inspect(|id| *sums.entry(id.0).or_insert(0) += 1))).await?;
        }
        rest(servers).await?;
        let tallyd = Contender::tallyd(self.name(), 1);
        let mut running = tallyd.start(world, &[])?;
        running.consuming(1).await?;
        let began = Instant::now();
        let (batches, _) = running.committed(events).await?;
        let seconds = began.elapsed().as_secs_f64();
        if self == Self::Likes {
            let model = Model::of(Workload::new(1).take(usize::try_from(events)?));
            tallyd.end(running, world, &model, USERS).await?;
        } else {
            running.stop().await?;
            world.assert_drained().await?;
            assert_sums(world, &sums).await?;
        }
        Ok(Ran {
            events_per_second: events as f64 / seconds,
            events_per_batch: events as f64 / batches as f64,
            ledger_bytes: None,
        })
    }
}

/// Makes a count event of one view for each of these targets. Each event is returned as a routing key and a body.
fn counts(targets: impl Iterator<Item = TargetId>) -> impl Iterator<Item = (String, Vec<u8>)> {
    let now = tallyd_base::runtime::clock::now();
    (0_i64..).zip(targets).map(move |(number, id)| {
        // The events are ten microseconds apart, and the last event happens now.
        let at = Micros(now.0 - 60_000_000 + number * 10);
        (id.to_string(), encode_count(id, ("video", "view"), 1, at, &format!("view-{number}"), None))
    })
}

/// Fails unless every view counter is right. A counter's value is the sum of its slots (its rows in the table).
pub async fn assert_sums(world: &World, sums: &BTreeMap<u64, i64>) -> Result<()> {
    let rows = sqlx::query(
        "SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter WHERE kind = 1 AND metric = 2 GROUP BY target_id",
    )
    .fetch_all(&world.pool)
    .await?;
    let read = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    let read: BTreeMap<u64, i64> = read.collect::<Result<_, sqlx::Error>>()?;
    ensure!(read == *sums, "the view counters are wrong");
    Ok(())
}
