//! The unit of a site's times in a `[[map]]`, an `[[import]]` or an `[[export]]`. Pure.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::Micros;

/// The unit of a number that is a time. The number is the count of units since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    #[default]
    Us,
    /// Nanoseconds.
    Ns,
}

impl Unit {
    const ALL: [Self; 4] = [Self::S, Self::Ms, Self::Us, Self::Ns];

    fn digits(self) -> usize {
        match self {
            Self::S => 0,
            Self::Ms => 3,
            Self::Us => 6,
            Self::Ns => 9,
        }
    }

    /// Whether the unit is so coarse that two consecutive events can have the same time.
    pub fn is_coarse(self) -> bool {
        self.digits() < Self::Us.digits()
    }

    /// Reads a decimal number of units, possibly with a fraction, and rounds down. Returns `None` for any other text.
    pub fn read(self, text: &str) -> Option<Micros> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) {
            return None;
        }
        let (whole_digits, micros) = (whole.len(), Self::Us.digits());
        let kept = (whole_digits + micros).saturating_sub(self.digits());
        let digits = whole.bytes().chain(fraction.bytes()).chain(std::iter::repeat(b'0')).take(kept);
        let mut at = 0_i64;
        for digit in digits {
            at = at.checked_mul(10)?.checked_add(i64::from(digit - b'0'))?;
        }
        Some(Micros(at))
    }

    pub fn number(self, at: Micros) -> i128 {
        i128::from(at.0) * 1_000 / i128::from(self.nanos())
    }

    fn nanos(self) -> u32 {
        10_u32.pow(u32::try_from(Self::Ns.digits() - self.digits()).unwrap_or_default())
    }

    /// Returns the unit with which the number is a time after 2010 and not after tomorrow. There is at most one.
    pub fn likely(number: i128, now: Micros) -> Option<Self> {
        const EARLY: Micros = Micros(1_262_304_000_000_000);
        const DAY: i64 = 86_400_000_000;
        let times = Self::Ns.number(EARLY)..=Self::Ns.number(Micros(now.0.saturating_add(DAY)));
        let is_likely = |unit: &Self| number.checked_mul(unit.nanos().into()).is_some_and(|at| times.contains(&at));
        Self::ALL.into_iter().find(is_likely)
    }

    pub fn floor(self, at: Micros) -> Micros {
        Micros(at.0 - at.0.rem_euclid(self.micros()))
    }

    pub(crate) fn end(self, from: Micros) -> Micros {
        // If `from` is near the largest allowed time, the end of its unit would exceed that time.
        Micros(from.0.saturating_add(self.micros() - 1).min(Micros::MAX.0))
    }

    fn micros(self) -> i64 {
        i64::from(self.nanos() / Self::Us.nanos()).max(1)
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::S => "seconds",
            Self::Ms => "milliseconds",
            Self::Us => "microseconds",
            Self::Ns => "nanoseconds",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_each_unit_are_read_with_fractions_rounded_down() {
        for (text, unit, at) in [
            ("1764324000", Unit::S, Some(1_764_324_000_000_000)),
            ("1764324000.1234567", Unit::S, Some(1_764_324_000_123_456)),
            ("1764324000.5", Unit::S, Some(1_764_324_000_500_000)),
            ("1764324000123.9", Unit::Ms, Some(1_764_324_000_123_900)),
            ("1764324000123456.9", Unit::Us, Some(1_764_324_000_123_456)),
            ("1764324000123456789", Unit::Ns, Some(1_764_324_000_123_456)),
            ("7", Unit::Ns, Some(0)),
            ("99999999999999999999", Unit::S, None),
            ("", Unit::S, None),
            ("1.", Unit::S, None),
            (".5", Unit::S, None),
            ("-1", Unit::S, None),
            ("1e3", Unit::S, None),
        ] {
            assert_eq!(unit.read(text), at.map(Micros), "{text} {unit}");
        }
    }

    #[test]
    fn the_likely_unit_of_a_time_is_the_only_one_that_fits() {
        let now = Micros(1_795_251_385_004_538);
        for unit in Unit::ALL {
            assert_eq!(Unit::likely(unit.number(now), now), Some(unit));
            assert_eq!(Unit::likely(unit.number(Micros(1_262_304_000_000_000)), now), Some(unit));
        }
        assert_eq!(Unit::likely(7, now), None);
        assert_eq!(Unit::likely(i128::MAX, now), None);
    }

    #[test]
    fn only_seconds_and_milliseconds_are_coarse_units() {
        assert_eq!([Unit::S, Unit::Ms, Unit::Us, Unit::Ns].map(Unit::is_coarse), [true, true, false, false]);
    }
}
