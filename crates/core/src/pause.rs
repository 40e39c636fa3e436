//! Durations in config.toml.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use jiff::{SpanRelativeTo, Unit};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

pub const LENGTH_OF_TIME: &str = "length-of-time";

/// A duration, written `500ms`, `2s`, `5m`, `1h`, `30d` (days have 24 hours).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pause(pub Duration);

impl Pause {
    pub const fn from_secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

impl Serialize for Pause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for Pause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let units = [("d", 86_400_000_000_000), ("h", 3_600_000_000_000), ("m", 60_000_000_000), ("s", 1_000_000_000)];
        let smaller = [("ms", 1_000_000), ("us", 1_000), ("ns", 1)];
        match units.into_iter().chain(smaller).find(|(_, unit)| nanos > 0 && nanos.is_multiple_of(*unit)) {
            Some((name, unit)) => write!(f, "{}{name}", nanos / unit),
            None => f.write_str("0s"),
        }
    }
}

impl JsonSchema for Pause {
    fn schema_name() -> Cow<'static, str> {
        "Pause".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        // Each number has a unit.
        json_schema!({ "type": "string", "format": LENGTH_OF_TIME, "pattern": "^[^-]*[0-9] *[A-Za-z]+ *$" })
    }
}

impl<'de> Deserialize<'de> for Pause {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_pause(&text).map_err(|error| {
            de::Error::custom(format!(
                "\"{text}\" is not a duration ({error}): write for example 500ms, 2s, 5m, 1h or 30d"
            ))
        })
    }
}

pub fn parse_pause(text: &str) -> Result<Pause, jiff::Error> {
    let span: jiff::Span = text.parse()?;
    let seconds = span.total((Unit::Nanosecond, SpanRelativeTo::days_are_24_hours()))? / 1e9;
    Duration::try_from_secs_f64(seconds).map(Pause).map_err(|error| jiff::Error::from_args(format_args!("{error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_read_and_others_refused() {
        for (text, ms) in
            [("500ms", 500), ("2s", 2_000), ("5m", 300_000), ("1h 30m", 5_400_000), ("30d", 2_592_000_000), ("0s", 0)]
        {
            assert_eq!(parse_pause(text).unwrap().0, Duration::from_millis(ms), "{text}");
        }
        for text in ["", "5", "-2s", "soon", "1mo"] {
            assert!(parse_pause(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_pause_of_a_file_is_checked_and_its_schema_asks_for_a_unit() {
        let pause = |json: &str| serde_json::from_str::<Pause>(json).map_err(|error| error.to_string());
        assert_eq!(pause("\"5m\""), Ok(Pause::from_secs(300)));
        assert!(pause("\"soon\"").unwrap_err().starts_with("\"soon\" is not a duration"));
        let schema = schemars::schema_for!(Pause).to_value();
        assert_eq!((&schema["type"], &schema["format"]), (&"string".into(), &LENGTH_OF_TIME.into()));
        assert_eq!((schema["title"].as_str(), schema["pattern"].is_string()), (Some("Pause"), true));
    }

    #[test]
    fn a_pause_is_written_so_that_it_is_read_again() {
        for (ms, text) in
            [(0, "0s"), (500, "500ms"), (1_500, "1500ms"), (60_000, "1m"), (5_400_000, "90m"), (604_800_000, "7d")]
        {
            let pause = Pause(Duration::from_millis(ms));
            assert_eq!(pause.to_string(), text);
            assert_eq!(parse_pause(text).unwrap(), pause);
        }
    }
}
