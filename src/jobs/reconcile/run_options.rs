//! What a run is asked to do.

use std::time::Duration;

use tallyd_core::job_name::JobName;
use tallyd_core::model::Target;

/// The name of the job in `job_lock` and `job_run`.
pub const JOB: &str = JobName::Reconcile.name();

/// How long a scheduled run waits for the servers: a run that loads what Redis has lost may be waiting for it to end.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(600);

/// Which targets a run compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Those that changed since the last run.
    Changed,
    /// All: like_record is recounted, `counter` checked against it, and Redis searched for what MySQL doesn't know.
    Full,
    /// The next slice of those of a full run, and Redis searched for what MySQL doesn't know in the next slice of its buckets.
    Scrub,
    /// Those that changed since the last run, because Redis has lost buckets. Every run loads lost buckets first, and this
    /// one was started for that.
    Rebuild,
    /// All of a second layout, which is loaded first. It notes no cut for the layout that the daemon compares.
    Layout,
    /// These, recounted.
    Targets(Vec<Target>),
}

impl Mode {
    /// Its name in tables, logs and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Changed => "changed",
            Self::Full => "full",
            Self::Scrub => "scrub",
            Self::Rebuild => "rebuild",
            Self::Layout => "layout",
            Self::Targets(_) => "targets",
        }
    }
}

/// What a run should do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Which targets.
    pub mode: Mode,
    /// Compare, and change nothing.
    pub dry_run: bool,
    /// Repair however much it is.
    pub force: bool,
    /// Go on where the last unfinished full run ended.
    pub resume: bool,
    /// Load all numbers again.
    pub reload: bool,
    /// End after this time, between two pages.
    pub run_time_max: Option<Duration>,
    /// End once the servers have had no time for a page for this time.
    pub wait_max: Option<Duration>,
}

impl RunOptions {
    /// A run as the schedule starts it.
    pub fn scheduled(mode: Mode) -> Self {
        Self {
            resume: mode == Mode::Full,
            reload: false,
            mode,
            dry_run: false,
            force: false,
            run_time_max: None,
            wait_max: Some(WAIT_MAX),
        }
    }

    /// Whether the run ends for one that loads lost buckets: it is scheduled, and the next one of its mode goes on where it
    /// ends.
    pub(super) fn gives_way(&self) -> bool {
        self.wait_max.is_some() && matches!(self.mode, Mode::Full | Mode::Scrub)
    }
}
