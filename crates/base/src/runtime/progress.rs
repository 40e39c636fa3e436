//! Shows the progress of a run, in the log or as a bar on a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;

use super::log;

const LOG_EVERY: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressSink {
    Log,
    Bar,
}

/// How much is done, of an estimated total.
pub type Done = (u64, Option<u64>);

pub trait RunProgress: Clone {
    fn done(&self) -> Done;

    fn words(&self, elapsed: Duration) -> String;

    /// `words` include the reason for which the run waits.
    fn log(&self, elapsed: Duration, words: &str, waiting: Option<&str>);
}

pub async fn follow(
    to: ProgressSink,
    progress: watch::Receiver<impl RunProgress>,
    waiting: impl Fn() -> Option<String>,
) {
    match to {
        ProgressSink::Log => log_often(progress, waiting).await,
        ProgressSink::Bar => draw(progress, waiting).await,
    }
}

async fn log_often(progress: watch::Receiver<impl RunProgress>, waiting: impl Fn() -> Option<String>) {
    let began = Instant::now();
    loop {
        tokio::time::sleep(LOG_EVERY).await;
        // The guard of `borrow` must be gone before `waiting` locks the registry of runs, which reads the same progress.
        let now = progress.borrow().clone();
        let (elapsed, waiting) = (began.elapsed(), waiting());
        now.log(elapsed, &words(&now, elapsed, waiting.as_deref()), waiting.as_deref());
    }
}

async fn draw(mut progress: watch::Receiver<impl RunProgress>, waiting: impl Fn() -> Option<String>) {
    let bar = ProgressBar::new_spinner();
    bar.set_style(style(false));
    let _gone = log::under(&bar);
    let began = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    loop {
        tick.tick().await;
        let now = progress.borrow_and_update().clone();
        let (done, total) = now.done();
        if let Some(total) = total
            && bar.length() != Some(total)
        {
            bar.set_length(total);
            bar.set_style(style(true));
        }
        bar.set_position(done.min(total.unwrap_or(u64::MAX)));
        bar.set_message(words(&now, began.elapsed(), waiting().as_deref()));
        bar.tick();
    }
}

fn words(now: &impl RunProgress, elapsed: Duration, waiting: Option<&str>) -> String {
    let words = now.words(elapsed);
    match waiting {
        Some(reason) => format!("{words}; waiting: {reason}"),
        None => words,
    }
}

fn style(has_total: bool) -> ProgressStyle {
    let template = if has_total { "{bar:20} {wide_msg}" } else { "{spinner} {wide_msg}" };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// At most 99, because the total is an estimate.
pub fn percent(done: u64, total: Option<u64>) -> Option<u64> {
    let total = total.filter(|total| *total > 0)?;
    Some((done.saturating_mul(100) / total).min(99))
}

pub fn left(done: u64, total: Option<u64>, elapsed: Duration) -> Option<Duration> {
    let total = total.filter(|_| done > 0)?;
    let rest = total.saturating_sub(done) as f64 / done as f64;
    Duration::try_from_secs_f64(elapsed.as_secs_f64() * rest).ok()
}

pub fn rate(done: u64, elapsed: Duration) -> u64 {
    (done as f64 / elapsed.as_secs_f64().max(0.001)) as u64
}

/// `2 h 5 min`, `4 min 10 s`, `9 s`.
pub fn spoken(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3_600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

/// `1 message waits`, `2 messages wait`.
pub fn counted(count: u64, one: &str, more: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { more })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone)]
    struct TestProgress(u64);

    impl RunProgress for TestProgress {
        fn done(&self) -> Done {
            (self.0, None)
        }

        fn words(&self, _: Duration) -> String {
            format!("{} targets", self.0)
        }

        fn log(&self, _: Duration, _: &str, _: Option<&str>) {}
    }

    #[test]
    fn a_run_says_why_it_waits() {
        assert_eq!(words(&TestProgress(7), Duration::ZERO, None), "7 targets");
        assert_eq!(words(&TestProgress(7), Duration::ZERO, Some("Redis is busy")), "7 targets; waiting: Redis is busy");
    }

    #[test]
    fn times_are_said_in_two_units() {
        for (seconds, words) in [(9, "9 s"), (250, "4 min 10 s"), (7_500, "2 h 5 min")] {
            assert_eq!(spoken(Duration::from_secs(seconds)), words);
        }
    }

    #[test]
    fn the_rest_is_told_from_what_is_done() {
        let ten = Duration::from_secs(10);
        assert_eq!((percent(200, Some(1_000)), left(200, Some(1_000), ten)), (Some(20), Some(ten * 4)));
        assert_eq!((percent(0, Some(0)), left(0, Some(9), ten), left(5, None, ten)), (None, None, None));
        assert_eq!((percent(2_000, Some(1_000)), left(2_000, Some(1_000), ten)), (Some(99), Some(Duration::ZERO)));
        assert_eq!(rate(100, ten), 10);
    }
}
