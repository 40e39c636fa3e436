//! The events as types, from which docs/events.schema.json is made. The limits are constants of the decoder.

#![expect(dead_code, reason = "the types only describe the schema: no code creates a value of these types")]

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use tallyd_core::event::{DELTA_MAX, EVENT_ID_MAX, ID_MAX, VALUE_MAX};
use tallyd_core::model::Micros;

/// The body of a message to tallyd: one event, or a list of events. docs/events.md explains the fields.
///
/// The daemon also refuses events that no schema can reject: a repeated field, an event over 65,536 bytes, and a list
/// over 1,048,576 bytes. Other limits depend on the configuration or the clock.
#[derive(JsonSchema)]
#[schemars(untagged, title = "tallyd events")]
pub enum Body {
    One(Event),
    List(Vec<Event>),
}

/// One event. Any other field is ignored.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "lowercase")]
pub enum Event {
    /// The user likes the target.
    Like(Click),
    /// The user no longer likes the target.
    Unlike(Click),
    /// The event adds `delta` to one number of the target. The change counts once for each `event_id`.
    Count {
        kind: KindName,
        target_id: Id,
        metric: MetricName,
        /// The change of the number.
        #[schemars(range(min = -(DELTA_MAX as i64), max = DELTA_MAX))]
        delta: i64,
        /// A different text for each event, for instance a UUID. A retry sends the same text.
        #[schemars(length(min = 1, max = EVENT_ID_MAX))]
        event_id: String,
        at: Instant,
    },
    /// A settable number of the target becomes `value`.
    Set {
        kind: KindName,
        target_id: Id,
        metric: MetricName,
        /// The new number.
        #[schemars(range(min = -(VALUE_MAX as i64), max = VALUE_MAX))]
        value: i64,
        at: Instant,
    },
    /// A settable number of the target becomes zero.
    Reset { kind: KindName, target_id: Id, metric: MetricName, at: Instant },
}

#[derive(JsonSchema)]
pub struct Click {
    kind: KindName,
    target_id: Id,
    user_id: Id,
    at: Instant,
}

/// A name of `[kinds]`.
#[derive(JsonSchema)]
pub struct KindName(String);

pub struct Instant;

impl JsonSchema for Instant {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Instant".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let max = Micros::MAX.0.unsigned_abs();
        json_schema!({
            "description": "Microseconds since 1970 by the sender's clock. A retry sends the same time.",
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": max },
                { "type": "string", "pattern": up_to(max) },
            ],
        })
    }
}

pub struct Id;

impl JsonSchema for Id {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Id".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "An id from 1 to 9223372036854775807, as text or as an integer. Text is the safer choice: many languages lose digits of large numbers.",
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": ID_MAX },
                { "type": "string", "pattern": up_to(ID_MAX) },
            ],
        })
    }
}

pub struct MetricName;

impl JsonSchema for MetricName {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "MetricName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "description": "A name of `[metrics]`, but not `like`.", "type": "string", "not": { "const": "like" } })
    }
}

/// Returns a pattern for decimal integers from 1 to a maximum, without leading zeros.
fn up_to(max: u64) -> String {
    let digits = max.to_string();
    let shorter = format!("[1-9][0-9]{{0,{}}}", digits.len() - 2);
    // These integers have as many digits as the maximum. The digits before `place` equal the maximum's digits, and the
    // digit at `place` is smaller. All digits after `place` can have any value.
    let mut parts = vec![shorter];
    for (place, digit) in digits.bytes().enumerate() {
        let least = if place == 0 { b'1' } else { b'0' };
        if digit > least {
            let (equal, left) = (&digits[..place], digits.len() - place - 1);
            let below = format!("[{}-{}]", char::from(least), char::from(digit - 1));
            parts.push(if left == 0 { format!("{equal}{below}") } else { format!("{equal}{below}[0-9]{{{left}}}") });
        }
    }
    parts.push(digits);
    format!("^(?:{})$", parts.join("|"))
}
