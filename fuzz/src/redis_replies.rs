//! Fuzzes the code that reads Redis's answers. Each answer must be accepted or rejected without a panic.

use std::sync::LazyLock;

use redis::Value;
use tallyd_core::model::Metric;
use tallyd_redis::layout::{Form, Layout};
use tallyd_redis::replies;

use super::Bytes;

static LAYOUTS: LazyLock<Vec<Layout>> = LazyLock::new(|| {
    let layout = |form| Layout::new(form, 13, "").expect("a layout");
    [Form::Packed, Form::Entity, Form::String].map(layout).to_vec()
});

/// The input is used twice: as bytes of the protocol, and as the source of a random answer.
pub fn redis_replies(data: &[u8]) {
    let metrics = [Metric(1), Metric(2), Metric(255)];
    let mut bytes = Bytes(data);
    let values = [redis::parse_redis_value(data).ok(), Some(value(&mut bytes, 0))];
    for value in values.iter().flatten() {
        for layout in LAYOUTS.iter() {
            replies::read(value, layout, &metrics);
        }
    }
}

fn value(bytes: &mut Bytes<'_>, depth: u8) -> Value {
    match bytes.byte() % 16 {
        0 => Value::Nil,
        1 => Value::Int(i64::from_le_bytes(bytes.number().to_le_bytes())),
        2 => Value::Int(i64::from(bytes.byte()) - 128),
        3 => Value::Okay,
        4 => Value::SimpleString(String::from_utf8_lossy(bytes.some(9)).into_owned()),
        5 => Value::Boolean(bytes.byte() & 1 == 1),
        6 => Value::Double(f64::from_bits(bytes.number())),
        7 if depth < 4 => Value::Set(list(bytes, depth)),
        8..=11 if depth < 4 => Value::Array(list(bytes, depth)),
        12 => Value::BulkString(bytes.number().to_string().into_bytes()),
        // Uses the input as a script's answer: the parts of a sample, separated by zero bytes.
        13 => Value::BulkString(sample(bytes)),
        _ => {
            let length = usize::from(bytes.byte() % 32);
            Value::BulkString(bytes.some(length).to_vec())
        }
    }
}

fn list(bytes: &mut Bytes<'_>, depth: u8) -> Vec<Value> {
    (0..bytes.byte() % 12).map(|_| value(bytes, depth + 1)).collect()
}

fn sample(bytes: &mut Bytes<'_>) -> Vec<u8> {
    const PARTS: [&str; 12] = [
        "",
        "7",
        "3:9",
        "~3:9",
        "0:17,3:12",
        "5",
        "12,3,0,4",
        "-9223372036854775808",
        "18446744073709551615",
        ",",
        ":",
        "x",
    ];
    let parts: Vec<&str> = (0..bytes.byte() % 8).map(|_| PARTS[usize::from(bytes.byte()) % PARTS.len()]).collect();
    parts.join("\0").into_bytes()
}
