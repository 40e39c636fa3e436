//! `[[map]]`: events of a site that has a JSON of its own. Where each field of an event is in a body, and what its values mean here.
//!
//! `decode` makes events of bodies, judged by the same rules as tallyd's own; `order` decides between events whose times are too coarse to
//! say which is newer. Pure.

mod decode;
mod order;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use decode::decode_all;
pub use order::in_arrival;

use crate::partition::MAPS_FROM;
use crate::unit::Unit;

/// The largest number of a map.
pub const MAP_NUMBER_MAX: u8 = 99;

/// The types of events that a map can make.
pub const TYPES: [&str; 5] = ["like", "unlike", "count", "set", "reset"];

/// Events of another JSON, on an exchange that is not tallyd's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// Its name in the name of its queue, in commands and messages.
    pub name: String,
    /// Its number in MySQL and Redis, never given to another map.
    #[schemars(range(min = 1, max = MAP_NUMBER_MAX))]
    pub number: u8,
    /// The site's exchange.
    pub exchange: String,
    /// The binding keys of tallyd's queue.
    #[serde(default = "all_keys")]
    pub binding_keys: Vec<String>,
    /// A JSON pointer to the list of events in a body; a body without it is one event, or a list of events.
    #[serde(default)]
    #[schemars(with = "String")]
    pub list: Option<String>,
    /// The type: like, unlike, count, set or reset.
    #[serde(rename = "type")]
    pub event_type: Source,
    /// The kind: a name of `[kinds]`.
    pub kind: Source,
    /// The target's id.
    pub target_id: Source,
    /// The user's id, for like and unlike.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub user_id: Option<Source>,
    /// When it happened.
    pub at: Time,
    /// The metric, for count, set and reset: a name of `[metrics]`.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub metric: Option<Source>,
    /// What is added, for count.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub delta: Option<Source>,
    /// What the number becomes, for set.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub value: Option<Source>,
    /// Which event it is, for count.
    #[serde(default)]
    #[schemars(with = "Source")]
    pub event_id: Option<Source>,
}

fn all_keys() -> Vec<String> {
    vec!["#".to_owned()]
}

impl Map {
    /// The number of its partition.
    pub fn partition(&self) -> u16 {
        MAPS_FROM + u16::from(self.number)
    }

    /// Its fields beside `at`, by their names.
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

/// A field's place in an event, or the same value for all events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// A JSON pointer.
    #[serde(default)]
    #[schemars(with = "String")]
    pub pointer: Option<String>,
    /// The event's values, with what they are here; no other value is taken.
    #[serde(default)]
    pub values: BTreeMap<String, String>,
    /// The value of all events.
    #[serde(default)]
    #[schemars(with = "String")]
    pub constant: Option<String>,
}

impl Source {
    /// The values that it can give; `None` where it gives whatever an event has.
    pub fn possible(&self) -> Option<Vec<&str>> {
        match &self.constant {
            Some(constant) => Some(vec![constant]),
            None if self.values.is_empty() => None,
            None => Some(self.values.values().map(String::as_str).collect()),
        }
    }
}

/// Where the time of an event is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Time {
    /// A JSON pointer.
    pub pointer: String,
    /// The unit of the time since the epoch.
    pub unit: Unit,
}

/// Why a value that says toggle is no type, as the end of a sentence.
pub fn no_toggle(value: &str) -> Option<&'static str> {
    let toggles = value.to_ascii_lowercase().contains("toggle");
    toggles.then_some(
        "a toggle can't be mapped: it does not say which state it leads to, and a message that comes twice would undo itself; publish the \
         new state (like or unlike)",
    )
}

/// Why a text that is a UUID is no id, as the end of a sentence.
pub fn no_uuid(value: &str) -> Option<&'static str> {
    let bytes = value.as_bytes();
    let is_uuid = bytes.len() == 36
        && bytes.iter().enumerate().all(|(place, byte)| match place {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    is_uuid.then_some("a UUID can't be mapped: ids are numbers of 63 bits; publish the row's number")
}
