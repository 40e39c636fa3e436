//! The report and the progress of an erase. Neither of them contains the erased user or target.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tracing::info;

use tallyd_base::jobs::run::{Ended, RunHead, RunReport, has_run_head};
use tallyd_base::runtime::progress::{RunProgress, rate};

const BEYOND: [&str; 4] = [
    "backups, binary logs and snapshots of MySQL, Redis and RabbitMQ, until they expire: erase again after a restore from them",
    "logs of API servers, proxies and databases (tallyd's own logs do not contain users)",
    "queues and tables of other systems that receive the site's events",
    "applied_event has digests of counts that can't be linked to a user or a target: they are deleted after [consumer] applied_event_keep",
];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub of: &'static str,
    pub resumed_run: Option<u64>,
    pub unlikes: u64,
    pub rows: u64,
    /// Likes again after the unlikes. They stay.
    pub liked_again: u64,
    pub numbers: BTreeMap<&'static str, u64>,
    pub redis_keys: u64,
    pub filters: u64,
    pub outbox_rows: u64,
    pub letters_deleted: u64,
    pub letters_rewritten: u64,
    /// Dead letters that can contain the subject's id in a field that tallyd does not know.
    pub unclear_letters: Vec<u64>,
    pub runs: u64,
    pub zsets: u64,
    pub places: u64,
    pub saved: u64,
    pub waiting: Vec<Waiting>,
    /// API servers count likes, so a reconcile must still subtract the unlikes in Redis.
    pub redis_follows: bool,
    pub left: Vec<String>,
    pub beyond: [&'static str; 4],
    #[serde(flatten)]
    pub head: RunHead,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    pub queue: String,
    pub messages: Option<u64>,
}

impl Report {
    pub(super) fn new(of: &'static str) -> Self {
        Self { of, beyond: BEYOND, ..Self::default() }
    }

    pub fn is_complete(&self) -> bool {
        self.head.ended == Ended::Done && self.left.is_empty()
    }
}

impl RunReport for Report {
    has_run_head!();
}

/// Writes one line for the log. `{:#}` adds details on further lines.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, unlikes, rows, redis_keys, filters, outbox_rows, runs, zsets, places, saved, .. } = self;
        let Self { letters_deleted, letters_rewritten, .. } = self;
        let would = if self.head.dry_run { "would be " } else { "" };
        write!(f, "{of}: {unlikes} likes {would}undone, {rows} like records {would}deleted{}", self.head)?;
        if !f.alternate() {
            return Ok(());
        }
        for (table, rows) in self.numbers.iter().filter(|(_, rows)| **rows > 0) {
            write!(f, "\n{rows} rows of {table} {would}deleted")?;
        }
        for (count, what) in [
            (redis_keys, "keys and fields in Redis"),
            (filters, "filters (the daemon builds them again)"),
            (letters_deleted, "dead letters"),
            (saved, "rows of board snapshots"),
        ] {
            if *count > 0 {
                write!(f, "\n{count} {what} {would}deleted")?;
            }
        }
        for (count, what) in [
            (outbox_rows, "rows of the outbox"),
            (letters_rewritten, "dead letters (they also contain other events)"),
            (runs, "reports of runs"),
        ] {
            if *count > 0 {
                write!(f, "\n{count} {what} {would}rewritten")?;
            }
        }
        if zsets + places > 0 {
            write!(f, "\nthe member {would}removed from {zsets} zsets and {places} archive rows of boards")?;
        }
        for Waiting { queue, messages } in &self.waiting {
            let messages = messages.map_or("an unknown number of".to_owned(), |messages| messages.to_string());
            write!(
                f,
                "\n{messages} messages of any user wait in the queue {queue}: erase again after the daemons have written them"
            )?;
        }
        if self.redis_follows {
            write!(
                f,
                "\nAPI servers count likes, so Redis still counts the undone likes: run `tallyd reconcile --changed` to subtract them"
            )?;
        }
        for left in &self.left {
            write!(f, "\nleft: {left}")?;
        }
        if self.head.ended == Ended::Done {
            for beyond in self.beyond {
                write!(f, "\nnot reached: {beyond}")?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    rows: u64,
    kind: u8,
    pages: u64,
}

impl Progress {
    pub(super) fn note(&mut self, rows: u64, kind: u8) {
        *self = Self { rows, kind, pages: self.pages + 1 };
    }
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.rows, None)
    }

    fn words(&self, elapsed: Duration) -> String {
        let Self { rows, kind, pages } = self;
        format!("{rows} like records, {} a second, page {pages}, kind {kind}", rate(*rows, elapsed))
    }

    fn log(&self, _: Duration, words: &str, _: Option<&str>) {
        let Self { rows, kind, pages } = self;
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
            waiting: vec![
                Waiting { queue: "tally.events.0".to_owned(), messages: Some(4) },
                Waiting { queue: "tally.events.1".to_owned(), messages: None },
            ],
            left: vec!["1 like records were written after the unlikes: erase again".to_owned()],
            ..Report::new("user")
        };
        assert_eq!(report.to_string(), "user: 3 likes undone, 5 like records deleted");
        let text = format!("{report:#}");
        for part in [
            "\n1 filters (the daemon builds them again) deleted\n",
            "\n2 dead letters (they also contain other events) rewritten\n",
            "\n4 messages of any user wait in the queue tally.events.0",
            "\nan unknown number of messages of any user wait in the queue tally.events.1",
            "\nleft: 1 like records were written",
            "\nnot reached: backups, ",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!report.is_complete());
    }
}
