//! The periods of boards: days, weeks and months in a time zone, and all time. Pure: no I/O, and the current time is an
//! argument.
//!
//! A week can begin on any day. A week has the name of the ISO week that contains most of its days.
//!
//! A period lasts from its start to the start of the next period. So every instant is in exactly one period, even if
//! the zone's clocks change at midnight.

use std::fmt;
use std::iter;
use std::str::FromStr;
use std::time::Duration;

use jiff::civil::{Date, ISOWeekDate, Weekday};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Span, Timestamp, ToSpan};

use crate::model::Micros;

/// A list of a board's periods ends after this many of the latest periods.
pub const LOOK_BACK: usize = 400;

/// The length of a period.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum PeriodKind {
    /// A calendar day.
    Day,
    /// Seven days.
    Week,
    /// A calendar month.
    Month,
    /// All time.
    Total,
}

impl PeriodKind {
    /// The archiver checks this many of the latest closed periods. If the archiver missed an older period, an operator
    /// must request that period by name.
    pub const fn look_back(self) -> usize {
        match self {
            Self::Day => LOOK_BACK,
            Self::Week => 60,
            Self::Month => 24,
            Self::Total => 0,
        }
    }

    /// The number of bits for the remaining time, which is counted in steps of [`Self::step_s`] seconds. These bits can
    /// represent the longest period plus one hour.
    pub const fn time_bits(self) -> u32 {
        match self {
            Self::Day => 17,
            Self::Week => 20,
            Self::Month => 22,
            Self::Total => 26,
        }
    }

    pub const fn like(self) -> &'static str {
        match self {
            Self::Day => "____-__-__",
            Self::Week => "____-W__",
            Self::Month => "____-__",
            Self::Total => "total",
        }
    }

    /// A board's score stores the remaining time as a number of steps. Returns the length of one step in seconds.
    pub const fn step_s(self) -> i64 {
        match self {
            Self::Day | Self::Week | Self::Month => 1,
            Self::Total => 60,
        }
    }
}

/// For [`PeriodKind::Total`], a remaining time is the time until this instant, in seconds since 1970. The instant is in
/// 2097.
pub const TOTAL_ENDS_S: i64 = 60 << 26;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period {
    kind: PeriodKind,
    /// The period's first day. If the period is a week, this is the Monday of the ISO week that gives the week its
    /// name.
    first_day: Date,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a period: write a day as 2026-11-21, an ISO week as 2026-W47, a month as 2026-11, all time as total"
)]
pub struct PeriodError(String);

impl Period {
    /// The period that contains `at`. An instant before 1970 is treated as 1970.
    pub fn containing(kind: PeriodKind, at: Micros, calendar: &Calendar) -> Self {
        let at = at.max(Micros(0));
        let day = calendar.date(at);
        let first_day = match kind {
            PeriodKind::Day => day,
            PeriodKind::Week => calendar.monday(day),
            PeriodKind::Month => day.first_of_month(),
            PeriodKind::Total => Date::ZERO,
        };
        let period = Self { kind, first_day };
        // If a clock is set back over midnight, it shows yesterday's date again. But yesterday's period ended at the
        // first midnight.
        if period.end(calendar) <= at { period.next().unwrap_or(period) } else { period }
    }

    pub fn kind(self) -> PeriodKind {
        self.kind
    }

    pub fn start(self, calendar: &Calendar) -> Micros {
        match self.kind {
            PeriodKind::Total => Micros(0),
            PeriodKind::Week => calendar.midnight(calendar.first_of_week(self.first_day)),
            PeriodKind::Day | PeriodKind::Month => calendar.midnight(self.first_day),
        }
    }

    pub fn end(self, calendar: &Calendar) -> Micros {
        self.next().map_or(Micros::MAX, |next| next.start(calendar))
    }

    #[must_use]
    pub fn next(self) -> Option<Self> {
        Some(Self { first_day: self.first_day.checked_add(self.length()?).ok()?, ..self })
    }

    #[must_use]
    pub fn previous(self) -> Option<Self> {
        Some(Self { first_day: self.first_day.checked_sub(self.length()?).ok()?, ..self })
    }

