//! The places of a target's counters in Redis. Rust code, script arguments and documents use these terms
//! (decision 0038). Pure.
//!
//! * *packed*: each kind has 2^`bucket_bits` hashes (buckets), and each target is in one bucket. Each bucket is small,
//!   so Redis stores it compactly as a listpack. A field's name is the target's id in decimal. A field's value is a
//!   text with all counters in the order of the metrics' codes, `12,3,0,4`, without trailing zeros.
//! * *entity*: each target has a hash with one field for each metric.
//! * *string*: each counter has its own key.
//!
//! In the layouts entity and string, a bucket contains no counters. It only shows whether Redis has lost the counters
//! of the bucket's targets.

use std::fmt;

use super::template::Template;
use crate::model::{Metric, TargetId};

/// The largest `bucket_bits`. 2^28 buckets of about 122 targets each are more than enough for all targets.
pub const BUCKET_BITS_MAX: u8 = 28;

/// The largest absolute value of a counter. tallyd ignores a larger value, because only a person can have written it.
/// The difference of two valid values fits into 64 bits.
const NUMBER_MAX: i64 = 1 << 62;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub form: Form,
    pub bucket_bits: u8,
    pub template: Option<Template>,
}

/// The type of key that holds the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Hashes that each hold many targets. This form needs the least memory.
    Packed,
    /// A hash for each target.
    Entity,
    /// A key for each number.
    String,
}

impl Form {
    pub fn default_template(self) -> &'static str {
        match self {
            Self::Packed => "",
            Self::Entity => "counter:{kind}:{id}",
            Self::String => "counter:{id}:{metric}",
        }
    }
}

impl Layout {
    /// Creates a layout. If `template` is empty, the layout uses the default names.
    ///
    /// # Errors
    /// Fails if the names cannot be used. The caller writes the key pattern before the error, so that both form a
    /// sentence.
    pub fn new(form: Form, bucket_bits: u8, template: &str) -> Result<Self, String> {
        let template = match (form, template) {
            (Form::Packed, "") => None,
            (Form::Packed, _) => return Err("is for the layouts entity and string".to_owned()),
            (form, "") => Some(Template::parse(form.default_template())?),
            (_, given) => Some(Template::parse(given)?),
        };
        Ok(Self { form, bucket_bits, template })
    }

    /// Parses the name that commands use, `packed:13`.
    pub fn named(name: &str, template: &str) -> Result<Self, String> {
        let wrong =
            || format!("{name} is not a layout: write packed:BITS, entity:BITS or string:BITS, for example packed:13");
        let (form, bits) = name.split_once(':').ok_or_else(wrong)?;
        let form = match form {
            "packed" => Form::Packed,
            "entity" => Form::Entity,
            "string" => Form::String,
            _ => return Err(wrong()),
        };
        let bits = bits.parse().ok().filter(|bits| *bits <= BUCKET_BITS_MAX).ok_or_else(wrong)?;
        Self::new(form, bits, template).map_err(|error| format!("the key pattern {template} {error}"))
    }

    pub fn buckets(&self) -> u32 {
        1 << self.bucket_bits
    }

    /// Returns the bucket's name within its kind: the layout's letter, and the bucket's number in hex with a leading 1
    /// bit. So buckets of different layouts always have different names.
    pub fn bucket_name(&self, bucket: u32) -> String {
        format!("{}{:x}", self.letter(), self.buckets() | bucket)
    }

    pub fn named_bucket(&self, name: &str) -> Option<u32> {
        let number = u32::from_str_radix(name.strip_prefix(self.letter())?, 16).ok()?;
        (number >> self.bucket_bits == 1).then(|| number & (self.buckets() - 1))
    }

