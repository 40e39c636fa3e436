//! The names of the jobs in MySQL, logs and the status. Pure.

use std::fmt;

/// A job. Each job has one lock. Every run of the job needs this lock, in each mode, in daemons and in commands. So a
/// job has at most one run at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum JobName {
    Reconcile,
    Archive,
    Filters,
    Recount,
}

impl JobName {
    pub const ALL: [Self; 4] = [Self::Reconcile, Self::Archive, Self::Filters, Self::Recount];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Reconcile => "reconcile",
            Self::Archive => "archive",
            Self::Filters => "filters",
            Self::Recount => "recount",
        }
    }
}

/// A kind of run that only a command can start. Each of these kinds has one lock, as each job has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandName {
    Import,
    Erase,
    Compare,
    Export,
}

impl CommandName {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Import => "import",
            Self::Erase => "erase",
            Self::Compare => "compare",
            Self::Export => "export",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobMode {
    pub job: JobName,
    pub mode: String,
    /// The cron pattern of the schedule. The pattern is empty if the mode never starts automatically.
    pub pattern: String,
    pub time_zone: String,
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
