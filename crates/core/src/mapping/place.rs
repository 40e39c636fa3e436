//! The place of a field in a message: in the body, in a header, in a property, or the routing key.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

/// The key of the routing key in an [`Envelope`]. A header of this name is not lost, because the keys of properties
/// have a colon.
pub const ROUTING_KEY: &str = "property:routing_key";

pub const TYPE: &str = "property:type";

pub const TIMESTAMP: &str = "property:timestamp";

pub const APART: &str = "property:apart";

#[derive(Clone, Debug, Default)]
pub struct Envelope(pub Map<String, Value>);

impl Envelope {
    /// Returns a hash of the values at `places` outside of the body. Without places, all values count, except the headers
    /// that a broker changes.
    pub fn apart(&self, places: Option<&[&Place]>) -> String {
        let values: Vec<(&str, Option<&Value>)> = match places {
            Some(places) => places.iter().filter_map(|place| Some((place.key()?, self.0.get(place.key()?)))).collect(),
            None => {
                let own = self.0.iter().filter(|(name, _)| !name.starts_with("x-"));
                own.map(|(name, value)| (name.as_str(), Some(value))).collect()
            }
        };
        let digest = Sha256::digest(json!(values).to_string());
        digest.iter().take(APART_BYTES).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The bytes of the hash. Two of 10^15 letters have the same hash with a probability of 10^-9.
pub const APART_BYTES: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Pointer(String),
    Header(String),
    Type,
    /// `property:timestamp`, in seconds since 1970.
    Timestamp,
    RoutingKey,
}

impl Place {
    fn key(&self) -> Option<&str> {
        match self {
            Self::Pointer(_) => None,
            Self::Header(name) => Some(name),
            Self::Type => Some(TYPE),
            Self::Timestamp => Some(TIMESTAMP),
            Self::RoutingKey => Some(ROUTING_KEY),
        }
    }
}

impl FromStr for Place {
    type Err = WrongPlace;

    fn from_str(text: &str) -> Result<Self, WrongPlace> {
        match text {
            "property:type" => Ok(Self::Type),
            "property:timestamp" => Ok(Self::Timestamp),
            "routing_key" => Ok(Self::RoutingKey),
            _ if text.starts_with('/') => Ok(Self::Pointer(text.to_owned())),
            _ => match text.strip_prefix("header:") {
                None | Some("") => Err(WrongPlace),
                Some(name) => Ok(Self::Header(name.to_owned())),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write a JSON pointer, for example \"/actor/id\", or \"header:NAME\", \"property:type\", \"property:timestamp\" or \"routing_key\""
)]
pub struct WrongPlace;

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pointer(pointer) => f.write_str(pointer),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Type => f.write_str("property:type"),
            Self::Timestamp => f.write_str("property:timestamp"),
            Self::RoutingKey => f.write_str("routing_key"),
        }
    }
}

/// The places of a field. The first place that a message has is used. A place whose value is null is not used if a
/// later place has a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places(Vec<Place>);

impl Places {
    pub(super) fn find<'a>(&self, event: &'a Value, envelope: &'a Envelope) -> Option<&'a Value> {
        let found = |place: &Place| match place {
            Place::Pointer(pointer) => event.pointer(pointer),
            place => envelope.0.get(place.key()?),
        };
        let mut all = self.0.iter().filter_map(found);
        let first = all.next()?;
        Some(if first.is_null() { all.find(|value| !value.is_null()).unwrap_or(first) } else { first })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Place> {
        self.0.iter()
    }
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, place) in self.0.iter().enumerate() {
            write!(f, "{}{place}", if number == 0 { "" } else { " or " })?;
        }
        Ok(())
    }
}

pub const PLACE: &str = "place";

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Several(Vec<String>),
}

impl Serialize for Places {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let texts = match self.0.as_slice() {
            [one] => Texts::One(one.to_string()),
            several => Texts::Several(several.iter().map(ToString::to_string).collect()),
        };
        texts.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Places {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let texts = match Texts::deserialize(deserializer)? {
            Texts::One(one) => vec![one],
            Texts::Several(several) => several,
        };
        texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map(Self).map_err(D::Error::custom)
    }
}

impl JsonSchema for Places {
    fn schema_name() -> Cow<'static, str> {
        "Places".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let place = json_schema!({ "type": "string", "format": PLACE });
        json_schema!({ "anyOf": [place.clone(), { "type": "array", "items": place }] })
    }
}
