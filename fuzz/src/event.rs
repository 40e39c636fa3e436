//! Fuzzes the decoder of events. The decoder must accept or reject every body. An accepted body is valid JSON, and the
//! event has the body's fields. For a rejected body, the decoder returns a reason.

use std::sync::LazyLock;

use serde_json::Value;
use tallyd_core::event::{
    BODY_BYTES_MAX, Message, Refusal, Terms, decode, decode_all, encode_count, encode_fence, encode_like, encode_reset,
    encode_set,
};
use tallyd_core::model::{Metric, Micros, Target};

/// The time that is used as the current time.
pub(crate) const NOW: Micros = Micros(1_795_251_385_004_538);

/// The configuration with which bodies are decoded.
pub(crate) static TERMS: LazyLock<Terms> = LazyLock::new(|| {
    let config = "[kinds]\nvideo = 1\npost = 2\ninbox = 3\n[metrics]\nlike = 1\nview = 2\nunread = 3\n\
                  [[rule]]\nmetric = \"unread\"\nkind = \"inbox\"\nsettable = true\n";
    Terms::from(&tallyd_base::config::parse(config, "fuzz.toml", []).expect("the terms are valid"))
});

/// The input is the body of a message.
pub fn event(body: &[u8]) {
    let mut until = 0;
    decode_all(body, &TERMS, NOW, |verdict, range| {
        assert!(until <= range.start && range.end <= body.len(), "{range:?} of {} bytes", body.len());
        until = range.end;
        let one = &body[range];
        match verdict {
            Ok(message) => taken(one, &message),
            Err(refusal) => refused(one, &refusal),
        }
    });
}

fn refused(body: &[u8], Refusal { reason, error }: &Refusal) {
    assert!(!error.is_empty(), "{reason:?} without a sentence");
    // For any body, the error must fit into a log line and a column of 64 KiB.
    assert!(error.len() <= 1_000, "an error of {} bytes for a body of {} bytes", error.len(), body.len());
}

/// Errors that serde_json's tree returns for bodies that JSON's grammar allows.
const BEYOND_TREES: [&str; 4] = ["number out of range", "recursion limit", "surrogate", "unexpected end of hex escape"];

fn taken(body: &[u8], message: &Message) {
    assert!(body.len() <= BODY_BYTES_MAX, "{} bytes", body.len());
    assert!(std::str::from_utf8(body).is_ok(), "the accepted body is not UTF-8");
    let value: Value = match serde_json::from_slice(body) {
        Ok(value) => value,
        Err(error) if BEYOND_TREES.iter().any(|known| error.to_string().contains(known)) => return,
        Err(error) => panic!("the accepted body is not JSON: {error}"),
    };
    assert_eq!(value["type"], type_of(message, &value));
    match message {
        Message::Like(event) => {
            target(&event.target, &value);
            assert_eq!(id(&value["user_id"]), Some(event.user.0));
            time(event.at, &value);
        }
        Message::Count(event) => {
            target(&event.target, &value);
            metric(event.metric, &value);
            assert_eq!(whole(&value["delta"]), Some(event.delta));
            time(event.at, &value);
        }
        Message::Set(event) => {
            target(&event.target, &value);
            metric(event.metric, &value);
            let said = if value["type"] == "reset" { Some(0) } else { whole(&value["value"]) };
            assert_eq!(said, Some(event.value));
            time(event.at, &value);
        }
        Message::Fence(number) => assert_eq!(id(&value["fence"]), Some(*number)),
    }
    again(message, &value);
}

fn type_of(message: &Message, value: &Value) -> &'static str {
    match message {
        Message::Like(event) if event.liked => "like",
        Message::Like(..) => "unlike",
        Message::Count(..) => "count",
        Message::Set(..) if value["type"] == "reset" => "reset",
        Message::Set(..) => "set",
        Message::Fence(_) => "fence",
    }
}

fn target(target: &Target, value: &Value) {
    assert_eq!(TERMS.kinds.get(text(&value["kind"])), Some(&target.kind.0));
    assert_eq!(id(&value["target_id"]), Some(target.id.0));
}

fn metric(metric: Metric, value: &Value) {
    let name = text(&value["metric"]);
    assert!(name != "like" && TERMS.metrics.get(name) == Some(&metric.0), "{name}");
}

fn time(at: Micros, value: &Value) {
    assert_eq!(id(&value["at"]), Some(at.0.unsigned_abs()));
}

/// The event must be equal after encoding and decoding.
fn again(message: &Message, value: &Value) {
    let names = (text(&value["kind"]), text(&value["metric"]));
    let body = match message {
        Message::Like(event) => encode_like(event, names.0, None),
        Message::Count(event) => {
            encode_count(event.target.id, names, event.delta, event.at, text(&value["event_id"]), None)
        }
        Message::Set(event) if value["type"] == "reset" => encode_reset(event.target.id, names, event.at),
        Message::Set(event) => encode_set(event.target.id, names, event.value, event.at),
        Message::Fence(number) => encode_fence(*number),
    };
    assert_eq!(decode(&body, &TERMS, NOW), Ok(*message));
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns an id as the contract allows it: an integer, an integer as text, or a number that is exactly an integer.
fn id(value: &Value) -> Option<u64> {
    let whole = || whole(value).and_then(|number| number.try_into().ok());
    value.as_u64().or_else(|| value.as_str()?.parse().ok()).or_else(whole)
}

fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i64))
}
