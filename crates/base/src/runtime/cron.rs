//! Cron patterns in a time zone.
//!
//! A pattern that is due in skipped time (a clock is set forward) fires when the clock is set. A pattern that is due in
//! repeated time (a clock is set back) fires once, unless it is due in every hour: then it fires again, so no hour is
//! without a run.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use chrono::{DateTime, Utc};
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use tallyd_core::model::Micros;

/// Instants that are compared to find the longest gap: of a pattern that is due every minute, four weeks.
const LOOKED_AT: usize = 40_320;

/// Second (0 if there are five fields), minute, hour, day of month, month, day of week (0 or 7 is Sunday). A day of
/// month and a day of week must both match. Refuses a pattern that is never due.
pub fn parse(pattern: &str) -> Result<Cron> {
    let cron = CronParser::builder()
        .seconds(Seconds::Optional)
        .year(Year::Disallowed)
        .dom_and_dow(true)
        .build()
        .parse(pattern)
        .context(
            "use five fields (minute hour day-of-month month day-of-week), or put a sixth field (second) before them",
        )?;
    ensure!(
        cron.find_next_occurrence(&DateTime::<Utc>::UNIX_EPOCH, true).is_ok(),
        "no date matches it: correct day-of-month, month or day-of-week (write the last Sunday of a month as 0L)"
    );
    Ok(cron)
}

/// If the pattern is due often, compares only the instants of a few days.
pub(crate) fn longest_gap(cron: &Cron) -> Duration {
    // A pattern whose gaps are longer on some days is usually due rarely, and then the instants span weeks.
    let fired: Vec<DateTime<Utc>> = cron.iter_after(DateTime::<Utc>::UNIX_EPOCH).take(LOOKED_AT).collect();
    let gaps = fired.windows(2).filter_map(|pair| match pair {
        [first, second] => (*second - *first).to_std().ok(),
        _ => None,
    });
    gaps.max().unwrap_or(Duration::MAX)
}

/// Local time in seconds since the epoch, as if it were UTC: with its own time zones, the cron library would miss
/// instants when clocks are set forward or back.
type Shown = i64;

#[derive(Clone, Debug)]
pub struct Schedule {
    cron: Cron,
    zone: TimeZone,
    is_hourly: bool,
}

/// With a constant offset. In seconds since the epoch.
struct Segment {
    start: i64,
    end: i64,
    offset: i64,
    offset_before: i64,
}

impl Schedule {
    pub fn parse(pattern: &str, zone: &str) -> Result<Self> {
        let cron = parse(pattern)?;
        let is_hourly = (0..24).all(|hour| cron.pattern.hour_match(hour).unwrap_or(false));
        Ok(Self { cron, zone: TimeZone::get(zone)?, is_hourly })
    }

    pub(crate) fn last_fired(&self, now: Micros) -> Option<Micros> {
        let mut at = now.0.div_euclid(1_000_000);
        loop {
            let segment = self.segment(at)?;
            let shown = self.cron.find_previous_occurrence(&instant(segment.shown(at))?, true).ok()?.timestamp();
            if shown >= segment.first(self.is_hourly) {
                return Some(micros(segment.at(shown)));
            }
            at = segment.start.checked_sub(1)?;
        }
    }

    pub fn next(&self, now: Micros) -> Option<Micros> {
        let after = now.0.div_euclid(1_000_000);
        let mut segment = self.segment(after)?;
        let mut from = segment.first(self.is_hourly).max(segment.shown(after).checked_add(1)?);
        loop {
            let shown = self.cron.find_next_occurrence(&instant(from)?, true).ok()?.timestamp();
            let at = segment.at(shown);
            if at < segment.end {
                return Some(micros(at));
            }
            segment = self.segment(segment.end)?;
            from = segment.first(self.is_hourly);
        }
    }

    pub fn next_runs(&self, now: Micros, count: usize) -> Vec<String> {
        let runs = std::iter::successors(self.next(now), |run| self.next(*run)).take(count);
        let shown = |run: Micros| {
            let run = Timestamp::from_microsecond(run.0).ok()?.to_zoned(self.zone.clone());
            Some(run.strftime("%Y-%m-%d %H:%M:%S %Z").to_string())
        };
        runs.filter_map(shown).collect()
    }

