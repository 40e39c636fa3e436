//! The periods of boards: days, ISO weeks and months in a time zone. Pure: no I/O, and "now" is an argument.
//!
//! A period lasts from its start to the next one's start, so every instant is in exactly one, whatever the clocks of
//! the zone do at midnight.

use std::fmt;
use std::iter;
use std::str::FromStr;
use std::time::Duration;

use jiff::civil::{Date, ISOWeekDate, Weekday};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Span, Timestamp, ToSpan};

use crate::model::Micros;

/// How many closed periods are looked at: what was missed for longer than 400 days (or weeks, or months) is asked for
/// by name.
pub const LOOK_BACK: usize = 400;

/// The length of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeriodKind {
    /// A calendar day.
    Day,
    /// An ISO week.
    Week,
    /// A calendar month.
    Month,
}

/// One day, ISO week or month.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period {
    kind: PeriodKind,
    first_day: Date,
}

/// A text that names no period.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no period: write a day as 2026-11-21, an ISO week as 2026-W47, a month as 2026-11")]
pub struct PeriodError(String);

impl Period {
    /// The period that `at` lies in. An instant before 1970 counts as 1970.
    pub fn containing(kind: PeriodKind, at: Micros, zone: &TimeZone) -> Self {
        let at = at.max(Micros(0));
        let timestamp = Timestamp::from_microsecond(at.0).unwrap_or(Timestamp::MAX);
        let period = Self::of_day(kind, zone.to_datetime(timestamp).date());
        // A clock that is set back over midnight shows yesterday's date once more: the first midnight was the end.
        if period.end(zone) <= at { period.next().unwrap_or(period) } else { period }
    }

    fn of_day(kind: PeriodKind, day: Date) -> Self {
        let first_day = match kind {
            PeriodKind::Day => day,
            // Fails only before the calendar's first Monday, in the year -9999.
            PeriodKind::Week => day.checked_sub(day.weekday().to_monday_zero_offset().days()).unwrap_or(day),
            PeriodKind::Month => day.first_of_month(),
        };
        Self { kind, first_day }
    }

    /// Its length.
    pub fn kind(self) -> PeriodKind {
        self.kind
    }

    /// Its first instant in the zone.
    pub fn start(self, zone: &TimeZone) -> Micros {
        let midnight = self.first_day.at(0, 0, 0, 0);
        let ambiguous = zone.to_ambiguous_timestamp(midnight);
        let first = match ambiguous.offset() {
            // The clock jumps over midnight: the day begins with the jump. The later offset's midnight lies before it.
            AmbiguousOffset::Gap { after, .. } => after
                .to_timestamp(midnight)
                .ok()
                .and_then(|before| zone.following(before).next().map(|jump| jump.timestamp())),
            // Of a midnight that comes twice, the first.
            AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => ambiguous.compatible().ok(),
        };
        first.map_or(Micros::MAX, |first| Micros(first.as_microsecond()))
    }

    /// The first instant after it in the zone.
    pub fn end(self, zone: &TimeZone) -> Micros {
        self.next().map_or(Micros::MAX, |next| next.start(zone))
    }

    /// The one after it; none at the calendar's end.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        Some(Self { first_day: self.first_day.checked_add(self.length()).ok()?, ..self })
    }

    /// The one before it; none at the calendar's beginning.
    #[must_use]
    pub fn previous(self) -> Option<Self> {
        Some(Self { first_day: self.first_day.checked_sub(self.length()).ok()?, ..self })
    }

    fn length(self) -> Span {
        match self.kind {
            PeriodKind::Day => 1.day(),
            PeriodKind::Week => 1.week(),
            PeriodKind::Month => 1.month(),
        }
    }

    /// The [`LOOK_BACK`] latest periods that had ended at `now`, and `grace` had passed; newest first.
    pub fn closed(kind: PeriodKind, zone: &TimeZone, grace: Duration, now: Micros) -> impl Iterator<Item = Self> {
        let open = Self::containing(kind, now.before(grace), zone);
        iter::successors(open.previous(), |period| period.previous()).take(LOOK_BACK)
    }
}

impl fmt::Display for PeriodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        })
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = (self.first_day.year(), self.first_day.month(), self.first_day.day());
        match self.kind {
            PeriodKind::Day => write!(f, "{year:04}-{month:02}-{day:02}"),
            PeriodKind::Week => {
                let week = self.first_day.iso_week_date();
                write!(f, "{:04}-W{:02}", week.year(), week.week())
            }
            PeriodKind::Month => write!(f, "{year:04}-{month:02}"),
        }
    }
}

impl FromStr for Period {
    type Err = PeriodError;

    fn from_str(text: &str) -> Result<Self, PeriodError> {
        let read = read(text);
        // Only the one spelling that keys and rows have: 2026-W07, not 2026-W7.
        read.filter(|period| period.to_string() == text).ok_or_else(|| PeriodError(text.to_owned()))
    }
}

