//! How far a run has come.

use std::time::{Duration, Instant};

use tracing::info;

use super::steps::Run;
use crate::model::BoardPeriod;
use crate::runtime::progress::{RunProgress, left, percent, rate, spoken};

/// What can be said of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// What it is at, and since when.
    now: Option<(BoardPeriod, Instant)>,
    /// What becomes of the members: copied, verified.
    verb: &'static str,
    /// How many of them did, and of how many.
    done: u64,
    total: u64,
}

impl Run<'_> {
    /// Shows that `total` members of a period are to be copied, or verified.
    pub(super) fn show(&self, at: &BoardPeriod, verb: &'static str, total: u64) {
        self.progress.send_replace(Progress { now: Some((at.clone(), Instant::now())), verb, done: 0, total });
    }

    /// Shows how many of them are.
    pub(super) fn show_done(&self, done: u64) {
        self.progress.send_modify(|progress| progress.done = done);
    }
}

impl RunProgress for Progress {
    const JOB: &'static str = super::JOB;

    fn done(&self) -> (u64, Option<u64>) {
        (self.done, Some(self.total).filter(|total| *total > 0))
    }

    fn words(&self, _: Duration) -> String {
        let Self { now: Some((at, since)), verb, done, total } = self else { return "looking for boards".to_owned() };
        let elapsed = since.elapsed();
        let (percent, rate) = (percent(*done, Some(*total)).unwrap_or_default(), rate(*done, elapsed));
        let left = left(*done, Some(*total), elapsed);
        let left = left.map_or_else(String::new, |left| format!(", about {} left", spoken(left)));
        format!("{at}: {done} of {total} members {verb} ({percent} %), {rate} a second{left}")
    }

    fn say(&self, elapsed: Duration) {
        let words = self.words(elapsed);
        let Self { now: Some((BoardPeriod { board, period }, since)), done, total, .. } = self else { return };
        let per_second = rate(*done, since.elapsed());
        let left_s = left(*done, Some(*total), since.elapsed()).map(|left| left.as_secs());
        info!(event = "archive-progress", board, period, done, total, per_second, left_s, "{words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_it_is_at() {
        assert_eq!(Progress::default().words(Duration::ZERO), "looking for boards");
        let at = BoardPeriod { board: "likes".to_owned(), period: "2026-W46".to_owned() };
        let progress = Progress { now: Some((at, Instant::now())), verb: "copied", done: 500, total: 2_000 };
        let words = progress.words(Duration::ZERO);
        assert!(words.starts_with("likes 2026-W46: 500 of 2000 members copied (25 %), "), "{words}");
        assert!(words.ends_with(" left"), "{words}");
    }
}