    fn length(self) -> Option<Span> {
        match self.kind {
            PeriodKind::Day => Some(1.day()),
            PeriodKind::Week => Some(1.week()),
            PeriodKind::Month => Some(1.month()),
            PeriodKind::Total => None,
        }
    }

    /// Returns the instant at which the remaining time (for `tie = "earliest"`) is zero, in seconds since the epoch.
    pub fn time_ends_s(self, calendar: &Calendar) -> i64 {
        match self.kind {
            PeriodKind::Total => TOTAL_ENDS_S,
            _ => self.end(calendar).0.div_euclid(1_000_000),
        }
    }

    pub fn closed(kind: PeriodKind, calendar: &Calendar, grace: Duration, now: Micros) -> impl Iterator<Item = Self> {
        let open = Self::containing(kind, now.before(grace), calendar);
        iter::successors(open.previous(), |period| period.previous()).take(kind.look_back())
    }
}

impl fmt::Display for PeriodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Total => "total",
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
            PeriodKind::Total => f.write_str("total"),
        }
    }
}

impl FromStr for Period {
    type Err = PeriodError;

    fn from_str(text: &str) -> Result<Self, PeriodError> {
        let read = read(text);
        // Accepts only the spelling in keys and rows: 2026-W07, not 2026-W7.
        read.filter(|period| period.to_string() == text).ok_or_else(|| PeriodError(text.to_owned()))
    }
}

fn read(text: &str) -> Option<Period> {
    if text == "total" {
        return Some(Period { kind: PeriodKind::Total, first_day: Date::ZERO });
    }
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

/// The day that weeks begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WeekStart {
    #[default]
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

impl WeekStart {
    /// Returns the days from the ISO week's Monday to the first day of the board's week. The two weeks share most of
    /// their days.
    fn shift(self) -> Span {
        match self {
            Self::Monday => 0,
            Self::Tuesday => 1,
            Self::Wednesday => 2,
            Self::Thursday => 3,
            Self::Friday => -3,
            Self::Saturday => -2,
            Self::Sunday => -1,
        }
        .days()
    }
}

#[derive(Clone, Debug)]
pub struct Calendar {
    zone: TimeZone,
    week_starts: WeekStart,
}

impl Calendar {
    /// ISO weeks in UTC.
    pub const UTC: Self = Self::new(TimeZone::UTC, WeekStart::Monday);

    pub const fn new(zone: TimeZone, week_starts: WeekStart) -> Self {
        Self { zone, week_starts }
    }

    fn date(&self, at: Micros) -> Date {
        self.zone.to_datetime(Timestamp::from_microsecond(at.0).unwrap_or(Timestamp::MAX)).date()
    }

    fn midnight(&self, date: Date) -> Micros {
        let midnight = date.at(0, 0, 0, 0);
        let ambiguous = self.zone.to_ambiguous_timestamp(midnight);
        let first = match ambiguous.offset() {
            // The clock jumps over midnight, so the day begins with the jump. To find the jump, the code searches from
            // an earlier instant. Midnight with the offset after the jump is such an instant.
            AmbiguousOffset::Gap { after, .. } => after
                .to_timestamp(midnight)
                .ok()
                .and_then(|before| self.zone.following(before).next().map(|jump| jump.timestamp())),
            // If the clock shows midnight twice, the day begins at the first one.
            AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => ambiguous.compatible().ok(),
        };
        first.map_or(Micros::MAX, |first| Micros(first.as_microsecond()))
    }

    /// The Monday of the ISO week that names the board's week. The subtractions fail only at the first and last days of
    /// the calendar.
    fn monday(&self, day: Date) -> Date {
        let shifted = day.checked_sub(self.week_starts.shift()).unwrap_or(day);
        shifted.checked_sub(shifted.weekday().to_monday_zero_offset().days()).unwrap_or(shifted)
    }

    fn first_of_week(&self, monday: Date) -> Date {
        monday.checked_add(self.week_starts.shift()).unwrap_or(monday)
    }
}

#[cfg(test)]
mod tests;
