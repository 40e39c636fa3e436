//! The shared code of two kinds of runs: those that archive boards, and those that take snapshots. Both kinds of runs
//! hold the lock of the job [`JOB`], and never call each other.
//!
//! Redis cannot check that lock. So a run claims a board before it changes any of the board's data. A script does
//! nothing unless the run that calls it holds the claim.

pub(super) mod backup;
pub(super) mod clock;
pub(super) mod periods;
mod report;

use anyhow::Result;
use tokio::sync::{OnceCell, watch};
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
    pub store: &'a Store,
    pub cache: &'a Cache,
    pub stop: &'a CancellationToken,
    /// The run's number. MySQL and the claims of boards use this number as the fencing token.
    pub number: u64,
    pub now: Micros,
    evicts: OnceCell<bool>,
    progress: watch::Sender<Progress>,
}

/// The reason why the run stopped its work on a period.
pub(super) enum Halt {
    Stopped,
    /// The run cannot continue with this period, but can continue with other periods.
    Kept(Reason),
    /// The run cannot continue: a server does not answer, or another run took over.
    Failed(anyhow::Error),
}

pub(super) type Step<T> = Result<T, Halt>;

/// The reason why a period is not changed. The text is a sentence for an operator, and says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Reason {
    // Found by a run.
    #[error(
        "Redis lost the period's frozen zset before the copy was verified, so leaderboard_archive can hold only a part of it. A live \
         zset, if Redis has one, holds only late writes. To archive the late writes as the whole board, delete the \
         period's row of leaderboard_period"
    )]
    Lost,
    #[error(
        "Redis lost the period's frozen zset before the copy was verified, but there is a snapshot: run `tallyd board restore` to restore the \
         snapshot"
    )]
    LostWithBackup,
    #[error(
        "Redis has lost the board, wholly or in part, since its last snapshot. A live zset, if Redis has one, is not the whole \
         board: run `tallyd board restore` to restore the snapshot with later additions. If the data in Redis is right, run \
         `tallyd board snapshot NAME PERIOD --force`"
    )]
    LostLive,
    #[error(
        "Redis lost the period's frozen zset before late writes were archived: the late writes are lost, and leaderboard_archive is complete \
         without them"
    )]
    LostLate,
    #[error("{}; {}", Self::LostLate, Self::Late)]
    LostLateAndLate,
    #[error(
        "a client wrote to the period after its zset had ended, so these writes are in the live zset and not in \
         leaderboard_archive. Run `tallyd board restore` to restore the archive, and the next run merges the writes"
    )]
    Late,
    #[error(
        "a client wrote to the period after its archive was deleted: these writes are only in the live zset, which you can unlink"
    )]
    LatePruned,
    #[error(
        "Redis went back in time, and has the frozen zset of an ended period again. leaderboard_archive is complete and \
         stays unchanged: you can unlink the frozen zset, and the live zset if Redis has one"
    )]
    CameBack,
    #[error(
        "Redis went back to a state before the freeze: run `tallyd archive` to restore the \
         archived scores in Redis and to archive the board again"
    )]
    WentBack,
    #[error("another Redis server took over while this run raised scores in Redis: the next run raises all scores")]
    WentBackAgain,
    #[error(
        "the configuration no longer has this board, so tallyd does not know when to remove its zset: add the board again, or \
         delete the period's rows of leaderboard_period, leaderboard_snapshot_period and leaderboard_snapshot"
    )]
    Unknown,
    #[error(
        "the board has another time_zone or week_starts in the site card, so its period is perhaps open: correct this \
         configuration, or reload a daemon with it"
    )]
    EndsOtherwise,

    // The run found these reasons while it worked on the period.
    #[error("the period's zset disappeared from Redis during the run")]
    ZsetGone,
    #[error("Redis lost the period's frozen zset while the run read the zset")]
    FrozenGone,
    #[error("the period's frozen zset had {before} members during the copy, and has {now} members now")]
    Changed { before: u64, now: u64 },
    #[error("Redis and leaderboard_archive differ at place {0}")]
    Differs(u64),
    #[error("Redis and leaderboard_archive are equal, but both differ from the verified copy")]
    NotAsVerified,
    #[error("{0}. The period already has an archive: to archive it again, delete its row of leaderboard_period")]
    ArchivedBefore(Box<Self>),
    #[error("a client has just written to the period: the next run merges that write")]
    WrittenJustNow,
    #[error("MySQL cannot store the member {0}: its score is infinite, or its name has more than 255 bytes")]
    Unstorable(String),
    /// The error that a server returned about this period's rows or keys.
    #[error("{0}")]
    Server(String),

    // The reasons why no snapshot is taken.
    #[error("the period is frozen or archived, and tallyd takes no snapshot of such a period")]
    NotOpen,
    #[error("an interrupted restore has moved the later additions: run `tallyd board restore` to finish the restore")]
    RestoreInterrupted,

    // The reasons why nothing is restored.
    #[error("the period's archive was deleted, because it was older than archive_keep")]
    Pruned,
    #[error("the period's frozen zset is in Redis, and its archive is complete")]
    Archived,
    #[error("the period is frozen, and not archived yet: run `tallyd archive` to continue")]
    Frozen,
    #[error("MySQL has neither a complete snapshot nor an archive of the period")]
    NothingSaved,
    #[error(
        "Redis has not lost the board since the last snapshot: Redis has {live} members, and the snapshot has {saved}"
    )]
    NotLost { live: u64, saved: u64 },
    #[error("tallyd added {filled} members to Redis, but Redis has {members}: try again")]
    NotFilled { filled: u64, members: u64 },
    #[error("MySQL has {filled} members of the period, but should have {total}")]
    Incomplete { filled: u64, total: u64 },
}

