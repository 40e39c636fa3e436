//! Days in config.toml.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::model::Micros;

pub const DAY: &str = "day";

/// A calendar day, written `2010-01-31`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Day(Date);

impl Day {
    /// 1 January of the year, which must be between 1 and 9999.
    pub const fn first_of(year: i16) -> Self {
        Self(Date::constant(year, 1, 1))
    }

    /// Returns the day's first instant in UTC, or the first instant of 1970 if the day is earlier.
    pub fn begins(self) -> Micros {
        let begins = self.0.to_zoned(TimeZone::UTC).map_or(0, |begins| begins.timestamp().as_microsecond());
        Micros(begins.max(0))
    }
}

impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Day {
    type Err = jiff::Error;

    fn from_str(text: &str) -> Result<Self, jiff::Error> {
        text.parse().map(Self)
    }
}

impl Serialize for Day {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Day {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl JsonSchema for Day {
    fn schema_name() -> Cow<'static, str> {
        "Day".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": DAY })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_is_read_written_and_begins_at_midnight_in_utc() {
        let day: Day = serde_json::from_str("\"2010-01-31\"").unwrap();
        assert_eq!(serde_json::to_string(&day).unwrap(), "\"2010-01-31\"");
        assert_eq!((day.to_string().as_str(), day.begins()), ("2010-01-31", Micros(1_264_896_000_000_000)));
        assert_eq!(Day::first_of(1969).begins(), Micros(0));
        assert_eq!(Day::first_of(2010), "2010-01-01".parse().unwrap());
        assert!(serde_json::from_str::<Day>("\"2010-02-30\"").is_err());
    }

    #[test]
    fn the_schema_of_a_day_has_a_name_and_the_format_of_a_day() {
        let schema = schemars::schema_for!(Day);
        let of = |field| schema.get(field).and_then(|value| value.as_str());
        assert_eq!([of("title"), of("type"), of("format")], [Some("Day"), Some("string"), Some(DAY)]);
    }
}