fn read(text: &str) -> Option<Period> {
    let mut parts = text.split('-');
    let (year, second, third) = (parts.next()?.parse().ok()?, parts.next()?, parts.next());
    match (second.strip_prefix('W'), third) {
        (Some(week), None) => {
            let monday = ISOWeekDate::new(year, week.parse().ok()?, Weekday::Monday).ok()?;
            Some(Period { kind: PeriodKind::Week, first_day: monday.date() })
        }
        (None, None) => {
            let first_day = Date::new(year, second.parse().ok()?, 1).ok()?;
            Some(Period { kind: PeriodKind::Month, first_day })
        }
        (None, Some(day)) => {
            let first_day = Date::new(year, second.parse().ok()?, day.parse().ok()?).ok()?;
            Some(Period { kind: PeriodKind::Day, first_day })
        }
        (Some(_), Some(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [PeriodKind; 3] = [PeriodKind::Day, PeriodKind::Week, PeriodKind::Month];

    /// Zones that differ in what their clocks do at midnight: nothing; a jump over it (Sao Paulo until 2018, Beirut,
    /// Toronto in 1919 from 23:30); a step back over it (St John's until 2011, from 00:01); half-hour steps (Lord
    /// Howe); a whole day left out (Apia, 2011-12-30).
    const ZONES: [&str; 12] = [
        "UTC",
        "Asia/Shanghai",
        "America/New_York",
        "Europe/Berlin",
        "America/Sao_Paulo",
        "Asia/Beirut",
        "America/Toronto",
        "America/St_Johns",
        "Australia/Lord_Howe",
        "Pacific/Apia",
        "Africa/Cairo",
        "America/Havana",
    ];

    fn zone(name: &str) -> TimeZone {
        TimeZone::get(name).unwrap()
    }

    fn at(text: &str) -> Micros {
        Micros(text.parse::<Timestamp>().unwrap().as_microsecond())
    }

    fn period(text: &str) -> Period {
        text.parse().unwrap()
    }

    #[test]
    fn an_instant_lies_in_the_period_that_the_zones_calendar_shows() {
        for (name, instant, expected) in [
            ("Asia/Shanghai", "2026-11-20T15:59:59.999999Z", ["2026-11-20", "2026-W47", "2026-11"]),
            ("Asia/Shanghai", "2026-11-20T16:00:00Z", ["2026-11-21", "2026-W47", "2026-11"]),
            ("America/New_York", "2026-11-01T03:59:59Z", ["2026-10-31", "2026-W44", "2026-10"]),
            ("Europe/Berlin", "2026-03-29T21:59:59Z", ["2026-03-29", "2026-W13", "2026-03"]),
            ("Europe/Berlin", "2026-03-29T22:00:00Z", ["2026-03-30", "2026-W14", "2026-03"]),
            // New Year within a week; the week's year is not the day's.
            ("UTC", "2027-01-01T00:00:00Z", ["2027-01-01", "2026-W53", "2027-01"]),
            ("UTC", "2024-12-30T12:00:00Z", ["2024-12-30", "2025-W01", "2024-12"]),
            ("UTC", "2028-02-29T12:00:00Z", ["2028-02-29", "2028-W09", "2028-02"]),
        ] {
            let found = KINDS.map(|kind| Period::containing(kind, at(instant), &zone(name)).to_string());
            assert_eq!(found, expected, "{name} {instant}");
        }
    }

    #[test]
    fn days_are_as_long_as_the_clocks_make_them() {
        for (name, day, hours) in [
            ("Asia/Shanghai", "2026-03-29", 24),
            ("America/New_York", "2026-03-08", 23),
            ("America/New_York", "2026-11-01", 25),
            ("Europe/Berlin", "2026-03-29", 23),
            ("Europe/Berlin", "2026-10-25", 25),
            ("America/Sao_Paulo", "2018-11-04", 23),
            ("America/Sao_Paulo", "2018-02-17", 25),
            ("Pacific/Apia", "2011-12-30", 0),
            ("Pacific/Apia", "2011-12-31", 24),
        ] {
            let (day, zone) = (period(day), zone(name));
            assert_eq!(day.end(&zone).0 - day.start(&zone).0, hours * 3_600_000_000, "{name} {day}");
        }
    }

    #[test]
    fn a_day_without_midnight_begins_with_the_jump() {
        for (name, day, start) in [
            ("America/Sao_Paulo", "2018-11-04", "2018-11-04T03:00:00Z"),
            ("Asia/Beirut", "2026-03-29", "2026-03-28T22:00:00Z"),
            // 23:30 became 00:30.
            ("America/Toronto", "1919-03-31", "1919-03-31T04:30:00Z"),
        ] {
            assert_eq!(period(day).start(&zone(name)), at(start), "{name}");
        }
    }

    #[test]
    fn a_clock_set_back_over_midnight_opens_no_period_again() {
        // St John's, 2010-11-07: at 00:01 it became 23:01 of the day before.
        let zone = zone("America/St_Johns");
        for instant in ["2010-11-07T02:30:00Z", "2010-11-07T02:45:00Z", "2010-11-07T03:30:00Z"] {
            assert_eq!(Period::containing(PeriodKind::Day, at(instant), &zone), period("2010-11-07"), "{instant}");
        }
    }

    #[test]
    fn weeks_and_months_follow_each_other_over_new_year() {
        for (before, after) in [
            ("2026-W52", "2026-W53"),
            ("2026-W53", "2027-W01"),
            ("2025-W52", "2026-W01"),
            ("2026-12", "2027-01"),
            ("2028-02-28", "2028-02-29"),
            ("2028-02-29", "2028-03-01"),
            ("2027-02-28", "2027-03-01"),
        ] {
            assert_eq!(period(before).next(), Some(period(after)));
            assert_eq!(period(after).previous(), Some(period(before)));
        }
    }

    #[test]
    fn what_names_no_period_is_refused_with_how_to_write_it() {
        for text in [
            "",
            "2026",
            "2026-W54",
            "2025-W53",
            "2026-W0",
            "2026-W7",
            "2026-13",
            "2026-1",
            "2026-02-29",
            "2026-11-31",
            "26-11",
            "+2026-11",
            "2026-w47",
            "2026-W47-1",
            "2026-11-21-1",
            "total",
            " 2026-11",
            "20261121",
        ] {
            let error = text.parse::<Period>().unwrap_err().to_string();
            assert!(error.contains("an ISO week as 2026-W47"), "{text}: {error}");
        }
    }

    #[test]
    fn closed_periods_begin_with_the_newest_that_is_over_and_end_somewhere() {
        let berlin = zone("Europe/Berlin");
        let hour = Duration::from_secs(3_600);
        let closed = |now| Period::closed(PeriodKind::Week, &berlin, hour, at(now)).collect::<Vec<_>>();
        // Week 46 ends on Sunday, 15 November, at midnight: 23:00 UTC.
        assert_eq!(closed("2026-11-15T23:59:59.999999Z")[0], period("2026-W45"));
        let weeks = closed("2026-11-16T00:00:00Z");
        assert_eq!(weeks[..3], [period("2026-W46"), period("2026-W45"), period("2026-W44")]);
        assert_eq!(weeks.len(), LOOK_BACK);
    }

    /// From 1970 into 2100.
    fn instants() -> impl Strategy<Value = Micros> {
        (0..4_100_000_000_000_000_i64).prop_map(Micros)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn every_instant_is_in_exactly_one_period(now in instants(), name in prop::sample::select(&ZONES[..])) {
            let zone = zone(name);
            for kind in KINDS {
                let period = Period::containing(kind, now, &zone);
                prop_assert!(period.start(&zone) <= now && now < period.end(&zone), "{} {}", period, name);
                for other in [period.previous().unwrap(), period.next().unwrap()] {
                    prop_assert!(!(other.start(&zone) <= now && now < other.end(&zone)), "{} {}", other, name);
                }
            }
        }

        #[test]
        fn periods_are_contiguous_and_next_undoes_previous(now in instants(), name in prop::sample::select(&ZONES[..])) {
            let zone = zone(name);
            for kind in KINDS {
                let period = Period::containing(kind, now, &zone);
                let (before, after) = (period.previous().unwrap(), period.next().unwrap());
                prop_assert_eq!(before.end(&zone), period.start(&zone));
                prop_assert_eq!(period.end(&zone), after.start(&zone));
                prop_assert_eq!(before.next(), Some(period));
                prop_assert_eq!(after.previous(), Some(period));
            }
        }

        #[test]
        fn a_start_lies_in_its_own_period(now in instants(), name in prop::sample::select(&ZONES[..])) {
            let zone = zone(name);
            for kind in KINDS {
                let start = Period::containing(kind, now, &zone).start(&zone).max(Micros(0));
                prop_assert_eq!(Period::containing(kind, start, &zone), Period::containing(kind, now, &zone));
            }
        }

        #[test]
        fn a_periods_text_names_it(now in instants(), name in prop::sample::select(&ZONES[..])) {
            for kind in KINDS {
                let period = Period::containing(kind, now, &zone(name));
                prop_assert_eq!(period.to_string().parse(), Ok(period));
                prop_assert_eq!(period.kind(), kind);
            }
        }

        #[test]
        fn a_closed_period_has_ended_and_its_grace_has_passed(
            now in instants(),
            grace_s in 0..200_000_u64,
            name in prop::sample::select(&ZONES[..]),
        ) {
            let (zone, grace) = (zone(name), Duration::from_secs(grace_s));
            for kind in KINDS {
                let newest = Period::closed(kind, &zone, grace, now).next().unwrap();
                let ended_by = now.before(grace).max(Micros(0));
                prop_assert!(newest.end(&zone) <= ended_by && ended_by < newest.next().unwrap().end(&zone));
            }
        }

        #[test]
        fn no_text_is_too_strange(text in "\\PC{0,12}") {
            if let Ok(period) = text.parse::<Period>() {
                prop_assert_eq!(period.to_string(), text);
            }
        }
    }
}
