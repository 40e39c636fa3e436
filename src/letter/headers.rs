//! The headers and properties of a message, as JSON.

use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde_json::{Map, Value, json};

use tallyd_core::event::traceparent_of;
use tallyd_core::mapping::{self, APART, APART_BYTES, Envelope, ROUTING_KEY, TIMESTAMP, TYPE};
use tallyd_core::traceparent::{self, HEADER};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    pub json: Arc<str>,
    /// The length of the JSON of all headers, including the headers that were left out.
    pub bytes: usize,
    pub traceparent: Option<String>,
}

pub fn headers(properties: &BasicProperties) -> Headers {
    kept(&all_of(properties))
}

/// Returns the envelope if the map reads it. A replayed dead letter has the headers of its first delivery in one
/// header. `map` is `None` if the map is not known.
pub fn mapped(
    properties: &BasicProperties,
    exchange: &str,
    routing_key: &str,
    map: Option<&mapping::Map>,
) -> (Headers, Envelope) {
    let mut all = all_of(properties);
    if let Some(first) = all.remove(REPLAYED).filter(|_| exchange.is_empty()) {
        let first = first.as_str().and_then(|json| serde_json::from_str(json).ok());
        let first: Map<String, Value> = first.unwrap_or_default();
        return (kept(&first), Envelope(first));
    }
    if let Some(value) = properties.kind() {
        all.insert(TYPE.to_owned(), json!(value.as_str()));
    }
    if let Some(value) = properties.timestamp() {
        all.insert(TIMESTAMP.to_owned(), json!(value));
    }
    all.insert(ROUTING_KEY.to_owned(), json!(routing_key));
    let mut envelope = Envelope(all);
    let places = map.map(mapping::Map::places_outside);
    if places.as_ref().is_some_and(Vec::is_empty) {
        return (kept(&envelope.0), Envelope::default());
    }
    let apart = envelope.apart(places.as_deref());
    envelope.0.insert(APART.to_owned(), json!(apart));
    (kept(&envelope.0), envelope)
}

/// Returns the hash that tells letters with these headers and equal bodies apart. Empty if the body alone decides.
pub(super) fn apart(headers: &str) -> String {
    let apart = || serde_json::from_str::<Value>(headers).ok()?.get(APART)?.as_str().map(str::to_owned);
    let is_ours = |apart: &String| apart.len() == 2 * APART_BYTES;
    if headers.contains(APART) { apart().filter(is_ours).unwrap_or_default() } else { String::new() }
}

/// The header of a replayed dead letter that came through a map.
const REPLAYED: &str = "x-tallyd-headers";

pub fn replayed(traceparent: Option<&str>, mapped: Option<&str>) -> BasicProperties {
    let mut fields = FieldTable::default();
    for (name, value) in [(HEADER, traceparent), (REPLAYED, mapped)] {
        if let Some(value) = value {
            fields.insert(name.into(), AMQPValue::LongString(value.into()));
        }
    }
    BasicProperties::default().with_headers(fields)
}

pub fn encoding(properties: &BasicProperties) -> Option<&str> {
    properties.content_encoding().as_ref().map(ShortString::as_str)
}

fn all_of(properties: &BasicProperties) -> Map<String, Value> {
    let mut all = match properties.headers() {
        Some(headers) => table(headers, 0),
        None => Map::new(),
    };
    for (name, value) in [
        ("message_id", properties.message_id()),
        ("app_id", properties.app_id()),
        ("user_id", properties.user_id()),
        ("correlation_id", properties.correlation_id()),
    ] {
        if let Some(value) = value {
            all.insert(name.to_owned(), json!(value.as_str()));
        }
    }
    all
}

/// All letters of a list share larger headers: with a copy for each, one message could need a thousand times its size.
const COPIED_BYTES_MAX: usize = 200;

/// Adds the trace of an event in a list, which has no headers of its own.
pub(super) fn with_trace_of(headers: &Arc<str>, body: &[u8]) -> Arc<str> {
    let Some(traceparent) = traceparent_of(body).filter(|_| headers.len() <= COPIED_BYTES_MAX) else {
        return if headers.is_empty() { "{}".into() } else { Arc::clone(headers) };
    };
    let mut all: Map<String, Value> = serde_json::from_str(headers).unwrap_or_default();
    all.insert(HEADER.to_owned(), traceparent.into());
    Value::Object(all).to_string().into()
}

