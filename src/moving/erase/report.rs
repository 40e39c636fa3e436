//! The report and the progress of an erase. They do not name the erased user or target.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tracing::info;

use crate::jobs::runner::{self, Outcome};
use crate::runtime::progress::{RunProgress, rate};

/// Places where the subject can still be named, and for how long.
const BEYOND: [&str; 4] = [
    "backups, binary logs and snapshots of MySQL, Redis and RabbitMQ: until they expire; erase again after a restore",
    "logs of API servers, proxies and databases; tallyd's own logs name no user",
    "queues and tables of other systems that receive the site's events",
    "applied_event has digests of counts that can't be linked to a user or a target: they are deleted after [consumer] applied_event_keep",
];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `user` or `target`.
    pub of: &'static str,
    /// Nothing was changed, only counted.
    pub dry_run: bool,
    pub stopped: bool,
    /// The run that this run resumed.
    pub resumed_run: Option<u64>,
    /// Likes that were taken back by published unlikes.
    pub unlikes: u64,
    /// Rows of `like_record` that were deleted.
    pub rows: u64,
    /// Rows that were liked again after the unlikes. They stay.
    pub liked_again: u64,
    /// Rows of a target's numbers, by table.
    pub numbers: BTreeMap<&'static str, u64>,
    /// Keys and fields in Redis: numbers of a target, remembered clicks, a user's own keys.
    pub redis_keys: u64,
    /// Dropped filters. The daemon builds them again.
    pub filters: u64,
    /// Rows of the outbox that were rewritten or deleted.
    pub outbox_rows: u64,
    pub letters_deleted: u64,
    /// Lists that contain events of others.
    pub letters_rewritten: u64,
    /// Dead letters that can name the subject in a way that tallyd does not know.
    pub unclear_letters: Vec<u64>,
    /// Reports and checkpoints of runs that were rewritten.
    pub runs: u64,
    /// Zsets of boards that have lost the member.
    pub zsets: u64,
    /// Places of archived boards that were renamed.
    pub places: u64,
    /// Rows of boards' snapshots.
    pub saved: u64,
    /// Queues with messages of any user.
    pub waiting: Vec<Waiting>,
    /// API servers count likes, so a reconcile must still subtract the unlikes from the numbers in Redis.
    pub redis_follows: bool,
    /// Work that is left for another run or an operator.
    pub left: Vec<String>,
    /// Places that no run reaches.
    pub beyond: [&'static str; 4],
}

/// A queue with messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    pub queue: String,
    pub messages: u64,
}

impl Report {
    pub(super) fn new(of: &'static str, dry_run: bool) -> Self {
        Self { of, dry_run, beyond: BEYOND, ..Self::default() }
    }

    /// Whether no work is left.
    pub fn is_complete(&self) -> bool {
        !self.stopped && self.left.is_empty()
    }
}

impl runner::Report for Report {
    fn outcome(&self) -> Outcome {
        match self {
            _ if self.dry_run => Outcome::DryRun,
            _ if self.stopped => Outcome::Stopped,
            _ => Outcome::Done,
        }
    }
}

/// One line for the log. `{:#}` adds details on further lines.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, unlikes, rows, redis_keys, filters, outbox_rows, runs, zsets, places, saved, .. } = self;
        let Self { letters_deleted, letters_rewritten, .. } = self;
        let would = if self.dry_run { "would be " } else { "" };
        write!(f, "{of}: {unlikes} likes {would}taken back, {rows} like records {would}deleted")?;
        if !f.alternate() {
            return if self.stopped { f.write_str("; stopped") } else { Ok(()) };
        }
        for (table, rows) in self.numbers.iter().filter(|(_, rows)| **rows > 0) {
            write!(f, "\n{rows} rows of {table} {would}deleted")?;
        }
        for (count, what) in [
            (redis_keys, "keys and fields in Redis"),
            (filters, "filters (the daemon builds them again)"),
            (letters_deleted, "dead letters"),
            (saved, "rows of snapshots of boards"),
        ] {
            if *count > 0 {
                write!(f, "\n{count} {what} {would}deleted")?;
            }
        }
        for (count, what) in [
            (outbox_rows, "rows of the outbox"),
            (letters_rewritten, "dead letters with events of others"),
            (runs, "reports of runs"),
        ] {
            if *count > 0 {
                write!(f, "\n{count} {what} {would}rewritten")?;
            }
        }
        if zsets + places > 0 {
            write!(f, "\n{zsets} zsets of boards and {places} places of archives {would}cleared of the member")?;
        }
        for Waiting { queue, messages } in &self.waiting {
            write!(f, "\n{messages} messages of any user wait in {queue}: erase again after they are written")?;
        }
        if self.redis_follows {
            write!(f, "\nAPI servers count likes: run `tallyd reconcile --changed` to subtract the unlikes in Redis")?;
        }
        for left in &self.left {
            write!(f, "\nleft: {left}")?;
        }
        if self.stopped {
            write!(f, "\nstopped: --resume continues")?;
        } else {
            for beyond in self.beyond {
                write!(f, "\nnot reached: {beyond}")?;
            }
        }
        Ok(())
    }
}

/// Progress of erasing likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    rows: u64,
    kind: u8,
    pages: u64,
}

impl Progress {
    /// Notes one more page of a kind.
    pub(super) fn note(&mut self, rows: u64, kind: u8) {
        *self = Self { rows, kind, pages: self.pages + 1 };
    }
}

impl RunProgress for Progress {
    const JOB: &'static str = tallyd_mysql::erase::JOB;

    fn done(&self) -> (u64, Option<u64>) {
        (self.rows, None)
    }

    fn words(&self, elapsed: Duration) -> String {
        let Self { rows, kind, pages } = self;
        format!("{rows} like records, {} a second, page {pages}, kind {kind}", rate(*rows, elapsed))
    }

    fn say(&self, elapsed: Duration) {
        let Self { rows, kind, pages } = self;
        let words = self.words(elapsed);
        info!(event = "erase-progress", rows, kind, pages, "erasing: {words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_was_done_and_what_was_not() {
        let report = Report {
            unlikes: 3,
            rows: 5,
            filters: 1,
            letters_rewritten: 2,
            waiting: vec![Waiting { queue: "tally.likes.0".to_owned(), messages: 4 }],
            left: vec!["1 like records came after the unlikes: erase again".to_owned()],
            ..Report::new("user", false)
        };
        assert_eq!(report.to_string(), "user: 3 likes taken back, 5 like records deleted");
        let text = format!("{report:#}");
        for part in [
            "\n1 filters (the daemon builds them again) deleted\n",
            "\n2 dead letters with events of others rewritten\n",
            "\n4 messages of any user wait in tally.likes.0",
            "\nleft: 1 like records came",
            "\nnot reached: backups, ",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!report.is_complete());
    }
}
