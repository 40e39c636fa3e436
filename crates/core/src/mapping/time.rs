//! The time of a mapped event: a number of units, or a text in RFC 3339.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::place::Places;
use crate::event::scalar::Scalar;
use crate::model::Micros;
use crate::unit::Unit;

const FRACTION_MAX: usize = 9;

/// Where an event contains its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Time {
    /// The place of the time: a number, or a text such as 2026-01-31T10:00:00Z.
    pub pointer: Places,
    /// The unit of a number.
    pub unit: Unit,
    /// The time zone of texts without an offset, for example "Europe/Berlin".
    #[serde(default)]
    #[schemars(with = "String")]
    pub zone: Option<String>,
}

impl Time {
    pub(super) fn read(&self, value: &Scalar<'_>) -> Option<Micros> {
        match value {
            Scalar::Unsigned(number) => self.unit.read(&number.to_string()),
            Scalar::Fraction(number) => self.unit.read(&number.to_string()),
            Scalar::Text(text) => self.unit.read(text).or_else(|| self.of_text(text)),
            _ => None,
        }
    }

    fn of_text(&self, text: &str) -> Option<Micros> {
        let text = &shortened(&without_wire_format(text));
        let zone = || TimeZone::get(self.zone.as_deref()?).ok();
        // A date alone is no time.
        let local = || text.contains(':').then(|| text.parse::<DateTime>().ok()?.to_zoned(zone()?).ok()).flatten();
        let at = text.parse::<Timestamp>().ok().or_else(|| Some(local()?.timestamp()))?;
        Some(Micros(at.as_nanosecond().div_euclid(1_000).try_into().ok()?))
    }

    pub fn knows_zone(&self) -> bool {
        self.zone.as_deref().is_none_or(|zone| TimeZone::get(zone).is_ok())
    }
}

/// Converts the times of NServiceBus, for example `2025-11-28 10:00:00:123456 Z`.
fn without_wire_format(text: &str) -> String {
    let Some(text) = text.strip_suffix(" Z") else { return text.to_owned() };
    match text.rsplit_once(':') {
        Some((before, fraction)) if before.matches(':').count() == 2 => format!("{before}.{fraction}Z"),
        _ => format!("{text}Z"),
    }
}

fn shortened(text: &str) -> String {
    let Some((before, after)) = text.split_once('.') else { return text.to_owned() };
    let digits = after.len() - after.trim_start_matches(|it: char| it.is_ascii_digit()).len();
    format!("{before}.{}{}", &after[..digits.min(FRACTION_MAX)], &after[digits..])
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    fn time(unit: Unit, zone: Option<&str>) -> Time {
        let pointer = serde_json::from_str("\"/at\"").unwrap();
        Time { pointer, unit, zone: zone.map(str::to_owned) }
    }

    #[test]
    fn texts_in_rfc_3339_are_read_with_any_offset_and_fraction() {
        for (text, zone, at) in [
            ("2025-11-28T10:00:00Z", None, Some(1_764_324_000_000_000)),
            ("2025-11-28t10:00:00.5z", None, Some(1_764_324_000_500_000)),
            ("2025-11-28 11:00:00.123456+01:00", None, Some(1_764_324_000_123_456)),
            ("2025-11-28T04:30:00.1234567-05:30", None, Some(1_764_324_000_123_456)),
            ("2025-11-28T10:00:00.12345678901234Z", None, Some(1_764_324_000_123_456)),
            ("2025-11-28 10:00:00:123456 Z", None, Some(1_764_324_000_123_456)),
            ("2025-11-28 10:00:00 Z", None, Some(1_764_324_000_000_000)),
            ("2025-11-28 10:00:00", None, None),
            ("2025-11-28 10:00:00", Some("UTC"), Some(1_764_324_000_000_000)),
            ("2025-11-28T11:00:00.25", Some("Europe/Berlin"), Some(1_764_324_000_250_000)),
            ("2025-11-28T10:00:00Z", Some("Europe/Berlin"), Some(1_764_324_000_000_000)),
            ("2025-11-28", Some("UTC"), None),
            ("2025-13-28T10:00:00Z", None, None),
            ("yesterday", None, None),
            ("", Some("UTC"), None),
        ] {
            let found = time(Unit::Ms, zone).read(&Scalar::Text(Cow::Borrowed(text)));
            assert_eq!(found, at.map(Micros), "{text} {zone:?}");
        }
    }

    #[test]
    fn a_zone_is_known_if_the_database_of_time_zones_has_it() {
        let zones = [None, Some("Europe/Berlin"), Some("Mars/Olympus")];
        assert_eq!(zones.map(|zone| time(Unit::S, zone).knows_zone()), [true, true, false]);
    }

    #[test]
    fn numbers_and_texts_of_numbers_are_read_in_the_unit_of_the_map() {
        let ms = time(Unit::Ms, None);
        for value in [
            Scalar::Unsigned(1_764_324_000_123),
            Scalar::Text("1764324000123".into()),
            Scalar::Fraction(1_764_324_000_123.25),
        ] {
            assert_eq!(ms.read(&value).map(|at| at.0 / 1_000), Some(1_764_324_000_123), "{value:?}");
        }
        assert_eq!(
            time(Unit::S, None).read(&Scalar::Fraction(1_764_324_000.123_456)),
            Some(Micros(1_764_324_000_123_456))
        );
        assert_eq!(ms.read(&Scalar::Other("null")), None);
    }
}
