//! A dead letter: a message that was not applied, stored raw with its headers and the reason. The module `text` makes a
//! letter safe to display. Pure.

mod headers;
pub mod packed;
pub mod text;

use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Map, Value};

pub use self::headers::{Headers, encoding, headers, mapped, replayed};
use tallyd_core::event::{Reason, Refusal};
use tallyd_core::model::Micros;
use tallyd_mysql::letters::DeadLetter;

/// Maximum number of bytes of a body that are kept. This number is 16 times the size limit of an event, and far below
/// every usual `max_allowed_packet`.
const KEPT_BYTES_MAX: usize = 1 << 20;

pub fn refused(refusal: Refusal, body: &[u8], headers: &Arc<str>, queue: &str, now: Micros) -> DeadLetter {
    let Refusal { reason, mut error } = refusal;
    let kept = body.get(..KEPT_BYTES_MAX).unwrap_or(body);
    if kept.len() < body.len() {
        error = format!("{error}; the first {KEPT_BYTES_MAX} of {} bytes are kept", body.len());
    }
    let apart = headers::apart(headers);
    let headers = headers::with_trace_of(headers, body);
    DeadLetter {
        body: kept.to_vec(),
        headers,
        apart,
        reason: reason.code(),
        error,
        queue: queue.to_owned(),
        first_seen: now,
    }
}

/// The header that contains a dead letter's fields if the quota of dead letters was full.
const LETTER: &str = "x-tallyd-letter";

/// The error text of a dead letter has at most this number of characters in the header `LETTER`. The number is limited
/// because all headers must fit into one frame.
const ERROR_CHARS_MAX: usize = 1_000;

/// The properties of the message that represents a letter over the quota. [`returned`] restores the letter from these
/// properties.
pub fn properties(letter: &DeadLetter) -> BasicProperties {
    let text = |text: &str| AMQPValue::LongString(text.into());
    let mut table = FieldTable::default();
    table.insert("queue".into(), text(&letter.queue));
    table.insert("reason".into(), text(letter.reason));
    table.insert("error".into(), text(&letter.error.chars().take(ERROR_CHARS_MAX).collect::<String>()));
    table.insert("first_seen".into(), AMQPValue::LongLongInt(letter.first_seen.0));
    let mut headers = FieldTable::default();
    let kept: Map<String, Value> = serde_json::from_str(&letter.headers).unwrap_or_default();
    for (name, value) in &kept {
        let value = match value {
            Value::String(value) => text(value),
            Value::Bool(value) => AMQPValue::Boolean(*value),
            Value::Number(value) if value.is_i64() => AMQPValue::LongLongInt(value.as_i64().unwrap_or_default()),
            value => text(&value.to_string()),
        };
        headers.insert(name.as_str().into(), value);
    }
    headers.insert(LETTER.into(), AMQPValue::FieldTable(table));
    BasicProperties::default().with_headers(headers)
}

fn without_room(body: &[u8], properties: &BasicProperties, now: Micros) -> Option<DeadLetter> {
    let mut fields = properties.headers().as_ref()?.inner().clone();
    let Some(AMQPValue::FieldTable(table)) = fields.remove(LETTER) else { return None };
    let text = |name: &str| match table.inner().get(name) {
        Some(AMQPValue::LongString(text)) => Some(String::from_utf8_lossy(text.as_bytes()).into_owned()),
        _ => None,
    };
    let reason = text("reason").and_then(|code| Reason::ALL.into_iter().find(|reason| reason.code() == code))?;
    let first_seen = match table.inner().get("first_seen") {
        Some(AMQPValue::LongLongInt(at)) if (1..=now.0).contains(at) => Micros(*at),
        _ => now,
    };
    let queue: String = text("queue")?.chars().take(QUEUE_CHARS_MAX).collect();
    let refusal = Refusal { reason, error: text("error")?.chars().take(ERROR_CHARS_MAX).collect() };
    let kept = headers(&BasicProperties::default().with_headers(fields.into()));
    Some(refused(refusal, body, &kept.json, &queue, first_seen))
}

/// Either a dead letter for which the quota had no room, or events that the consumer never tried one by one.
/// `map_queues` is the prefix of the queues of maps.
pub fn returned(
    body: &[u8],
    properties: &BasicProperties,
    (from, map_queues): (&str, &str),
    now: Micros,
) -> DeadLetter {
    if let Some(letter) = without_room(body, properties, now) {
        return letter;
    }
    let death = properties.headers().as_ref().map(Death::of).unwrap_or_default();
    let queue = death.queue.unwrap_or_else(|| from.to_owned());
    let error = match death.reason.as_deref() {
        Some("expired") => format!("the message expired in {queue} and was never written"),
        Some("delivery_limit") => {
            format!("the message was returned to {queue} too often (delivery_limit) and was never written")
        }
        why => format!(
            "the broker dead-lettered the message from {queue} ({}), and it was never written",
            why.unwrap_or("no reason given")
        ),
    };
    let refusal = Refusal { reason: Reason::ReturnedByBroker, error };
    let since = death.at.filter(|at| (1..=now.0).contains(&at.0)).unwrap_or(now);
    let kept = match &death.published {
        Some((exchange, routing_key)) if queue.starts_with(map_queues) => {
            mapped(properties, exchange, routing_key, None).0
        }
        _ => headers(properties),
    };
    let body =
        packed::unpacked(body, encoding(properties).map(str::to_ascii_lowercase).as_deref()).unwrap_or(body.into());
    refused(refusal, &body, &kept.json, &queue, since)
}

#[derive(Default)]
struct Death {
    queue: Option<String>,
    reason: Option<String>,
    at: Option<Micros>,
    published: Option<(String, String)>,
}