    fn segment(&self, at: i64) -> Option<Segment> {
        let at = Timestamp::from_second(at).ok()?;
        let next = at.checked_add(jiff::SignedDuration::from_secs(1)).ok()?;
        let start = self.zone.preceding(next).next().map(|change| change.timestamp().as_second());
        let end = self.zone.following(at).next().map(|change| change.timestamp().as_second());
        let offset = i64::from(self.zone.to_offset(at).seconds());
        let before = start.and_then(|start| Timestamp::from_second(start.checked_sub(1)?).ok());
        Some(Segment {
            start: start.unwrap_or(i64::MIN),
            end: end.unwrap_or(i64::MAX),
            offset,
            offset_before: before.map_or(offset, |before| i64::from(self.zone.to_offset(before).seconds())),
        })
    }
}

impl Segment {
    fn shown(&self, at: i64) -> Shown {
        at.saturating_add(self.offset)
    }

    fn first(&self, is_hourly: bool) -> Shown {
        self.start.saturating_add(if is_hourly { self.offset } else { self.offset_before })
    }

    /// If the local time was skipped, returns the segment's start.
    fn at(&self, shown: Shown) -> i64 {
        shown.saturating_sub(self.offset).max(self.start)
    }
}

fn instant(shown: Shown) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp(shown, 0)
}

