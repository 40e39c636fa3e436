//! Fuzzes how a rejected message is stored and shown. The sender of such a message chooses every byte.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use tallyd::dead_letters::preview::judge;
use tallyd::letter::text::{
    hex_dump, instant, pretty_json, printable, printable_bytes, printable_json, printable_lines,
};
use tallyd::letter::{headers, refused, returned};
use tallyd_core::event::{Reason, Refusal};
use tallyd_core::model::Micros;

use super::Bytes;
use super::event::{NOW, TERMS};

/// Maximum size of the stored headers of a message.
const HEADERS_MAX: usize = 8 * 1024;

/// The input consists of headers, a zero byte, and a body.
pub fn dead(data: &[u8]) {
    let (head, body) = data.split_at(data.iter().position(|byte| *byte == 0).unwrap_or(data.len()));
    let mut head = Bytes(head);
    let properties = properties(&mut head);
    let json = headers(&properties).json;
    assert!(json.len() <= HEADERS_MAX, "{} bytes of headers", json.len());
    assert!(json.is_empty() || serde_json::from_str::<serde_json::Value>(&json).is_ok_and(|it| it.is_object()));
    for letter in [
        returned(body, &properties, ("tally.returned", "tally.map."), NOW),
        refused(Refusal { reason: Reason::MalformedJson, error: String::new() }, body, &json, "queue", NOW),
    ] {
        assert!(letter.queue.chars().count() <= 255 && (1..=NOW.0).contains(&letter.first_seen.0));
        assert!(serde_json::from_str::<serde_json::Value>(&letter.headers).is_ok());
        harmless(&printable_bytes(&letter.body, letter.body.len() < body.len()));
        harmless(&printable(&letter.error));
    }
    shown(body);
    let _ = instant(Micros(i64::from_le_bytes(head.number().to_le_bytes())));
}

fn shown(body: &[u8]) {
    let verdict = judge(body, &TERMS, NOW);
    harmless(&printable(&verdict.words()));
    harmless(&verdict.routing_key);
    harmless(&printable_lines(&hex_dump(body)).replace('\n', ""));
    let Some(pretty) = pretty_json(body) else { return };
    harmless(&printable_lines(&pretty).replace('\n', ""));
    harmless(&printable_json(&pretty).replace("\\u", ""));
    // Apart from whitespace, the shown text must be equal to the body.
    let squeezed = |text: &str| text.chars().filter(|it| !it.is_ascii_whitespace()).collect::<String>();
    assert_eq!(squeezed(&pretty), squeezed(std::str::from_utf8(body).expect("JSON is UTF-8")));
    assert!(pretty.len() <= body.len() * 200, "{} bytes of {}", pretty.len(), body.len());
}

/// The shown text must not contain control characters for a terminal.
fn harmless(text: &str) {
    let does_something = |it: char| it.is_control() || matches!(it, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    assert!(!text.chars().any(does_something), "{text:?}");
}

fn properties(bytes: &mut Bytes<'_>) -> BasicProperties {
    let mut properties = BasicProperties::default();
    let flags = bytes.byte();
    if flags & 1 != 0 {
        properties = properties.with_app_id(text(bytes).into());
    }
    if flags & 2 != 0 {
        properties = properties.with_message_id(text(bytes).into());
    }
    if flags & 4 != 0 {
        properties = properties.with_headers(table(bytes, 0));
    }
    properties
}

fn text(bytes: &mut Bytes<'_>) -> String {
    let length = usize::from(bytes.byte());
    String::from_utf8_lossy(bytes.some(length)).chars().take(60).collect()
}

fn table(bytes: &mut Bytes<'_>, depth: u8) -> FieldTable {
    let mut fields = FieldTable::default();
    for _ in 0..bytes.byte() % 8 {
        // Returns a header name that tallyd uses, or a random name.
        let name = match bytes.byte() % 8 {
            0 => "x-death".to_owned(),
            1 => "time".to_owned(),
            2 => "x-first-death-queue".to_owned(),
            3 => "x-delivery-count".to_owned(),
            _ => text(bytes),
        };
        let value = value(bytes, depth);
        fields.insert(name.into(), value);
    }
    fields
}

fn value(bytes: &mut Bytes<'_>, depth: u8) -> AMQPValue {
    match bytes.byte() % 12 {
        0 => AMQPValue::Boolean(bytes.byte() & 1 == 1),
        1 => AMQPValue::LongLongInt(i64::from_le_bytes(bytes.number().to_le_bytes())),
        2 => AMQPValue::Timestamp(bytes.number()),
        3 => AMQPValue::Double(f64::from_bits(bytes.number())),
        4 => AMQPValue::ShortString(text(bytes).into()),
        5 => AMQPValue::LongString(bytes.some(20).to_vec().into()),
        6 => AMQPValue::ByteArray(bytes.some(20).to_vec().into()),
        7 => AMQPValue::Void,
        8 => AMQPValue::Float(f32::from_bits(bytes.number() as u32)),
        9 | 10 if depth < 40 => {
            let mut all = FieldArray::default();
            for _ in 0..bytes.byte() % 4 {
                all.push(value(bytes, depth + 1));
            }
            AMQPValue::FieldArray(all)
        }
        _ if depth < 40 => AMQPValue::FieldTable(table(bytes, depth + 1)),
        _ => AMQPValue::Void,
    }
}
