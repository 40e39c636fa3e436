//! How far a run has come, for whoever watches it: a log, or a bar on a terminal.

use std::fmt::Write;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;
use tracing::info;

use crate::runtime::log;

/// How often the log says it.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// What can be said of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Targets that were compared.
    pub checked: u64,
    /// Rows of `counter` that were listed: a target has one for each partition that wrote it.
    pub done: u64,
    /// Rows that there are, by the server's statistics: none before that is known.
    pub total: Option<u64>,
    /// Off at two looks.
    pub drifted: u64,
    /// To be looked at again.
    pub pending: u64,
    /// The last target of the last page.
    pub place: Option<String>,
    /// Why the run waits, while it does.
    pub waiting: Option<String>,
}

impl Progress {
    /// How much of the whole is done; less than 100 while it isn't, whatever the statistics said.
    pub fn percent(&self) -> Option<u64> {
        let total = self.total.filter(|total| *total > 0)?;
        Some((self.done.saturating_mul(100) / total).min(99))
    }

    /// How long the rest takes at the rate so far.
    pub fn left(&self, elapsed: Duration) -> Option<Duration> {
        let total = self.total.filter(|_| self.done > 0)?;
        let rest = total.saturating_sub(self.done) as f64 / self.done as f64;
        Duration::try_from_secs_f64(elapsed.as_secs_f64() * rest).ok()
    }

    /// Targets a second.
    pub fn rate(&self, elapsed: Duration) -> u64 {
        (self.checked as f64 / elapsed.as_secs_f64().max(0.001)) as u64
    }

    /// A sentence, after `elapsed`.
    pub fn words(&self, elapsed: Duration) -> String {
        let mut text = format!("{} targets checked", self.checked);
        if let Some(percent) = self.percent() {
            // A String can't fail.
            let _ = write!(text, " (about {percent} %)");
        }
        let _ = write!(text, ", {} a second", self.rate(elapsed));
        if let Some(left) = self.left(elapsed) {
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
}

/// `2 h 5 min`, `4 min 10 s`, `9 s`.
fn spoken(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3_600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

/// Who is shown a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// The log: a line every half minute.
    Log,
    /// Someone at a terminal: a bar.
    Bar,
}

/// Shows a run until it is dropped.
pub(super) async fn show(to: Show, progress: watch::Receiver<Progress>) {
    match to {
        Show::Log => say(progress).await,
        Show::Bar => draw(progress).await,
    }
}

async fn say(progress: watch::Receiver<Progress>) {
    let began = Instant::now();
    loop {
        tokio::time::sleep(SAY_EVERY).await;
        let (now, elapsed) = (progress.borrow().clone(), began.elapsed());
        let (checked, drifted, pending, per_second) = (now.checked, now.drifted, now.pending, now.rate(elapsed));
        let (percent, left_s) = (now.percent(), now.left(elapsed).map(|left| left.as_secs()));
        let (place, waiting, words) = (now.place.as_deref(), now.waiting.as_deref(), now.words(elapsed));
        info!(
            event = "reconcile-progress",
            checked, percent, left_s, per_second, drifted, pending, place, waiting, "{words}"
        );
    }
}

async fn draw(mut progress: watch::Receiver<Progress>) {
    let bar = ProgressBar::new_spinner();
    bar.set_style(style(false));
    let _gone = log::under(&bar);
    let began = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    loop {
        tick.tick().await;
        let now = progress.borrow_and_update().clone();
        if let Some(total) = now.total
            && bar.length() != Some(total)
        {
            bar.set_length(total);
            bar.set_style(style(true));
        }
        bar.set_position(now.done.min(now.total.unwrap_or(u64::MAX)));
        bar.set_message(now.words(began.elapsed()));
        bar.tick();
    }
}

fn style(has_total: bool) -> ProgressStyle {
    let template = if has_total { "{bar:20} {wide_msg}" } else { "{spinner} {wide_msg}" };
    // The template is a constant that parses.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_how_long_the_rest_takes() {
        let mut progress = Progress { checked: 100, done: 200, total: Some(1_000), drifted: 3, ..Progress::default() };
        assert_eq!(
            progress.words(Duration::from_secs(10)),
            "100 targets checked (about 20 %), 10 a second, about 40 s left, 3 drifted, 0 to be looked at again"
        );
        // The statistics were wrong.
        progress.done = 2_000;
        progress.waiting = Some("Redis answers after 200 ms, above 100".to_owned());
        assert_eq!((progress.percent(), progress.left(Duration::from_secs(10))), (Some(99), Some(Duration::ZERO)));
        assert!(progress.words(Duration::from_secs(10)).ends_with("; waiting: Redis answers after 200 ms, above 100"));
        assert!(Progress::default().words(Duration::ZERO).starts_with("0 targets checked, 0 a second, 0 drifted"));
    }

    #[test]
    fn times_are_said_in_two_units() {
        for (seconds, words) in [(9, "9 s"), (250, "4 min 10 s"), (7_500, "2 h 5 min")] {
            assert_eq!(spoken(Duration::from_secs(seconds)), words);
        }
    }
}
