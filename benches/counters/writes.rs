//! Writes count events to MySQL without a broker. The measurement shows the cost of each part of a batch.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use sqlx::{Connection, MySqlConnection};
use tallyd_core::coalesce::{Entry, distinct, sums};
use tallyd_core::event::{CountEvent, EventId};
use tallyd_core::model::{Kind, Metric, Micros, Target, TargetId};
use tallyd_mysql::{Text, applied_events, likes};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::common::cpu::Processes;
use crate::common::preload::rest;
use crate::common::workload::Workload;
use crate::common::world::{Setup, World, stack};
use crate::drain::assert_sums;
use crate::{Arguments, Ran};

/// A way to write count events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Write {
    /// One statement and one commit for each count event, as in many other consumers. A duplicate counts twice.
    RowByRow,
    /// Batches without a ledger. A duplicate counts twice.
    WithoutLedger,
    /// Batches like those that the daemon writes.
    WithLedger,
    /// One hot target and four writers. The writers share one row.
    Hot1,
    /// One hot target and four writers. Each writer has its own row, as in a daemon with four partitions.
    Hot4,
    /// One hot target that has twice as many rows as there are writers. Each writer uses its two rows in turn.
    Hot8,
}

const VIEW: Metric = Metric(2);

/// The number of events in a batch: the daemon's default.
const BATCH: usize = 10_000;

/// The number of events in a batch for a hot target. If 20,000 events arrive each second, each of the four writers
/// fills a batch of this size in 5 ms.
const HOT_BATCH: usize = 25;

const WRITERS: usize = 4;

impl Write {
    pub const ALL: [Self; 6] =
        [Self::RowByRow, Self::WithoutLedger, Self::WithLedger, Self::Hot1, Self::Hot4, Self::Hot8];

    pub fn name(self) -> &'static str {
        match self {
            Self::RowByRow => "row-by-row",
            Self::WithoutLedger => "without-ledger",
            Self::WithLedger => "with-ledger",
            Self::Hot1 => "hot-1-slot",
            Self::Hot4 => "hot-4-slots",
            Self::Hot8 => "hot-8-slots",
        }
    }

    pub async fn run(self, arguments: &Arguments) -> Result<Ran> {
        let world = World::new(self.name(), Setup::default()).await?;
        let ran = self.run_in(&world, arguments).await.with_context(|| self.name());
        world.close(ran).await
    }

    async fn run_in(self, world: &World, arguments: &Arguments) -> Result<Ran> {
        let slots = match self {
            Self::Hot1 => Some(1),
            Self::Hot4 => Some(4),
            Self::Hot8 => Some(8),
            _ => None,
        };
        let single = self == Self::RowByRow || slots.is_some();
        let events = usize::try_from(if single { arguments.single_events } else { arguments.events })?;
        let hot = Target { kind: Kind(1), id: TargetId(1) };
        let targets = Workload::new(1).map(|event| if slots.is_some() { hot } else { event.target });
        let counts: Vec<CountEvent> = (0_u64..).zip(targets).take(events).map(count).collect();
        rest(Processes::of_stack(Path::new(&stack("DIR")?))?).await?;
        let began = Instant::now();
        let batches = match slots {
            Some(slots) => write_hot(world, &counts, slots).await?,
            None => self.write_all(world, &counts).await?,
        };
        let seconds = began.elapsed().as_secs_f64();
        let mut sums = BTreeMap::new();
        counts.iter().for_each(|count| *sums.entry(count.target.id.0).or_insert(0) += 1);
        assert_sums(world, &sums).await?;
        Ok(Ran {
            events_per_second: events as f64 / seconds,
            events_per_batch: events as f64 / batches as f64,
            ledger_bytes: if self == Self::WithLedger { Some(ledger_bytes(world, events).await?) } else { None },
        })
    }

    async fn write_all(self, world: &World, counts: &[CountEvent]) -> Result<usize> {
        let mut connection = MySqlConnection::connect(world.config.mysql.url.expose()).await?;
        sqlx::query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut connection).await?;
        if self == Self::RowByRow {
            for CountEvent { target, .. } in counts {
                sqlx::query(
                    "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, ?, 2, 0, 1, NOW(6)) \
                     ON DUPLICATE KEY UPDATE value = value + 1, update_at = NOW(6)",
                )
                .bind(target.id.0)
                .execute(&mut connection)
                .await?;
            }
            return Ok(counts.len());
        }
        for batch in counts.chunks(BATCH) {
            write_batch(&mut connection, batch, 0, self == Self::WithLedger).await?;
        }
        Ok(counts.len().div_ceil(BATCH))
    }
}

fn count((number, target): (u64, Target)) -> CountEvent {
    let at = Micros(tallyd_base::runtime::clock::now().0 - 60_000_000 + number.cast_signed() * 10);
    CountEvent { target, metric: VIEW, delta: 1, at, id: EventId::of(target, VIEW, &format!("view-{number}")) }
}

/// Runs the part of the consumer's transaction that writes count events.
async fn write_batch(connection: &mut MySqlConnection, batch: &[CountEvent], slot: u16, ledger: bool) -> Result<()> {
    let counts = distinct(batch.iter().copied());
    let mut tx = connection.begin().await?;
    if ledger {
        applied_events::note_applied(&mut tx, &counts.iter().map(Entry::of).collect::<Vec<_>>()).await?;
    }
    let mut text = Text::default();
    likes::add_differences(&mut text, slot, &sums(&counts));
    text.run(&mut tx, "add to counters").await?;
    tx.commit().await?;
    Ok(())
}

/// Runs four writers. Each writer writes every fourth batch.
async fn write_hot(world: &World, counts: &[CountEvent], slots: usize) -> Result<usize> {
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let batches: Vec<Vec<CountEvent>> =
            counts.chunks(HOT_BATCH).skip(writer).step_by(WRITERS).map(<[_]>::to_vec).collect();
        let mut connection = MySqlConnection::connect(world.config.mysql.url.expose()).await?;
        writers.spawn(async move {
            sqlx::query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut connection).await?;
            for (place, batch) in batches.iter().enumerate() {
                let slot = u16::try_from((writer + place * WRITERS) % slots)?;
                write_batch(&mut connection, batch, slot, true).await?;
            }
            Ok::<(), anyhow::Error>(())
        });
    }
    while let Some(ended) = writers.join_next().await {
        ended??;
    }
    Ok(counts.len().div_ceil(HOT_BATCH))
}

/// Returns the ledger's size in MySQL's files, in bytes per event. Empty partitions of the ledger are not included.
async fn ledger_bytes(world: &World, events: usize) -> Result<f64> {
    sqlx::query("ANALYZE TABLE applied_event").fetch_all(&world.pool).await?;
    let bytes: i64 = sqlx::query_scalar(
        "SELECT CAST(SUM(data_length) AS SIGNED) FROM information_schema.partitions \
         WHERE table_schema = DATABASE() AND table_name = 'applied_event' AND table_rows > 0",
    )
    .fetch_one(&world.pool)
    .await?;
    Ok(bytes as f64 / events as f64)
}
