//! What an erase found and deleted, for people and for programs; and how far it has come. Neither says of whom.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tracing::info;

use crate::jobs::runner::{self, Outcome};
use crate::runtime::progress::{RunProgress, rate};

/// Where the subject can still be named, and until when.
const BEYOND: [&str; 4] = [
    "backups, binary logs and snapshots of MySQL, Redis and RabbitMQ: until they expire; erase again after a restore",
    "logs of API servers, proxies and databases; tallyd's own logs name no user",
    "queues and tables of other systems that get the site's events",
    "applied_event holds digests of counts that nothing ties to a user or a target: they go after [consumer] applied_event_keep",
];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `user` or `target`.
    pub of: &'static str,
    /// Nothing was changed, only counted.
    pub dry_run: bool,
    pub stopped: bool,
    /// The run that this one went on from.
    pub resumed_run: Option<u64>,
    /// Likes that were taken back on the way of any event.
    pub unlikes: u64,
    /// Rows of `like_record` that were deleted.
    pub rows: u64,
    /// Rows that came after the unlikes, and stay.
    pub liked_again: u64,
    /// Rows of a target's numbers, by table.
    pub numbers: BTreeMap<&'static str, u64>,
    /// Keys and fields in Redis: numbers of a target, remembered clicks, a user's own keys.
    pub redis_keys: u64,
    /// Filters that were dropped, for the daemon to build again.
    pub filters: u64,
    /// Rows of the outbox that were rewritten or deleted.
    pub outbox_rows: u64,
    pub letters_deleted: u64,
    /// Lists that others have events in.
    pub letters_rewritten: u64,
    /// Dead letters that may name it in a way that tallyd does not know.
    pub unclear_letters: Vec<u64>,
    /// Reports and checkpoints of runs that were rewritten.
    pub runs: u64,
    /// Zsets of boards that have lost the member.
    pub zsets: u64,
    /// Places of archived boards that have another name.
    pub places: u64,
    /// Rows of boards' snapshots.
    pub saved: u64,
    /// Queues with messages, of whomever.
    pub waiting: Vec<Waiting>,
    /// API servers count likes: a reconcile has yet to take the unlikes off the numbers in Redis.
    pub redis_follows: bool,
    /// What another run has to do, or a person.
    pub left: Vec<String>,
    /// What no run reaches.
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

    /// Whether nothing is left to do.
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

/// One line for a log; with `{:#}` more of them, for a person.
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
            (letters_rewritten, "dead letters that hold events of others"),
            (runs, "reports of runs"),
        ] {
            if *count > 0 {
                write!(f, "\n{count} {what} {would}rewritten")?;
            }
        }
        if zsets + places > 0 {
            write!(f, "\n{zsets} zsets of boards and {places} places of archives {would}without the member")?;
        }
        for Waiting { queue, messages } in &self.waiting {
            write!(f, "\n{messages} messages wait in {queue}, of whomever: erase again once they are written")?;
        }
        if self.redis_follows {
            write!(
                f,
                "\nAPI servers count likes: `tallyd reconcile --changed` takes the unlikes off the numbers in Redis"
            )?;
        }
        for left in &self.left {
            write!(f, "\nleft: {left}")?;
        }
        if self.stopped {
            write!(f, "\nstopped: --resume goes on")?;
        } else {
            for beyond in self.beyond {
                write!(f, "\nnot reached: {beyond}")?;
            }
        }
        Ok(())
    }
}

/// How far the likes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    rows: u64,
    kind: u8,
    pages: u64,
}

impl Progress {
    /// Notes that one more page is done, of that kind.
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
            "\n2 dead letters that hold events of others rewritten\n",
            "\n4 messages wait in tally.likes.0, of whomever",
            "\nleft: 1 like records came",
            "\nnot reached: backups, ",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!report.is_complete());
    }
}
