//! `[[map]]`: events from a site with its own JSON. A map says where each field is in a message's body, and what the
//! field's values mean.
//!
//! `decode` converts bodies to events, with the same checks as for tallyd's own events. If the times are so coarse that
//! several events can have the same time, `order` also uses their order of arrival. Pure.

mod decode;
mod order;
mod place;
mod time;
mod trial;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use decode::decode_all;
pub use order::in_order_of_arrival;
pub use place::{APART, APART_BYTES, Envelope, PLACE, Place, Places, ROUTING_KEY, TIMESTAMP, TYPE, WrongPlace};
pub use time::Time;
pub use trial::Trial;

use crate::partition::MAPS_FROM;

pub const MAP_NUMBER_MAX: u8 = 99;

pub const TYPES: [&str; 5] = ["like", "unlike", "count", "set", "reset"];

/// Events in another JSON format, on an exchange that tallyd does not own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// Name of the map in commands, messages and queue: 1 to 32 of a-z, 0-9, - and _.
    pub name: String,
    /// Number in MySQL and Redis. Never reuse it.
    #[schemars(range(min = 1, max = MAP_NUMBER_MAX))]
    pub number: u8,
    /// The site's exchange. It must exist.
    pub exchange: String,
    /// Binding keys of tallyd's queue. The default selects all messages.
    #[serde(default = "all_keys")]
    pub binding_keys: Vec<String>,
    /// JSON pointer to a list of events. A body that lacks this list is one event or an array.
    #[serde(default)]
    #[schemars(with = "String")]
    pub list: Option<String>,
    /// Whether a body that is a list is one event, as task queues send it.
    #[serde(default)]
    pub single: bool,
    /// Whether events are ignored whose type is not in `values`. Otherwise they become dead letters.
    #[serde(default)]
    pub ignore_other_types: bool,
    /// Whether ids can have leading zeros and blanks.
    #[serde(default)]
    pub lenient: bool,
    /// Type: like, unlike, count, set or reset. Each field is a place (optionally with a table of values) or a
    /// constant. A place is a JSON pointer, "header:NAME", "property:type", "property:timestamp" (in seconds),
    /// "routing_key", or a list of places of which the first that is there counts.
    #[serde(rename = "type")]
    pub event_type: Source,
    /// A name of `[kinds]`.
    pub kind: Source,
    /// The target's id.
    pub target_id: Source,
    /// The user's id, for like and unlike.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub user_id: Option<Source>,
    /// Time of the event. If two likes have the same time in a unit coarser than "us", the like that arrives later
    /// wins.
    pub at: Time,
    /// A name of `[metrics]`, for count, set and reset.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub metric: Option<Source>,
    /// Amount to add, for count.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub delta: Option<Source>,
    /// New value, for set.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub value: Option<Source>,
    /// Unique id of the event, for count.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub event_id: Option<Source>,
}

fn all_keys() -> Vec<String> {
    vec!["#".to_owned()]
}

impl Map {
    pub fn partition(&self) -> u16 {
        MAPS_FROM + u16::from(self.number)
    }

    pub fn places_outside(&self) -> Vec<&Place> {
        let of_fields = self.fields().into_iter().filter_map(|(_, source)| source?.pointer.as_ref());
        let places = of_fields.chain([&self.at.pointer]).flat_map(Places::iter);
        places.filter(|place| !matches!(place, Place::Pointer(_))).collect()
    }

    pub fn fields(&self) -> [(&'static str, Option<&Source>); 8] {
        [
            ("type", Some(&self.event_type)),
            ("kind", Some(&self.kind)),
            ("target_id", Some(&self.target_id)),
            ("user_id", self.user_id.as_ref()),
            ("metric", self.metric.as_ref()),
            ("delta", self.delta.as_ref()),
            ("value", self.value.as_ref()),
            ("event_id", self.event_id.as_ref()),
        ]
    }
}

/// Where a field gets its value: from a place in the event, or from a constant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// A place, or a list of places.
    #[serde(default)]
    #[schemars(with = "Places")]
    pub pointer: Option<Places>,
    /// The event's values and their meanings. Other values are refused.
    #[serde(default)]
    pub values: BTreeMap<String, String>,
    /// The value for all events.
    #[serde(default)]
    #[schemars(with = "String")]
    pub constant: Option<String>,
}

impl Source {
    pub fn possible(&self) -> Option<Vec<&str>> {
        match &self.constant {
            Some(constant) => Some(vec![constant]),
            None if self.values.is_empty() => None,
            None => Some(self.values.values().map(String::as_str).collect()),
        }
    }
}

pub fn no_toggle(value: &str) -> Option<&'static str> {
    let toggles = value.to_ascii_lowercase().contains("toggle");
    toggles.then_some(
        "a toggle can't be mapped: it does not contain the new state, and a message that is delivered twice would undo itself; publish the \
         new state (like or unlike)",
    )
}

pub fn no_uuid(value: &str) -> Option<&'static str> {
    let bytes = value.as_bytes();
    let is_uuid = bytes.len() == 36
        && bytes.iter().enumerate().all(|(place, byte)| match place {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    is_uuid.then_some("a UUID can't be mapped: ids are numbers of 63 bits; publish the row's number")
}
