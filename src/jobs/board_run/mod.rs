//! A run over boards: what the archive and the snapshots share. They run under one lock, that of the job [`JOB`], and never call each other.
//!
//! Redis does not know that lock. So a run claims a board before it changes anything of it, and every script finds the claim to be its run's, or
//! refuses.

pub(super) mod backup;
pub(super) mod clock;
pub(super) mod periods;
mod reason;
mod report;

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(super) use reason::Reason;
pub(super) use report::Progress;
pub use report::{Outcome, PeriodReport, Report};
pub use tallyd_mysql::boards::JOB;

use crate::runtime::progress::{ProgressSink, follow};
use tallyd_connect::fate::Fate;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_mysql::{Store, StoreError};
use tallyd_redis::boards::{BoardKeys, Changed};
use tallyd_redis::{Cache, CacheError};

/// One run, and how far it is.
pub(super) struct BoardRun<'a> {
    // What it needs.
    pub store: &'a Store,
    pub cache: &'a Cache,
    pub stop: &'a CancellationToken,
    // What it is told.
    /// The fencing token, in MySQL and in the boards' claims.
    pub number: u64,
    pub now: Micros,
    // What it shows.
    progress: watch::Sender<Progress>,
}

/// Why a period was left before its end.
pub(super) enum Halt {
    /// The daemon stops.
    Stopped,
    /// This period alone can't go on.
    Kept(Reason),
    /// The run can't go on: a server doesn't answer, or another run took over.
    Failed(anyhow::Error),
}

pub(super) type Step<T> = Result<T, Halt>;

impl<'a> BoardRun<'a> {
    pub fn new(store: &'a Store, cache: &'a Cache, number: u64, now: Micros, stop: &'a CancellationToken) -> Self {
        Self { store, cache, stop, number, now, progress: watch::Sender::default() }
    }

    /// Does `work`, and shows meanwhile how far it is.
    pub async fn followed<T>(&self, to: ProgressSink, work: impl Future<Output = T>) -> Result<T> {
        tokio::select! {
            done = work => Ok(done),
            () = follow(to, self.progress.subscribe()) => anyhow::bail!("nobody is shown the run any longer"),
        }
    }

    /// Shows that `total` members of a period are to be copied, or verified.
    pub fn show(&self, at: &BoardPeriod, verb: &'static str, total: u64) {
        self.progress.send_replace(Progress::of(at, verb, total));
    }

    /// Shows how many of them are.
    pub fn show_done(&self, done: u64) {
        self.progress.send_modify(|progress| progress.done = done);
    }

    /// Lets this run alone change the board's closed periods from now on; returns the generation of its data.
    pub async fn claim(&self, board: &str) -> Result<u64> {
        let frozen = self.store.frozen_periods(board).await?;
        Ok(self.cache.claim_board(board, self.number, &frozen).await?)
    }

    /// What Redis has of a period.
    pub async fn keys(&self, at: &BoardPeriod) -> Step<BoardKeys> {
        Ok(self.cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default())
    }

    /// The mark of the period's last snapshot in Redis.
    pub async fn mark(&self, at: &BoardPeriod) -> Step<Option<u64>> {
        Ok(self.cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten())
    }

    /// Keeps the period if the zset is gone that the step is about.
    pub fn present(&self, changed: Changed) -> Step<u64> {
        self.taken(changed)?.ok_or(Halt::Kept(Reason::ZsetGone))
    }

    /// Ends the run if the claim is gone. `None` if the zset is gone that the step is about.
    pub fn taken(&self, changed: Changed) -> Step<Option<u64>> {
        match changed {
            Changed::Done(times) | Changed::Put(times) => Ok(Some(times)),
            Changed::Absent => Ok(None),
            Changed::Lost => Err(Halt::Kept(Reason::LostLive)),
            Changed::Refused => {
                let error = anyhow::Error::from(StoreError::TakenOver("the board".to_owned()));
                Err(Halt::Failed(error.context(
                    "Redis no longer knows this run's claim of the board: another run has begun, or Redis lost its data",
                )))
            }
        }
    }

    pub fn check_stop(&self) -> Step<()> {
        if self.stop.is_cancelled() { Err(Halt::Stopped) } else { Ok(()) }
    }
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        match error.fate() {
            Fate::Item => Self::Kept(Reason::Server(format!("{:#}", anyhow::Error::from(error)))),
            _ => Self::Failed(error.into()),
        }
    }
}

impl From<CacheError> for Halt {
    fn from(error: CacheError) -> Self {
        match error.fate() {
            Fate::Item => Self::Kept(Reason::Server(format!("{:#}", anyhow::Error::from(error)))),
            _ => Self::Failed(error.into()),
        }
    }
}
