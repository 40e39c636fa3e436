//! Cron patterns, and the bell that rings when one comes due. The bell only wakes a job's loop: whether there is
//! work is decided there, from what MySQL says of the last run, so that missed bells are made up for.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use chrono::{DateTime, Utc};
use croner::Cron;
use croner::parser::{CronParser, Seconds};
use tokio::sync::Notify;
use tokio_cron_scheduler::{Job, JobScheduler};

use tallyd_core::model::Micros;

/// Instants that are looked at for the longest time between two of them: four weeks of minutes.
const LOOKED_AT: usize = 40_320;

/// Reads a pattern of six fields: second, minute, hour, day of month, month, day of week (0 or 7 is Sunday). A day
/// of month and a day of week must both match. UTC.
pub(crate) fn parse(pattern: &str) -> Result<Cron> {
    CronParser::builder()
        .seconds(Seconds::Required)
        .dom_and_dow(true)
        .build()
        .parse(pattern)
        .context("allowed are six fields: second minute hour day-of-month month day-of-week")
}

/// The latest instant at or before `now` at which the pattern fired; none if it never did.
pub(crate) fn last_fired(cron: &Cron, now: Micros) -> Option<Micros> {
    // Whole seconds: the library would carry the fraction over into what it finds.
    let now = DateTime::<Utc>::from_timestamp(now.0.div_euclid(1_000_000), 0)?;
    cron.find_previous_occurrence(&now, true).ok().map(|fired| Micros(fired.timestamp_micros()))
}

/// The longest time between two of the next instants, of some days if it fires often.
pub(crate) fn longest_gap(cron: &Cron) -> Duration {
    // Any day: patterns that are longer apart on other days are told by their next instants, too.
    let fired: Vec<DateTime<Utc>> = cron.iter_after(DateTime::<Utc>::UNIX_EPOCH).take(LOOKED_AT).collect();
    let gaps = fired.windows(2).filter_map(|pair| match pair {
        [first, second] => (*second - *first).to_std().ok(),
        _ => None,
    });
    gaps.max().unwrap_or(Duration::MAX)
}

pub(crate) fn next_runs(cron: &Cron, now: Micros, count: usize) -> Vec<String> {
    let Some(now) = DateTime::<Utc>::from_timestamp_micros(now.0) else { return Vec::new() };
    cron.iter_after(now).take(count).map(|run| run.format("%Y-%m-%d %H:%M:%S UTC").to_string()).collect()
}

pub(crate) fn next_run(cron: &Cron, now: Micros) -> Option<Micros> {
    let now = DateTime::<Utc>::from_timestamp_micros(now.0)?;
    cron.iter_after(now).next().map(|run| Micros(run.timestamp_micros()))
}

/// Rings `bells` by their patterns until it is dropped. Empty patterns never ring.
pub(crate) struct CronTriggers {
    scheduler: JobScheduler,
}

impl CronTriggers {
    pub(crate) async fn start(bells: Vec<(String, Arc<Notify>)>) -> Result<Self> {
        let scheduler = JobScheduler::new().await.context("make the scheduler")?;
        for (pattern, bell) in bells {
            if pattern.is_empty() {
                continue;
            }
            let job = Job::new(pattern.as_str(), move |_, _| bell.notify_one())
                .with_context(|| format!("schedule \"{pattern}\""))?;
            scheduler.add(job).await.with_context(|| format!("schedule \"{pattern}\""))?;
        }
        scheduler.start().await.context("start the scheduler")?;
        Ok(Self { scheduler })
    }

    pub(crate) async fn stop(mut self) {
        if let Err(error) = self.scheduler.shutdown().await {
            tracing::debug!(event = "scheduler-stop-failed", "the scheduler did not stop in order: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(text: &str) -> Micros {
        Micros(text.parse::<DateTime<Utc>>().unwrap().timestamp_micros())
    }

    #[test]
    fn patterns_have_six_fields() {
        assert!(parse("0 */5 * * * *").is_ok());
        for pattern in ["*/5 * * * *", "", "0 61 * * * *", "often"] {
            assert!(parse(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn the_last_and_next_runs_are_found() {
        let cron = parse("0 30 4 * * *").unwrap();
        let now = micros("2026-11-21T12:00:00.5Z");
        assert_eq!(last_fired(&cron, now), Some(micros("2026-11-21T04:30:00Z")));
        assert_eq!(last_fired(&cron, micros("2026-11-21T04:30:00Z")), Some(micros("2026-11-21T04:30:00Z")));
        assert_eq!(next_runs(&cron, now, 2), ["2026-11-22 04:30:00 UTC", "2026-11-23 04:30:00 UTC"]);
    }

    #[tokio::test]
    async fn a_bell_rings() {
        let bell = Arc::new(Notify::new());
        let bells =
            CronTriggers::start(vec![("* * * * * *".to_owned(), Arc::clone(&bell)), (String::new(), Arc::default())])
                .await
                .unwrap();
        tokio::time::timeout(Duration::from_secs(10), bell.notified()).await.unwrap();
        bells.stop().await;
    }
}
