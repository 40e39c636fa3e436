//! How a message that can never be applied is kept: raw, with its headers and the reason.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Map, Value, json};

use super::batch::{Origin, Received};
use crate::event::{Reason, Refusal};
use crate::model::Micros;
use crate::store::letters::DeadLetter;

/// So much of a body is kept: sixteen times what an event may have, and far below any `max_allowed_packet`.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// An event that was refused when it was read: `body` is its part of the message.
pub(super) fn refused(refusal: Refusal, body: &[u8], headers: &str, queue: &str, now: Micros) -> DeadLetter {
    let Refusal { reason, mut error } = refusal;
    let kept = body.get(..KEPT_BYTES_MAX).unwrap_or(body);
    if kept.len() < body.len() {
        error = format!("{error}; of {} bytes the first {KEPT_BYTES_MAX} are kept", body.len());
    }
    let headers = if headers.is_empty() { "{}" } else { headers };
    DeadLetter {
        body: kept.to_vec(),
        headers: headers.to_owned(),
        reason: reason.code(),
        error,
        queue: queue.to_owned(),
        first_seen: now,
    }
}

/// An event whose row the database refused, and no other's.
pub(super) fn refused_by_database(received: &Received, error: String, queue: &str, now: Micros) -> DeadLetter {
    let refusal = Refusal { reason: Reason::RefusedByDatabase, error };
    let Origin { body, headers } = received.origin.as_ref();
    refused(refusal, body.get(received.range.clone()).unwrap_or(body), headers, queue, now)
}

/// The message's headers and what else names its sender, as JSON; empty where there is nothing.
pub(super) fn headers(properties: &BasicProperties) -> String {
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
    if all.is_empty() { String::new() } else { Value::Object(all).to_string() }
}

/// How deep headers are kept. What is nested deeper was made to hurt.
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

    #[test]
    fn headers_become_json() {
        assert_eq!(headers(&BasicProperties::default()), "");
        let mut fields = FieldTable::default();
        fields.insert("x-delivery-count".into(), AMQPValue::LongLongInt(3));
        fields.insert("trace".into(), AMQPValue::LongString("a\"b".into()));
        let properties = BasicProperties::default().with_headers(fields).with_app_id("api".into());
        assert_eq!(headers(&properties), r#"{"app_id":"api","trace":"a\"b","x-delivery-count":3}"#);
    }

    #[test]
    fn a_huge_body_is_cut_and_that_is_said() {
        let refusal = Refusal { reason: Reason::TooLarge, error: "large".to_owned() };
        let letter = refused(refusal, &vec![b'x'; KEPT_BYTES_MAX + 1], "", "q", Micros(1));
        assert_eq!((letter.body.len(), letter.headers.as_str()), (KEPT_BYTES_MAX, "{}"));
        assert!(letter.error.contains("1048577 bytes"), "{}", letter.error);
    }
}
