//! How far a run has come.

use std::fmt::Write;
use std::time::Duration;

use tracing::info;

use crate::runtime::progress::{RunProgress, left, percent, rate, spoken};

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Targets that were compared.
    pub checked: u64,
    /// Rows of `counter` that were listed: a target has one for each partition that wrote it.
    pub done: u64,
    /// All rows, by the server's statistics; `None` before that is known.
    pub total: Option<u64>,
    /// Off at two measurements.
    pub drifted: u64,
    /// Suspects that are to be measured again.
    pub pending: u64,
    /// The last target of the last page.
    pub place: Option<String>,
    /// Why the run waits; `None` while it doesn't.
    pub waiting: Option<String>,
}

impl RunProgress for Progress {
    const JOB: &'static str = crate::jobs::reconcile::run_options::JOB;

    fn done(&self) -> (u64, Option<u64>) {
        (self.done, self.total)
    }

    fn words(&self, elapsed: Duration) -> String {
        let mut text = format!("{} counters checked", self.checked);
        if let Some(percent) = percent(self.done, self.total) {
            // A String can't fail.
            let _ = write!(text, " (about {percent} %)");
        }
        let _ = write!(text, ", {} a second", rate(self.checked, elapsed));
        if let Some(left) = left(self.done, self.total, elapsed) {
            let _ = write!(text, ", about {} left", spoken(left));
        }
        let _ = write!(text, ", {} drifted, {} to be looked at again", self.drifted, self.pending);
        if let Some(place) = &self.place {
            let _ = write!(text, ", now after {place}");
        }
        if let Some(reason) = &self.waiting {
            let _ = write!(text, "; waiting: {reason}");
        }
        text
    }

    fn say(&self, elapsed: Duration) {
        let Self { checked, drifted, pending, .. } = *self;
        let per_second = rate(checked, elapsed);
        let percent = percent(self.done, self.total);
        let left_s = left(self.done, self.total, elapsed).map(|left| left.as_secs());
        let (place, waiting, words) = (self.place.as_deref(), self.waiting.as_deref(), self.words(elapsed));
        info!(
            event = "reconcile-progress",
            checked, percent, left_s, per_second, drifted, pending, place, waiting, "{words}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_how_long_the_rest_takes() {
        let mut progress = Progress { checked: 100, done: 200, total: Some(1_000), drifted: 3, ..Progress::default() };
        assert_eq!(
            progress.words(Duration::from_secs(10)),
            "100 counters checked (about 20 %), 10 a second, about 40 s left, 3 drifted, 0 to be looked at again"
        );
        progress.waiting = Some("Redis answers after 200 ms, above 100".to_owned());
        assert!(progress.words(Duration::from_secs(10)).ends_with("; waiting: Redis answers after 200 ms, above 100"));
        assert!(Progress::default().words(Duration::ZERO).starts_with("0 counters checked, 0 a second, 0 drifted"));
    }
}