fn kept(all: &Map<String, Value>) -> Headers {
    if all.is_empty() {
        return Headers::default();
    }
    let traceparent = all.get(HEADER).and_then(Value::as_str).and_then(traceparent::parse).map(str::to_owned);
    // JSON can always be written.
    let json: Arc<str> = serde_json::to_string(all).unwrap_or_default().into();
    let bytes = json.len();
    if bytes <= HEADERS_BYTES_MAX {
        return Headers { json, bytes, traceparent };
    }
    // These headers are stored with each refused event of a list. Headers that fill a frame would need a hundred times
    // as much space as the events.
    let problem = format!("the headers have {bytes} bytes, and at most {HEADERS_BYTES_MAX} are kept");
    let mut kept = Map::from_iter([("(left out)".to_owned(), json!(problem))]);
    let mut sized: Vec<(usize, &String, &Value)> =
        all.iter().map(|(name, value)| (name.len() + value.to_string().len(), name, value)).collect();
    sized.sort_unstable_by_key(|(bytes, ..)| *bytes);
    let mut room = HEADERS_BYTES_MAX / 2;
    for (bytes, name, value) in sized {
        let Some(rest) = room.checked_sub(bytes + 4) else { break };
        room = rest;
        kept.insert(name.clone(), value.clone());
    }
    Headers { json: Value::Object(kept).to_string().into(), bytes, traceparent }
}

/// The kept headers of a letter have at most this number of bytes as JSON. A tracing context, an exchange and a few ids
/// need a few hundred bytes.
pub(super) const HEADERS_BYTES_MAX: usize = 8 * 1024;

/// Headers are kept up to this depth of nesting. Only an attacker nests headers deeper.
const DEPTH_MAX: u8 = 16;

fn table(fields: &FieldTable, depth: u8) -> Map<String, Value> {
    fields.inner().iter().map(|(name, value)| (name.to_string(), to_json(value, depth))).collect()
}

fn to_json(value: &AMQPValue, depth: u8) -> Value {
    match value {
        AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) if depth >= DEPTH_MAX => json!("(nested too deep)"),
        AMQPValue::Boolean(value) => json!(value),
        AMQPValue::ShortShortInt(value) => json!(value),
        AMQPValue::ShortShortUInt(value) => json!(value),
        AMQPValue::ShortInt(value) => json!(value),
        AMQPValue::ShortUInt(value) => json!(value),
        AMQPValue::LongInt(value) => json!(value),
        AMQPValue::LongUInt(value) => json!(value),
        AMQPValue::LongLongInt(value) => json!(value),
        AMQPValue::Float(value) => json!(value),
        AMQPValue::Double(value) => json!(value),
        AMQPValue::DecimalValue(value) => json!({ "scale": value.scale, "value": value.value }),
        AMQPValue::ShortString(value) => json!(value.as_str()),
        AMQPValue::LongString(value) => json!(String::from_utf8_lossy(value.as_bytes())),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(|value| to_json(value, depth + 1)).collect(),
        AMQPValue::Timestamp(value) => json!(value),
        AMQPValue::FieldTable(fields) => Value::Object(table(fields, depth + 1)),
        AMQPValue::ByteArray(value) => json!(String::from_utf8_lossy(value.as_slice())),
        AMQPValue::Void => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read_from_the_headers_if_it_is_valid() {
        for (value, read) in [(TRACEPARENT, Some(TRACEPARENT)), ("00-1-2-3", None), ("", None)] {
            let mut fields = FieldTable::default();
            fields.insert(HEADER.into(), AMQPValue::LongString(value.into()));
            let headers = headers(&BasicProperties::default().with_headers(fields));
            assert_eq!(headers.traceparent.as_deref(), read);
            assert!(headers.json.contains(value), "all headers are kept");
        }
    }

    #[test]
    fn headers_become_json() {
        assert_eq!(headers(&BasicProperties::default()), Headers::default());
        let mut fields = FieldTable::default();
        fields.insert("x-delivery-count".into(), AMQPValue::LongLongInt(3));
        fields.insert("trace".into(), AMQPValue::LongString("a\"b".into()));
        let properties = BasicProperties::default().with_headers(fields).with_app_id("api".into());
        assert_eq!(&*headers(&properties).json, r#"{"app_id":"api","trace":"a\"b","x-delivery-count":3}"#);
    }

    #[test]
    fn headers_that_are_made_to_fill_the_table_are_left_out_and_that_is_reported() {
        let mut fields = FieldTable::default();
        fields.insert("x".into(), AMQPValue::LongString(vec![b'x'; HEADERS_BYTES_MAX].into()));
        fields.insert(HEADER.into(), AMQPValue::LongString(TRACEPARENT.into()));
        let stored = headers(&BasicProperties::default().with_headers(fields));
        assert!(stored.json.len() < 200 && stored.json.contains("(left out)"), "{stored:?}");
        assert!(stored.json.contains(&format!("\"traceparent\":\"{TRACEPARENT}\"")), "{stored:?}");
        assert!(stored.bytes > HEADERS_BYTES_MAX);
    }
}
