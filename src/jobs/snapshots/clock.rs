//! Decides when a snapshot is due, and whether Redis has lost a board.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::health::{Savable, savable};
use crate::jobs::board_run::periods::Scope;
use crate::jobs::board_run::{Reason, clock};
use tallyd_base::config::{Board, ConfigHandle};
use tallyd_base::jobs::Request;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::progress::counted;
use tallyd_base::runtime::retry::Outage;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_mysql::Store;
use tallyd_redis::Cache;

const LOOK_EVERY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// A board that was late is in time again after this many times its `snapshot_every` without being late.
const IN_TIME: u32 = 10;

pub(crate) struct SnapshotClock {
    pub live: ConfigHandle,
    pub store: Store,
    pub cache: Cache,
    pub request: Request,
}

#[derive(Default)]
struct Seen {
    lost: BTreeSet<BoardPeriod>,
    saved: BTreeMap<BoardPeriod, Watched>,
    clocks_differ: bool,
}

struct Watched {
    first_at: Micros,
    late_at: Option<Micros>,
}

impl SnapshotClock {
    pub(crate) async fn run(self, beat: Heartbeat, stop: CancellationToken) {
        let mut outage = Outage::new("checking boards for snapshots");
        let mut seen = Seen::default();
        while !stop.is_cancelled() {
            let config = self.live.current();
            let every = config.boards.iter().map(|board| board.snapshot_every.0).filter(|every| !every.is_zero());
            // A due board waits at most a tenth of its `snapshot_every`.
            let every = every.min().map(|every| (every / 10).clamp(LOOK_EVERY[0], LOOK_EVERY[1]));
            if every.is_some() {
                let looked = beat.during(self.look(&config.boards, &mut seen));
                let Some(looked) = stop.run_until_cancelled(looked).await else { return };
                match looked {
                    Ok(()) => outage.over(),
                    Err(error) => drop(outage.failed(&format!("{error:#}"))),
                }
            }
            beat.pause(every.unwrap_or(LOOK_EVERY[1]), &stop).await;
        }
    }

    async fn look(&self, boards: &[Board], seen: &mut Seen) -> Result<()> {
        let Self { store, cache, .. } = self;
        let clock::Reading { now, problem } = clock::read(store, cache).await?;
        let savable = savable(store, cache, boards, &Scope::default(), now).await?;
        let lost: Vec<&Savable> = savable.iter().filter(|savable| savable.is_lost()).collect();
        let on: Vec<&Savable> = savable.iter().filter(|savable| savable.is_on()).collect();
        seen.warn_lost(lost.iter().map(|lost| lost.at.clone()).collect());
        seen.warn_late(&on, now);
        seen.log_clocks(problem.as_deref());
        if problem.is_none() && on.iter().any(|savable| savable.is_due(now)) {
            self.request.make();
        }
        // A full Redis refuses these writes, so they come last.
        let mut result = Ok(());
        for lost in lost {
            result = result.and(cache.set_board_lost(&lost.at, lost.mark).await);
        }
        Ok(result?)
    }
}

impl Seen {
    fn warn_lost(&mut self, lost: BTreeSet<BoardPeriod>) {
        for at in lost.difference(&self.lost) {
            let BoardPeriod { board, period } = at;
            warn!(event = "board-lost", board, period, "{board} {period}: {}", Reason::LostLive);
        }
        self.lost = lost;
    }

    fn warn_late(&mut self, on: &[&Savable], now: Micros) {
        let boards = self.newly_late(on, now);
        if boards > 0 {
            let wait = counted(boards as u64, "board has", "boards have");
            warn!(
                event = "snapshots-late",
                boards,
                "{wait} waited for a snapshot for twice their snapshot_every: raise it, or find out why snapshots take so long"
            );
        }
    }

    /// A board that is saved slowly is in time for a moment after each snapshot, so it must have been in time for long.
    fn newly_late(&mut self, on: &[&Savable], now: Micros) -> usize {
        let mut before = std::mem::take(&mut self.saved);
        let mut boards = 0;
        for savable in on.iter().filter(|savable| savable.has_members()) {
            let mut watched = before.remove(&savable.at).unwrap_or(Watched { first_at: now, late_at: None });
            if savable.is_late(watched.first_at, now) {
                let last = watched.late_at.replace(now);
                boards += usize::from(last.is_none_or(|last| last.after(savable.every * IN_TIME) < now));
            }
            self.saved.insert(savable.at.clone(), watched);
        }
        boards
    }

    fn log_clocks(&mut self, problem: Option<&str>) {
        if let Some(problem) = problem.filter(|_| !self.clocks_differ) {
            clock::log_problem(problem);
        }
        self.clocks_differ = problem.is_some();
    }
}
