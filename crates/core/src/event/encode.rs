//! The JSON bodies that tallyd and producers send.

use super::LikeEvent;
use crate::model::{Micros, TargetId};

pub fn encode_fence(number: u64) -> Vec<u8> {
    format!("{{\"type\":\"fence\",\"fence\":{number}}}").into_bytes()
}

pub fn encode_like(event: &LikeEvent, kind: &str, count: Option<i64>) -> Vec<u8> {
    let event_type = if event.liked { "like" } else { "unlike" };
    // Ids are strings, because JavaScript's numbers lose precision above 2^53.
    let mut body = serde_json::json!({
        "type": event_type,
        "kind": kind,
        "target_id": event.target.id.to_string(),
        "user_id": event.user.to_string(),
        "at": event.at.0,
    });
    if let (Some(count), Some(fields)) = (count, body.as_object_mut()) {
        fields.insert("count".to_owned(), count.into());
    }
    body.to_string().into_bytes()
}

pub fn encode_count(
    target_id: TargetId,
    (kind, metric): (&str, &str),
    delta: i64,
    at: Micros,
    event_id: &str,
    count: Option<i64>,
) -> Vec<u8> {
    let mut body = serde_json::json!({
        "type": "count",
        "kind": kind,
        "target_id": target_id.to_string(),
        "metric": metric,
        "delta": delta,
        "event_id": event_id,
        "at": at.0,
    });
    if let (Some(count), Some(fields)) = (count, body.as_object_mut()) {
        fields.insert("count".to_owned(), count.into());
    }
    body.to_string().into_bytes()
}

pub fn encode_set(target_id: TargetId, (kind, metric): (&str, &str), value: i64, at: Micros) -> Vec<u8> {
    let body = serde_json::json!({
        "type": "set",
        "kind": kind,
        "target_id": target_id.to_string(),
        "metric": metric,
        "value": value,
        "at": at.0,
    });
    body.to_string().into_bytes()
}

pub fn encode_reset(target_id: TargetId, (kind, metric): (&str, &str), at: Micros) -> Vec<u8> {
    let body = serde_json::json!({
        "type": "reset",
        "kind": kind,
        "target_id": target_id.to_string(),
        "metric": metric,
        "at": at.0,
    });
    body.to_string().into_bytes()
}