    fn letter(&self) -> &'static str {
        match self.form {
            Form::Packed => "",
            Form::Entity => "h",
            Form::String => "s",
        }
    }

    pub fn full_name(&self) -> String {
        self.template.as_ref().map_or_else(|| self.to_string(), |template| format!("{self} {template}"))
    }

    /// Returns the key names of one target, for each kind and metric. Each name must be unique in this layout and in
    /// all other layouts. In the layout `entity` all metrics are in one hash.
    pub fn key_names(&self, kinds: &[&str], metrics: &[&str]) -> Vec<String> {
        let Some(template) = &self.template else { return Vec::new() };
        let metrics = if self.form == Form::Entity { metrics.get(..1).unwrap_or_default() } else { metrics };
        let name =
            |kind: &&str| metrics.iter().map(|metric| template.name(kind, TargetId(0), metric)).collect::<Vec<_>>();
        kinds.iter().flat_map(name).collect()
    }

    pub fn overlaps(&self, other: &Self, kinds: &[&str], metrics: &[&str]) -> bool {
        let names = other.key_names(kinds, metrics);
        // If two layouts have the same name, the keys of their buckets and recent clicks are also the same.
        self.to_string() == other.to_string() || self.key_names(kinds, metrics).iter().any(|name| names.contains(name))
    }

    pub fn value(&self, text: &str, metric: Metric) -> Option<i64> {
        match self.form {
            Form::Packed => value(text, metric),
            Form::Entity | Form::String if text.is_empty() => Some(0),
            Form::Entity | Form::String => number(text),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.form {
            Form::Packed => "packed",
            Form::Entity => "entity",
            Form::String => "string",
        };
        write!(f, "{form}:{}", self.bucket_bits)
    }
}

/// Returns the target's bucket: the lowest `bucket_bits` bits of zlib's CRC-32 of the id in decimal. The id is hashed
/// because the low bits of snowflake ids are nearly constant.
pub fn bucket(id: TargetId, bucket_bits: u8) -> u32 {
    let hash = crc32fast::hash(id.to_string().as_bytes());
    hash & ((1_u32 << bucket_bits) - 1)
}

/// Returns the metric's counter from the value of a packed field. A missing counter is zero. Returns `None` if the text
/// is invalid.
pub fn value(text: &str, metric: Metric) -> Option<i64> {
    match text.split(',').nth(usize::from(metric.0) - 1) {
        None => Some(0),
        Some("") if text.is_empty() => Some(0),
        Some(text) => number(text),
    }
}

fn number(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number| (-NUMBER_MAX..=NUMBER_MAX).contains(number))
}

pub fn packed(metrics: &[Metric], numbers: &[i64]) -> String {
    let most = metrics.iter().map(|metric| usize::from(metric.0)).max().unwrap_or(0);
    let mut values = vec![0; most];
    for (metric, number) in metrics.iter().zip(numbers) {
        if let Some(value) = values.get_mut(usize::from(metric.0) - 1) {
            *value = *number;
        }
    }
    let filled = values.iter().rposition(|value| *value != 0).map_or(0, |last| last + 1);
    values.truncate(filled);
    values.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}

/// The value of a bucket's field `_`. The field contains the number of the run that loaded the bucket, and the number
/// of the bucket's last repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Loaded {
    /// The counters of missing targets are unknown, because Redis was flushed or no run has loaded the bucket.
    No,
    /// A run is loading the bucket, so the counters of missing targets are still unknown.
    Loading { generation: u64, pass: u64 },
    /// The counters of missing targets are zero.
    Yes { generation: u64, pass: u64 },
}

impl Loaded {
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::No);
        }
        let (loading, numbers) = text.strip_prefix('~').map_or((false, text), |numbers| (true, numbers));
        let (generation, pass) = numbers.split_once(':')?;
        let (generation, pass) = (generation.parse().ok()?, pass.parse().ok()?);
        Some(if loading { Self::Loading { generation, pass } } else { Self::Yes { generation, pass } })
    }

    #[must_use]
    pub fn repaired(self, pass: u64) -> Self {
        match self {
            Self::No => Self::No,
            Self::Loading { generation, .. } => Self::Loading { generation, pass },
            Self::Yes { generation, .. } => Self::Yes { generation, pass },
        }
    }
}

impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::No => Ok(()),
            Self::Loading { generation, pass } => write!(f, "~{generation}:{pass}"),
            Self::Yes { generation, pass } => write!(f, "{generation}:{pass}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_value_is_found_by_its_place() {
        for (text, metric, expected) in [
            ("12,3,0,4", 1, Some(12)),
            ("12,3,0,4", 4, Some(4)),
            ("12", 2, Some(0)),
            ("", 1, Some(0)),
            ("-3", 1, Some(-3)),
            ("x", 1, None),
            ("12,,4", 2, None),
            ("4611686018427387904", 1, Some(1 << 62)),
            ("-4611686018427387905", 1, None),
            ("0,-9223372036854775808", 2, None),
        ] {
            assert_eq!(value(text, Metric(metric)), expected, "{text}");
        }
    }

    #[test]
    fn snowflake_ids_spread_evenly() {
        // An id has 41 bits of milliseconds, 10 bits of machine number, and a 12-bit sequence number that is nearly
        // always 0.
        let mut filled = vec![0_u32; 1 << 10];
        for step in 0..122_880_u64 {
            filled[bucket(TargetId((1_700_000_000_000 + step * 7) << 22 | 5 << 12), 10) as usize] += 1;
        }
        assert!(
            filled.iter().all(|members| (60..200).contains(members)),
            "{:?}",
            (filled.iter().min(), filled.iter().max())
        );
    }

    #[test]
    fn a_layout_is_read_as_it_is_named() {
        for name in ["packed:13", "entity:0", "string:28"] {
            assert_eq!(Layout::named(name, "").unwrap().to_string(), name);
        }
        for name in ["packed", "packed:29", "packed:x", "hash:3", ""] {
            assert!(Layout::named(name, "").unwrap_err().contains("write packed:BITS"), "{name}");
        }
        assert!(Layout::named("packed:13", "x:{id}").unwrap_err().contains("is for the layouts"));
    }

    #[test]
    fn no_two_layouts_share_a_bucket() {
        let layouts: Vec<Layout> = [(Form::Packed, 2), (Form::Packed, 3), (Form::Entity, 2), (Form::String, 2)]
            .map(|(form, bits)| Layout::new(form, bits, "").unwrap())
            .into();
        let mut names = std::collections::BTreeSet::new();
        for layout in &layouts {
            for bucket in 0..layout.buckets() {
                let name = layout.bucket_name(bucket);
                for other in &layouts {
                    let expected = if other == layout { Some(bucket) } else { None };
                    assert_eq!(other.named_bucket(&name), expected, "{layout} {name} {other}");
                }
                assert!(names.insert(name));
            }
        }
        assert_eq!(names.len(), 4 + 8 + 4 + 4);
    }

    #[test]
    fn layouts_overlap_if_they_share_a_bucket_or_a_key() {
        let layout = |form, bits, template: &str| Layout::new(form, bits, template).unwrap();
        let (kinds, metrics) = (["video", "post"], ["like", "view"]);
        let entity = layout(Form::Entity, 13, "n:{kind}:{id}");
        let string = layout(Form::String, 13, "n:{kind}:{metric}:{id}");
        assert_eq!(entity.key_names(&kinds, &metrics), ["n:video:0", "n:post:0"]);
        let names = ["n:video:like:0", "n:video:view:0", "n:post:like:0", "n:post:view:0"];
        assert_eq!(string.key_names(&kinds, &metrics), names);
        assert!(layout(Form::Packed, 13, "").key_names(&kinds, &metrics).is_empty());
        for (other, overlaps) in [
            (layout(Form::Packed, 13, ""), false),
            (string, false),
            (layout(Form::Entity, 12, "n:{kind}:{id}"), true),
            (layout(Form::Entity, 13, "m:{kind}:{id}"), true),
        ] {
            assert_eq!(entity.overlaps(&other, &kinds, &metrics), overlaps, "{other}");
        }
    }

    #[test]
    fn each_form_reads_a_missing_and_a_wrong_number_in_its_way() {
        let value = |form, text| Layout::new(form, 13, "").unwrap().value(text, Metric(2));
        let packed = ["", "1", "1,7", "1,x"].map(|text| value(Form::Packed, text));
        assert_eq!(packed, [Some(0), Some(0), Some(7), None]);
        for form in [Form::Entity, Form::String] {
            assert_eq!(["", "7", "1,7", "x"].map(|text| value(form, text)), [Some(0), Some(7), None, None]);
        }
    }

    proptest! {
        #[test]
        fn a_bucket_is_in_range(id: u64, bits in 0_u8..=28) {
            prop_assert!(bucket(TargetId(id), bits) < 1 << bits);
        }

        #[test]
        fn a_packed_field_is_read_back(numbers in prop::collection::vec(-5_i64..1_000, 4)) {
            let metrics = [Metric(1), Metric(2), Metric(3), Metric(7)];
            let field = packed(&metrics, &numbers);
            prop_assert!(!field.ends_with(",0") && field != "0");
            for (metric, number) in metrics.iter().zip(numbers) {
                prop_assert_eq!(value(&field, *metric), Some(number));
            }
        }

        #[test]
        fn who_loaded_it_is_read_back(generation: u64, pass: u64, next: u64) {
            for state in [Loaded::No, Loaded::Loading { generation, pass }, Loaded::Yes { generation, pass }] {
                prop_assert_eq!(Loaded::parse(&state.to_string()), Some(state));
                prop_assert_eq!(Loaded::parse(&state.repaired(next).to_string()), Some(state.repaired(next)));
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".*") {
            let _ = (value(&text, Metric(3)), Loaded::parse(&text));
        }
    }
}