impl Reason {
    /// Whether Redis has a zset of a period that has ended. Runs leave such a zset to an operator.
    fn is_of_zset_that_returned(&self) -> bool {
        matches!(self, Self::Late | Self::LatePruned | Self::CameBack)
    }
}

impl<'a> BoardRun<'a> {
    pub(super) fn new(
        store: &'a Store,
        cache: &'a Cache,
        number: u64,
        now: Micros,
        stop: &'a CancellationToken,
    ) -> Self {
        Self { store, cache, stop, number, now, evicts: OnceCell::new(), progress: watch::Sender::default() }
    }

    pub(super) async fn followed<T>(&self, to: ProgressSink, work: impl Future<Output = T>) -> Result<T> {
        tokio::select! {
            done = work => Ok(done),
            () = follow(to, self.progress.subscribe()) => anyhow::bail!("the output of the run is closed, so the run stops"),
        }
    }

    pub(super) fn show(&self, at: &BoardPeriod, verb: &'static str, total: u64) {
        self.progress.send_replace(Progress::of(at, verb, total));
    }

    pub(super) fn show_done(&self, done: u64) {
        self.progress.send_modify(|progress| progress.done = done);
    }

    /// Claims the board. From then on, only this run can change the board's closed periods. Returns the generation of
    /// the board's data.
    pub(super) async fn claim(&self, board: &str) -> Step<u64> {
        let frozen = self.store.frozen_periods(board).await?;
        Ok(self.cache.claim_board(board, self.number, &frozen).await?)
    }

    pub(super) async fn keys(&self, at: &BoardPeriod) -> Step<BoardKeys> {
        Ok(self.cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default())
    }

    /// Whether Redis evicts boards if its memory is full. If Redis does not tell, it perhaps does.
    pub(super) async fn evicts(&self) -> bool {
        let ask = async || self.cache.evicts_boards().await.unwrap_or(true);
        *self.evicts.get_or_init(ask).await
    }

    pub(super) async fn mark(&self, at: &BoardPeriod) -> Step<Option<u64>> {
        Ok(self.cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten())
    }

    /// Does the same as [`Self::taken`], but fails with [`Halt::Kept`] if the step's zset is missing.
    pub(super) fn present(&self, changed: Changed) -> Step<u64> {
        self.taken(changed)?.ok_or(Halt::Kept(Reason::ZsetGone))
    }

    /// Fails the run if its claim is lost. Returns `None` if the step's zset is missing.
    pub(super) fn taken(&self, changed: Changed) -> Step<Option<u64>> {
        match changed {
            Changed::Done(times) | Changed::Put(times) => Ok(Some(times)),
            Changed::Absent => Ok(None),
            Changed::Lost => Err(Halt::Kept(Reason::LostLive)),
            Changed::Refused => {
                let error = anyhow::Error::from(StoreError::TakenOver("the board".to_owned()));
                Err(Halt::Failed(error.context(
                    "Redis no longer has this run's claim of the board: another run has begun, or Redis lost its data",
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