impl Death {
    fn of(headers: &FieldTable) -> Self {
        let text = |name: &str| match headers.inner().get(name) {
            Some(AMQPValue::LongString(text)) => Some(String::from_utf8_lossy(text.as_bytes()).into_owned()),
            _ => None,
        };
        // The newest entry in `x-death` is the first.
        let newest = match headers.inner().get("x-death") {
            Some(AMQPValue::FieldArray(deaths)) => deaths.as_slice().first(),
            _ => None,
        };
        let of_newest = |name: &str| match newest {
            Some(AMQPValue::FieldTable(death)) => death.inner().get(name),
            _ => None,
        };
        let at = match of_newest("time") {
            Some(AMQPValue::Timestamp(seconds)) => i64::try_from(*seconds).ok(),
            _ => None,
        };
        let key = match of_newest("routing-keys") {
            Some(AMQPValue::FieldArray(keys)) => keys.as_slice().first(),
            _ => None,
        };
        let published = match (of_newest("exchange"), key) {
            (Some(AMQPValue::LongString(exchange)), Some(AMQPValue::LongString(key))) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                Some((text(exchange.as_bytes()), text(key.as_bytes())))
            }
            _ => None,
        };
        Self {
            queue: text("x-first-death-queue").map(|queue| queue.chars().take(QUEUE_CHARS_MAX).collect()),
            // A publisher can have set this header to any text.
            reason: text("x-first-death-reason").map(|reason| reason.chars().take(REASON_CHARS_MAX).collect()),
            at: at.and_then(|seconds| seconds.checked_mul(1_000_000)).map(Micros),
            published,
        }
    }
}

/// The broker's reason is shortened to this number of characters. RabbitMQ's own reasons have about a dozen characters.
const REASON_CHARS_MAX: usize = 100;

/// The maximum length of the column `dead_letter.queue`. AMQP names have at most 255 bytes, but a publisher can put a
/// longer text into the header.
const QUEUE_CHARS_MAX: usize = 255;

#[cfg(test)]
mod tests {
    use super::headers::HEADERS_BYTES_MAX;
    use super::*;

    const FROM: (&str, &str) = ("tally.returned", "tally.map.");

    #[test]
    fn a_letter_without_room_is_the_same_once_it_is_taken_in() {
        let refusal = Refusal { reason: Reason::UnknownKind, error: "kind is \"film\"".to_owned() };
        let headers = r#"{"app_id":"api","count":-3,"is":true,"trace":"a\"b"}"#.into();
        let letter = refused(refusal, b"{}", &headers, "tally.events.3", Micros(1_795_251_385_000_001));
        assert_eq!(returned(b"{}", &properties(&letter), FROM, Micros(1_795_251_999_000_000)), letter);
    }

    #[test]
    fn a_returned_message_says_where_it_came_from_and_when() {
        let mut death = FieldTable::default();
        death.insert("time".into(), AMQPValue::Timestamp(1_795_251_385));
        let mut fields = FieldTable::default();
        fields.insert("x-death".into(), AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into()));
        fields.insert("x-first-death-queue".into(), AMQPValue::LongString("tally.events.3".into()));
        fields.insert("x-first-death-reason".into(), AMQPValue::LongString("delivery_limit".into()));
        let properties = BasicProperties::default().with_headers(fields);
        let letter = returned(b"{}", &properties, FROM, Micros(1_795_251_999_000_000));
        assert_eq!((letter.queue.as_str(), letter.reason), ("tally.events.3", "returned-by-broker"));
        assert_eq!(letter.first_seen, Micros(1_795_251_385_000_000));
        assert!(letter.error.contains("(delivery_limit)"), "{}", letter.error);
        // In the first case, the broker's clock is ahead. In the second case, someone published the message manually.
        assert_eq!(returned(b"{}", &properties, FROM, Micros(5)).first_seen, Micros(5));
        let bare = returned(b"{}", &BasicProperties::default(), FROM, Micros(5));
        assert_eq!((bare.queue.as_str(), &*bare.headers), ("tally.returned", "{}"));
    }

    #[test]
    fn the_reason_of_a_returned_message_is_short_and_says_whether_it_expired() {
        let error = |reason: &str| {
            let mut fields = FieldTable::default();
            fields.insert("x-first-death-queue".into(), AMQPValue::LongString("q".into()));
            fields.insert("x-first-death-reason".into(), AMQPValue::LongString(reason.into()));
            returned(b"{}", &BasicProperties::default().with_headers(fields), FROM, Micros(5)).error
        };
        assert_eq!(error("expired"), "the message expired in q and was never written");
        assert!(error(&"x".repeat(70_000)).len() < 200, "the column holds 65,535 bytes");
    }

    #[test]
    fn the_letters_of_a_list_share_the_headers_of_its_message() {
        let kept: Arc<str> = "x".repeat(HEADERS_BYTES_MAX).into();
        let refusal = || Refusal { reason: Reason::MalformedJson, error: String::new() };
        let letters: Vec<DeadLetter> = (0..1_000).map(|_| refused(refusal(), b"{}", &kept, "q", Micros(1))).collect();
        assert!(letters.iter().all(|letter| Arc::ptr_eq(&letter.headers, &kept)));
    }

    #[test]
    fn a_huge_body_is_cut_and_that_is_reported() {
        let refusal = Refusal { reason: Reason::TooLarge, error: "large".to_owned() };
        let letter = refused(refusal, &vec![b'x'; KEPT_BYTES_MAX + 1], &Arc::default(), "q", Micros(1));
        assert_eq!((letter.body.len(), &*letter.headers), (KEPT_BYTES_MAX, "{}"));
        assert!(letter.error.contains("1048577 bytes"), "{}", letter.error);
    }
}
