//! The shared code of runs that archive boards and runs that take snapshots. Both hold the lock of the job [`JOB`], and
//! never call each other. Redis cannot check that lock. So a run claims a board before it changes any of the board's
//! data, and a script does nothing unless the run that calls it holds the claim.

pub(super) mod backup;
pub(super) mod clock;
pub(super) mod periods;
mod report;

use anyhow::Result;
use tokio::sync::{OnceCell, watch};
use tokio_util::sync::CancellationToken;

pub(super) use report::Progress;
pub use report::{Outcome, PeriodReport, Report};
pub(super) use tallyd_core::archive::Reason;
pub use tallyd_mysql::boards::JOB;

use tallyd_base::jobs::run::{Job, Run};
use tallyd_connect::fate::Fate;
use tallyd_core::archive::BoardKeys;
use tallyd_core::control::Task;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_mysql::{Store, StoreError};
use tallyd_redis::boards::Changed;
use tallyd_redis::{Cache, CacheError};

/// A board is complete only after the outbox has added all events of its period.
pub(super) const NEEDS: [Task; 2] = [Task::Archive, Task::Outbox];

pub(super) struct BoardRun<'a> {
    pub store: &'a Store,
    pub cache: &'a Cache,
    pub stop: &'a CancellationToken,
    /// The fencing token in MySQL and in the claims of boards.
    pub number: u64,
    pub now: Micros,
    evicts: OnceCell<bool>,
    progress: watch::Sender<Progress>,
}

pub(super) enum Halt {
    Stopped,
    Kept(Reason),
    Failed(anyhow::Error),
}

pub(super) type Step<T> = Result<T, Halt>;

impl<'a> BoardRun<'a> {
    pub(super) fn new<J: Job<Progress = Progress>>(run: &Run<'a, J>, now: Micros) -> Self {
        let (servers, progress) = (run.servers, run.progress.clone());
        let (store, cache, stop, number) = (&servers.store, &servers.cache, run.stop, run.number);
        Self { store, cache, stop, number, now, evicts: OnceCell::new(), progress }
    }

    /// If the clocks differ, returns `None`, and the report says so. A test sets `now`.
    pub(super) async fn begin<J: Job<Report = Report, Progress = Progress>>(
        run: &mut Run<'a, J>,
        now: Option<Micros>,
    ) -> Result<Option<Self>> {
        let store = &run.servers.store;
        let now = match now {
            Some(now) => now,
            None => {
                let read = clock::read(store, &run.servers.cache).await?;
                if let Some(problem) = read.problem {
                    clock::log_problem(&problem);
                    run.report.problem = Some(problem);
                    return Ok(None);
                }
                read.now
            }
        };
        if !run.report.head.dry_run {
            store.check_archive_run(run.number).await?;
        }
        Ok(Some(Self::new(run, now)))
    }

    pub(super) fn show(&self, at: &BoardPeriod, verb: &'static str, total: u64) {
        self.progress.send_replace(Progress::of(at, verb, total));
    }

    pub(super) fn show_done(&self, done: u64) {
        self.progress.send_modify(|progress| progress.done = done);
    }

    /// From then on, only this run can change the board's closed periods. Returns the generation of the data.
    pub(super) async fn claim(&self, board: &str) -> Step<u64> {
        let frozen = self.store.frozen_periods(board).await?;
        Ok(self.cache.claim_board(board, self.number, &frozen).await?)
    }

    pub(super) async fn keys(&self, at: &BoardPeriod) -> Step<BoardKeys> {
        Ok(self.cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default())
    }

    /// If Redis does not tell, it perhaps evicts.
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
