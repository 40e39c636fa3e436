//! Looks when a snapshot is due, and whether Redis has lost a board.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Archiver;
use super::plan::LOST_LIVE;
use super::scope::Scope;
use crate::cache::Cache;
use crate::config::Live;
use crate::model::{BoardPeriod, Micros};
use crate::runtime::progress::Beat;
use crate::runtime::retry::Outage;
use crate::store::Store;

/// How often it looks at most, and at least.
const LOOK_EVERY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// A daemon's clock for snapshots.
pub struct SnapshotClock {
    /// Whose boards.
    pub live: Live,
    /// Where snapshots are.
    pub store: Store,
    /// Where boards are.
    pub cache: Cache,
    /// Set when a snapshot is due.
    pub asked: Arc<AtomicBool>,
    /// Rung then.
    pub bell: Arc<Notify>,
}

/// What it knows from its last look.
#[derive(Default)]
struct Seen {
    lost: BTreeSet<BoardPeriod>,
    told: BTreeSet<BoardPeriod>,
}

impl SnapshotClock {
    /// Looks until the stop.
    pub async fn run(self, beat: Beat, stop: CancellationToken) {
        let mut outage = Outage::new("looking at boards");
        let mut seen = Seen::default();
        while !stop.is_cancelled() {
            let archiver = Archiver::new(&self.live.now(), self.store.clone(), self.cache.clone());
            let every = archiver.boards.iter().map(|board| board.snapshot_every.0).filter(|every| !every.is_zero());
            // A board that is due waits for a tenth of its time at most.
            let every = every.min().map(|every| (every / 10).clamp(LOOK_EVERY[0], LOOK_EVERY[1]));
            if every.is_some() {
                let looked = beat.during(look(&archiver, &mut seen));
                let Some(looked) = stop.run_until_cancelled(looked).await else { return };
                match looked {
                    Ok(due) => {
                        outage.over();
                        if due {
                            self.asked.store(true, Ordering::Relaxed);
                            self.bell.notify_one();
                        }
                    }
                    Err(error) => drop(outage.failed(&format!("{error:#}"))),
                }
            }
            beat.pause(every.unwrap_or(LOOK_EVERY[1]), &stop).await;
        }
    }
}

/// Whether a snapshot is due. A board that is lost at two looks is told of once: at one look a snapshot may be between its two
/// notes.
async fn look(archiver: &Archiver, seen: &mut Seen) -> Result<bool> {
    let now = Micros::now();
    let savable = archiver.savable(&Scope::default(), now).await?;
    let are_lost: BTreeSet<BoardPeriod> =
        savable.iter().filter(|savable| savable.is_lost()).map(|savable| savable.at.clone()).collect();
    for at in are_lost.intersection(&seen.lost).filter(|at| !seen.told.contains(*at)) {
        let BoardPeriod { board, period } = at;
        warn!(event = "board-lost", board, period, "{board} {period}: {LOST_LIVE}");
    }
    seen.told = are_lost.intersection(&seen.lost).cloned().collect();
    seen.lost = are_lost;
    Ok(savable.iter().any(|savable| savable.is_on() && savable.is_due(now)))
}
