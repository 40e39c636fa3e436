//! Fuzzes the layouts of numbers in Redis. If a name or count is read and written again, it must not change.

use tallyd_core::model::{Kind, Metric, TargetId};
use tallyd_core::outbox::OutboxOffsets;
use tallyd_redis::layout::{Layout, Loaded, bucket, packed, value};
use tallyd_redis::template::Template;

use super::Bytes;

/// The input consists of lines: a layout's name, the pattern of its keys, and texts that a field in Redis can contain.
pub fn layout(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut lines = text.split('\n');
    let mut line = || lines.next().unwrap_or_default();
    let (name, pattern, key, field) = (line(), line(), line(), line());
    if let Ok(layout) = Layout::named(name, pattern) {
        named(&layout, name, key, data);
    }
    if let Ok(template) = Template::parse(pattern) {
        templated(&template, pattern, key, data);
    }
    if let Some(loaded) = Loaded::parse(field) {
        assert_eq!(Loaded::parse(&loaded.to_string()), Some(loaded));
        let _ = loaded.repaired(data.len() as u64).to_string();
    }
    if let Some(marks) = OutboxOffsets::parse(field) {
        assert_eq!(OutboxOffsets::parse(&marks.to_string()), Some(marks));
    }
    numbers(field, data);
}

fn named(layout: &Layout, name: &str, key: &str, data: &[u8]) {
    assert_eq!(layout.to_string(), canonical(name));
    let id = TargetId(Bytes(data).number());
    let bucket = bucket(id, layout.bucket_bits);
    assert!(bucket < layout.buckets());
    assert_eq!(layout.named_bucket(&layout.bucket_name(bucket)), Some(bucket));
    if let Some(bucket) = layout.named_bucket(key) {
        assert!(bucket < layout.buckets());
    }
    let _ = layout.value(key, Metric(1));
    assert!(layout.overlaps(layout, &["video"], &["like"]));
}

/// The name `packed:+013` is also accepted, and is written again as `packed:13`.
fn canonical(name: &str) -> String {
    let (form, bits) = name.split_once(':').unwrap_or((name, ""));
    format!("{form}:{}", bits.parse::<u8>().unwrap_or(0))
}

fn templated(template: &Template, pattern: &str, key: &str, data: &[u8]) {
    assert_eq!(template.to_string(), pattern);
    let (kind, id) = (("video", Kind(1)), TargetId(Bytes(data).number()));
    let name = template.name(kind.0, id, "view");
    let found = template.target(&name, kind, "view");
    if id.0 > 0 && id.0 <= i64::MAX as u64 {
        assert_eq!(found.map(|target| target.id), Some(id), "{name}");
    }
    if let Some(target) = template.target(key, kind, "view") {
        assert_eq!(template.name(kind.0, target.id, "view"), key);
    }
    let _ = template.pattern(kind.0, "view");
}

fn numbers(field: &str, data: &[u8]) {
    for metric in [1, 2, 7, 255] {
        let _ = value(field, Metric(metric));
    }
    let mut bytes = Bytes(data);
    let metrics: Vec<Metric> = (0..4).map(|_| Metric(bytes.byte().max(1))).collect();
    let mut distinct = metrics.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let numbers: Vec<i64> = distinct.iter().map(|_| i64::from_le_bytes(bytes.number().to_le_bytes()) >> 1).collect();
    let field = packed(&distinct, &numbers);
    for (metric, number) in distinct.iter().zip(&numbers) {
        assert_eq!(value(&field, *metric), Some(*number), "{metric:?} of {field}");
    }
}
