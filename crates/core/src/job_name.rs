//! The names of the jobs, as MySQL, logs and the status have them. Pure.

use std::fmt;

/// A job. Each has one lock: of all its modes one run at a time is done, over all daemons and shells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum JobName {
    /// Compares Redis with MySQL.
    Reconcile,
    /// Archives, saves and restores boards.
    Archive,
    /// Builds Bloom filters.
    Filters,
    /// Compares `counter` with tables of the site.
    Recount,
}

impl JobName {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Reconcile, Self::Archive, Self::Filters, Self::Recount];

    /// The name in `job_lock` and `job_run`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reconcile => "reconcile",
            Self::Archive => "archive",
            Self::Filters => "filters",
            Self::Recount => "recount",
        }
    }
}

/// A run that only a command starts. Each has one lock, as a job has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandName {
    /// Copies a like table of the site.
    Import,
    /// Deletes all that is known of a user or a target.
    Erase,
    /// Compares `counter` with numbers of an older site.
    Compare,
    /// Writes likes to a table of an older site.
    Export,
}

impl CommandName {
    /// The name in `job_lock` and `job_run`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Import => "import",
            Self::Erase => "erase",
            Self::Compare => "compare",
            Self::Export => "export",
        }
    }
}

/// One way to run a job, as a configuration has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobMode {
    /// Whose lock it takes.
    pub job: JobName,
    /// The name in `job_run`.
    pub mode: String,
    /// The pattern of times by which it is due; empty for never.
    pub pattern: String,
    /// The time zone of the pattern.
    pub time_zone: String,
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
