//! A run over boards: what the archive and the snapshots share. They run under one lock, that of the job [`JOB`], and never call each other.
//!
//! Redis does not know that lock. So a run claims a board before it changes anything of it, and every script finds the claim to be its run's, or
//! refuses.

pub(super) mod backup;
pub(super) mod clock;
pub(super) mod periods;
mod report;

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(super) use report::Progress;
pub use report::{Outcome, PeriodReport, Report};
pub use tallyd_mysql::boards::JOB;

use crate::runtime::progress::{ProgressSink, follow};
use tallyd_connect::fate::Fate;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_mysql::{Store, StoreError};
use tallyd_redis::boards::{BoardKeys, Changed};
use tallyd_redis::{Cache, CacheError};

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
    Stopped,
    /// This period alone can't go on.
    Kept(Reason),
    /// The run can't go on: a server doesn't answer, or another run took over.
    Failed(anyhow::Error),
}

pub(super) type Step<T> = Result<T, Halt>;

/// Why a period is kept as it is: a sentence for an operator, with what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Reason {
    // What a run finds.
    #[error(
        "Redis lost its frozen zset before the copy was verified: leaderboard_archive may hold a part of it; what the live \
         zset holds, if there is one, came late: delete its row of leaderboard_period to have that archived as the whole board"
    )]
    Lost,
    #[error(
        "Redis lost its frozen zset before the copy was verified, but there is a snapshot: `tallyd board restore` puts that \
         in its place"
    )]
    LostWithBackup,
    #[error(
        "Redis has lost it since its snapshot, wholly or in part, and what the live zset holds, if there is one, is not the \
         board: `tallyd board restore` puts the snapshot back with what was added since; or, if what Redis has is right, \
         `tallyd board snapshot NAME PERIOD --force` takes that"
    )]
    LostLive,
    #[error(
        "Redis lost its frozen zset before late writes were archived: these are lost, and leaderboard_archive is whole as it \
         was before"
    )]
    LostLate,
    #[error("{}; {}", Self::LostLate, Self::Late)]
    LostLateAndLate,
    #[error(
        "it was written to after its zset had ended: what came late is in the live zset and not in leaderboard_archive; \
         `tallyd board restore` puts the archive back, and the next run merges it"
    )]
    Late,
    #[error("it was written to after its archive had been pruned: the live zset holds that, and can be unlinked")]
    LatePruned,
    #[error(
        "Redis went back in time, and its frozen zset is there again after it had ended: leaderboard_archive is whole and \
         stays as it is, the zset can be unlinked, and a live one beside it"
    )]
    CameBack,
    #[error(
        "Redis has it as it was before it was frozen: `tallyd archive` raises that to its archive, and archives it once more"
    )]
    WentBack,
    #[error("another server has taken over while it was raised to its archive: the next run does that")]
    WentBackAgain,
    #[error(
        "the configuration has no such board any more, so it can't say how long its zset stays: put the board back, or delete \
         its row of leaderboard_period"
    )]
    Unknown,

    // What happens on the way.
    #[error("its zset is gone from Redis since it was looked for")]
    ZsetGone,
    #[error("its frozen zset went away while it was read: Redis lost it")]
    FrozenGone,
    #[error("its frozen zset had {before} members while it was copied, and has {now} now")]
    Changed { before: u64, now: u64 },
    #[error("Redis and leaderboard_archive differ at place {0}")]
    Differs(u64),
    #[error("Redis and leaderboard_archive are equal, but not what was verified")]
    NotAsVerified,
    #[error("{0}; it was archived before: delete its row of leaderboard_period to have it archived anew")]
    ArchivedBefore(Box<Self>),
    #[error("it was written to just now: the next run merges that")]
    WrittenJustNow,
    #[error("the score at place {0} is infinite, which MySQL can't hold")]
    InfiniteAt(u64),
    #[error("the score of {0} is infinite, which MySQL can't hold")]
    InfiniteOf(String),
    /// What a server says of this period's rows or keys.
    #[error("{0}")]
    Server(String),

    // Why no snapshot is taken.
    #[error("it is frozen or archived: only what is neither is saved")]
    NotOpen,
    #[error("a restore was interrupted, and has what was added since: `tallyd board restore` ends it")]
    RestoreInterrupted,

    // Why nothing is restored.
    #[error("its archive was pruned, by archive_keep")]
    Pruned,
    #[error("its frozen zset is in Redis, and its archive is whole")]
    Archived,
    #[error("it is frozen, and not archived yet: `tallyd archive` goes on with it")]
    Frozen,
    #[error("MySQL has neither a complete snapshot nor an archive of it")]
    NothingSaved,
    #[error("Redis has it, with {live} members, and has not lost it since its last snapshot, of {saved}")]
    NotLost { live: u64, saved: u64 },
    #[error("{filled} members were added, and Redis has {members}: try again")]
    NotFilled { filled: u64, members: u64 },
    #[error("MySQL has {filled} members of it, and should have {total}")]
    Incomplete { filled: u64, total: u64 },
}

impl<'a> BoardRun<'a> {
    pub(super) fn new(
        store: &'a Store,
        cache: &'a Cache,
        number: u64,
        now: Micros,
        stop: &'a CancellationToken,
    ) -> Self {
        Self { store, cache, stop, number, now, progress: watch::Sender::default() }
    }

    pub(super) async fn followed<T>(&self, to: ProgressSink, work: impl Future<Output = T>) -> Result<T> {
        tokio::select! {
            done = work => Ok(done),
            () = follow(to, self.progress.subscribe()) => anyhow::bail!("nobody is shown the run any longer"),
        }
    }

    pub(super) fn show(&self, at: &BoardPeriod, verb: &'static str, total: u64) {
        self.progress.send_replace(Progress::of(at, verb, total));
    }

    pub(super) fn show_done(&self, done: u64) {
        self.progress.send_modify(|progress| progress.done = done);
    }

    /// Lets this run alone change the board's closed periods from now on; returns the generation of its data.
    pub(super) async fn claim(&self, board: &str) -> Result<u64> {
        let frozen = self.store.frozen_periods(board).await?;
        Ok(self.cache.claim_board(board, self.number, &frozen).await?)
    }

    pub(super) async fn keys(&self, at: &BoardPeriod) -> Step<BoardKeys> {
        Ok(self.cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default())
    }

    pub(super) async fn mark(&self, at: &BoardPeriod) -> Step<Option<u64>> {
        Ok(self.cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten())
    }

    /// Keeps the period if the zset is gone that the step is about.
    pub(super) fn present(&self, changed: Changed) -> Step<u64> {
        self.taken(changed)?.ok_or(Halt::Kept(Reason::ZsetGone))
    }

    /// Ends the run if the claim is gone. `None` if the zset is gone that the step is about.
    pub(super) fn taken(&self, changed: Changed) -> Step<Option<u64>> {
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

    pub(super) fn check_stop(&self) -> Step<()> {
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
