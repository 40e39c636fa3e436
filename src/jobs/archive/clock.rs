//! What time it is for boards, when a snapshot is due, and whether Redis has lost a board.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::board_health::Savable;
use super::candidates::{Scope, instant};
use super::plan::LOST_LIVE;
use super::{Archiver, Report};
use crate::cache::Cache;
use crate::config::ConfigHandle;
use crate::jobs::Request;
use crate::model::{BoardPeriod, Micros};
use crate::runtime::liveness::Heartbeat;
use crate::runtime::progress::spoken;
use crate::runtime::retry::Outage;
use crate::store::Store;

/// How often it looks at most, and at least.
const LOOK_EVERY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// How far clocks may be apart: nothing is over by a clock that is wrong, and time servers keep them within a second.
const APART_MAX: Duration = Duration::from_secs(120);

/// A daemon's clock for snapshots.
pub struct SnapshotClock {
    /// Whose boards.
    pub live: ConfigHandle,
    /// Where snapshots are.
    pub store: Store,
    /// Where boards are.
    pub cache: Cache,
    /// Made when a snapshot is due.
    pub request: Request,
}

/// What it knows from its last look.
#[derive(Default)]
struct Seen {
    lost: BTreeSet<BoardPeriod>,
    is_late: bool,
    clocks_differ: bool,
}

impl SnapshotClock {
    /// Looks until the stop.
    pub async fn run(self, beat: Heartbeat, stop: CancellationToken) {
        let mut outage = Outage::new("looking at boards");
        let mut seen = Seen::default();
        while !stop.is_cancelled() {
            let archiver = Archiver::new(&self.live.current(), self.store.clone(), self.cache.clone());
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
                            self.request.make();
                        }
                    }
                    Err(error) => drop(outage.failed(&format!("{error:#}"))),
                }
            }
            beat.pause(every.unwrap_or(LOOK_EVERY[1]), &stop).await;
        }
    }
}

/// Whether a snapshot is due. What is wrong is told once.
async fn look(archiver: &Archiver, seen: &mut Seen) -> Result<bool> {
    let (now, problem) = archiver.time().await?;
    let savable = archiver.savable(&Scope::default(), now).await?;
    let lost = savable.iter().filter(|savable| savable.is_lost()).map(|savable| savable.at.clone()).collect();
    let on: Vec<&Savable> = savable.iter().filter(|savable| savable.is_on()).collect();
    seen.tell_lost(lost);
    seen.tell_late(on.iter().filter(|savable| savable.is_late(now)).count());
    if let (Some(problem), false) = (&problem, seen.clocks_differ) {
        warn!(event = "clocks-differ", problem, "{problem}");
    }
    seen.clocks_differ = problem.is_some();
    Ok(problem.is_none() && on.iter().any(|savable| savable.is_due(now)))
}

impl Seen {
    fn tell_lost(&mut self, lost: BTreeSet<BoardPeriod>) {
        for at in lost.difference(&self.lost) {
            let BoardPeriod { board, period } = at;
            warn!(event = "board-lost", board, period, "{board} {period}: {LOST_LIVE}");
        }
        self.lost = lost;
    }

    fn tell_late(&mut self, boards: usize) {
        if boards > 0 && !self.is_late {
            warn!(
                event = "snapshots-late",
                boards,
                "{boards} boards have waited for a snapshot for twice their snapshot_every: raise it, or look why snapshots take so long"
            );
        }
        self.is_late = boards > 0;
    }
}

impl Archiver {
    /// When a run begins; where the clocks differ, what it says instead of doing anything.
    ///
    /// # Errors
    /// A server is away.
    pub async fn begin(&self) -> Result<Result<Micros, Report>> {
        let (now, problem) = self.time().await?;
        let Some(problem) = problem else { return Ok(Ok(now)) };
        warn!(event = "clocks-differ", problem, "{problem}");
        Ok(Err(Report { problem: Some(problem), ..Report::default() }))
    }

    /// MySQL's time, by which it is judged what is over; and what is wrong, where nobody can tell which clock is right.
    async fn time(&self) -> Result<(Micros, Option<String>)> {
        let asked = Micros::now();
        let (mysql, _) = self.store.clock().await?;
        let redis = self.cache.now().await?;
        Ok((mysql, apart([asked, Micros::now()], mysql, redis)))
    }
}

/// What is said where the clocks differ. The host's is read before and after the others.
fn apart([before, after]: [Micros; 2], mysql: Micros, redis: Micros) -> Option<String> {
    let latest = after.max(mysql).max(redis).0 - (after.0 - before.0).max(0);
    let apart = (latest - before.min(mysql).min(redis).0).max(0).unsigned_abs();
    let apart = Duration::from_micros(apart);
    (apart > APART_MAX).then(|| {
        format!(
            "the clocks of this host, MySQL and Redis differ by {}: {}, {} and {}; no board is archived, saved or deleted until \
             they agree: synchronize them",
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
                let said = apart([at(host), at(host)], at(mysql), at(redis)).unwrap();
                assert!(said.contains("differ by 16 min"), "{said}");
            }
        }
    }
}
