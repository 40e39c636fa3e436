//! Where days and weeks begin.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Span, ToSpan};

use crate::model::Micros;

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
    /// Days from the Monday of the ISO week that such a week is named after, the one in which most of its days lie.
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

/// A zone's days, and weeks of them.
#[derive(Clone, Debug)]
pub struct Calendar {
    zone: TimeZone,
    week_starts: WeekStart,
}

impl Calendar {
    /// ISO weeks in UTC.
    pub const UTC: Self = Self::new(TimeZone::UTC, WeekStart::Monday);

    /// Of that zone.
    pub const fn new(zone: TimeZone, week_starts: WeekStart) -> Self {
        Self { zone, week_starts }
    }

    /// The date that the zone's clocks show.
    pub(super) fn date(&self, at: Micros) -> Date {
        self.zone.to_datetime(Timestamp::from_microsecond(at.0).unwrap_or(Timestamp::MAX)).date()
    }

    /// The first instant of a date.
    pub(super) fn midnight(&self, date: Date) -> Micros {
        let midnight = date.at(0, 0, 0, 0);
        let ambiguous = self.zone.to_ambiguous_timestamp(midnight);
        let first = match ambiguous.offset() {
            // The clock jumps over midnight: the day begins with the jump. The later offset's midnight lies before it.
            AmbiguousOffset::Gap { after, .. } => after
                .to_timestamp(midnight)
                .ok()
                .and_then(|before| self.zone.following(before).next().map(|jump| jump.timestamp())),
            // Of a midnight that comes twice, the first.
            AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => ambiguous.compatible().ok(),
        };
        first.map_or(Micros::MAX, |first| Micros(first.as_microsecond()))
    }

    /// The Monday of the ISO week that the day's week is named after. Fails only at the calendar's ends.
    pub(super) fn monday(&self, day: Date) -> Date {
        let shifted = day.checked_sub(self.week_starts.shift()).unwrap_or(day);
        shifted.checked_sub(shifted.weekday().to_monday_zero_offset().days()).unwrap_or(shifted)
    }

    /// The first day of the week that is named after that Monday's ISO week.
    pub(super) fn first_of_week(&self, monday: Date) -> Date {
        monday.checked_add(self.week_starts.shift()).unwrap_or(monday)
    }
}