fn micros(seconds: i64) -> Micros {
    Micros(seconds.saturating_mul(1_000_000))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(text: &str) -> Micros {
        Micros(text.parse::<Timestamp>().unwrap().as_microsecond())
    }

    fn fired(pattern: &str, zone: &str, from: &str, until: &str) -> Vec<String> {
        let schedule = Schedule::parse(pattern, zone).unwrap();
        let all = std::iter::successors(schedule.next(at(from)), |run| schedule.next(*run));
        let shown = |run: Micros| Timestamp::from_microsecond(run.0).unwrap().to_string();
        all.take_while(|run| *run <= at(until)).map(shown).collect()
    }

    #[test]
    fn patterns_have_five_or_six_fields() {
        for (five, six) in [("*/5 * * * *", "0 */5 * * * *"), ("30 4 * * 1", "0 30 4 * * 1")] {
            assert_eq!(parse(five).unwrap().pattern.seconds, parse(six).unwrap().pattern.seconds, "{five}");
            let next = |pattern: &str| Schedule::parse(pattern, "UTC").unwrap().next(at("2026-11-21T12:00:00Z"));
            assert_eq!(next(five), next(six));
        }
        for pattern in ["* * * *", "", "0 61 * * * *", "often", "0 0 4 * * * 2027"] {
            assert!(parse(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn a_pattern_that_is_never_due_is_refused() {
        for never in ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 4 * * 7L", "0 4 * * L"] {
            assert!(parse(never).unwrap_err().to_string().contains("no date matches it"), "{never}");
        }
        for rare in ["0 0 29 2 1", "0 4 * * 0L", "0 4 * * 7#1", "0 4 13 * 5"] {
            assert!(parse(rare).is_ok(), "{rare}");
        }
    }

    #[test]
    fn the_last_and_next_runs_are_found() {
        let schedule = Schedule::parse("0 30 4 * * *", "UTC").unwrap();
        let now = at("2026-11-21T12:00:00.5Z");
        assert_eq!(schedule.last_fired(now), Some(at("2026-11-21T04:30:00Z")));
        assert_eq!(schedule.last_fired(at("2026-11-21T04:30:00Z")), Some(at("2026-11-21T04:30:00Z")));
        assert_eq!(schedule.next_runs(now, 2), ["2026-11-22 04:30:00 UTC", "2026-11-23 04:30:00 UTC"]);
        let berlin = Schedule::parse("30 4 * * *", "Europe/Berlin").unwrap();
        assert_eq!(berlin.next_runs(now, 1), ["2026-11-22 04:30:00 CET"]);
        assert_eq!(berlin.next(now), Some(at("2026-11-22T03:30:00Z")));
    }

    #[test]
    fn a_time_that_clocks_skip_fires_when_they_are_set() {
        let of_berlin = |pattern: &str| fired(pattern, "Europe/Berlin", "2026-03-28T12:00:00Z", "2026-03-29T12:00:00Z");
        assert_eq!(of_berlin("30 2 * * *"), ["2026-03-29T01:00:00Z"]);
        assert_eq!(of_berlin("15,45 2 * * *"), ["2026-03-29T01:00:00Z"]);
        assert_eq!(of_berlin("0 3 * * *"), ["2026-03-29T01:00:00Z"]);
        assert_eq!(of_berlin("30 * * * *").len(), 24, "every hour has its run");
    }

    #[test]
    fn a_time_that_comes_twice_fires_once_unless_it_is_of_every_hour() {
        let of_berlin = |pattern: &str| fired(pattern, "Europe/Berlin", "2026-10-24T12:00:00Z", "2026-10-25T12:00:00Z");
        assert_eq!(of_berlin("30 2 * * *"), ["2026-10-25T00:30:00Z"]);
        assert_eq!(of_berlin("0 3 * * *"), ["2026-10-25T02:00:00Z"]);
        assert_eq!(of_berlin("30 * * * *").len(), 24, "every hour has its run");
    }

    /// Lord Howe changes its clocks by half an hour, Cairo and Havana change them at midnight, and Apia skipped a day.
    const ZONES: [&str; 8] = [
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "Africa/Cairo",
        "America/Havana",
        "Asia/Kolkata",
        "Pacific/Apia",
    ];

    const PATTERNS: [&str; 8] = [
        "*/5 * * * *",
        "30 * * * * *",
        "0 30 4 * * *",
        "30 2 * * *",
        "15,45 0-3 * * *",
        "0 */2 * * *",
        "0 0 1 * *",
        "59 23 * * 0",
    ];

    proptest! {
        #[test]
        fn what_is_next_is_last_once_it_has_fired(
            zone in 0..ZONES.len(), pattern in 0..PATTERNS.len(), second in 1_262_304_000_i64..1_893_456_000,
        ) {
            let schedule = Schedule::parse(PATTERNS[pattern], ZONES[zone]).unwrap();
            let now = micros(second);
            let (last, next) = (schedule.last_fired(now).unwrap(), schedule.next(now).unwrap());
            prop_assert!(last <= now && now < next);
            prop_assert_eq!(schedule.next(last), Some(next), "nothing is between");
            prop_assert_eq!(schedule.last_fired(next), Some(next));
            prop_assert_eq!(schedule.last_fired(Micros(next.0 - 1)), Some(last));
        }

        /// The weeks include those in which the clocks change.
        #[test]
        fn a_daily_run_is_done_once_each_day_and_an_hourly_one_each_hour(
            zone in 0..ZONES.len() - 1, minute in 0..60_u8, hour in 0..24_u8, week in 0..520_i64,
        ) {
            let runs = |pattern: &str| {
                let schedule = Schedule::parse(pattern, ZONES[zone]).unwrap();
                let first = schedule.next(micros(1_420_070_400 + week * 604_800));
                std::iter::successors(first, |run| schedule.next(*run)).take(9).collect::<Vec<_>>()
            };
            let zone = TimeZone::get(ZONES[zone]).unwrap();
            let days: Vec<_> = runs(&format!("{minute} {hour} * * *"))
                .into_iter()
                .map(|run| Timestamp::from_microsecond(run.0).unwrap().to_zoned(zone.clone()).date())
                .collect();
            prop_assert!(days.windows(2).all(|pair| pair[0].tomorrow().ok() == Some(pair[1])), "{days:?}");
            let hours = runs(&format!("{minute} * * * *"));
            // Half an hour less or more in zones that change their clocks by that.
            prop_assert!(hours.windows(2).all(|pair| (30..=90).contains(&((pair[1].0 - pair[0].0) / 60_000_000))));
        }
    }
}
