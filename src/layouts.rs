//! Which layout would suit the numbers that are there: measured in Redis itself with a sample of them.

use std::collections::HashMap;
use std::fmt;

use anyhow::Result;
use serde::Serialize;

use crate::cache::Cache;
use crate::cache::keys::Keys;
use crate::cache::layout::{Form, Layout, packed};
use crate::cache::space::{LISTPACK_FIELDS, Weighed, fields_most};
use crate::config::Config;
use crate::model::{Kind, Metric, Target, TargetId};
use crate::store::Store;
use crate::store::ranges::LAST;

/// Counters that are read at once.
const PAGE_COUNTERS: usize = 100_000;

/// Targets of each kind that are measured with.
const SAMPLED: usize = 4_096;

/// Targets that one bucket should hold at most, on average: fewer waste room for the key, more cost time.
pub const FIELDS_MEAN_MAX: f64 = 128.0;

/// Keys that are measured where each target has its own.
const KEYS_WEIGHED: usize = 512;

/// What a key costs in Redis' table of all keys: a pointer of 8 bytes, in a table that is half full to full.
const TABLE_BYTES: f64 = 12.0;

/// Sizes of buckets between which equally many lie, in standard deviations from the mean.
const OCTILES: [f64; 8] = [-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53];

/// What is advised for each kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Up to how many fields Redis keeps a hash compact; none where it doesn't tell.
    pub hash_max_listpack_entries: Option<u64>,
    /// The kinds that have counters.
    pub kinds: Vec<KindAdvice>,
}

/// What is advised for one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindAdvice {
    /// Its name.
    pub kind: String,
    /// Targets that have a counter.
    pub targets: u64,
    /// Numbers of a target: those of `[metrics]`.
    pub numbers: u64,
    /// The layouts, the configured one among them.
    pub layouts: Vec<Weight>,
}

/// What one layout would take.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Weight {
    /// `packed:13`, `entity:13` or `string:13`.
    pub layout: String,
    /// Bytes for each number of each target, zeros counted.
    pub bytes_per_counter: f64,
    /// Bytes in all.
    pub bytes: u64,
    /// Fields of a bucket on average; none where numbers have keys of their own.
    pub fields_mean: Option<f64>,
    /// Fields of the largest bucket, about: hash-max-listpack-entries must not be less.
    pub fields_most: Option<u64>,
    /// Whether it is the configured one.
    pub configured: bool,
    /// Whether it is the one to choose.
    pub advised: bool,
}

/// Measures. Reads all of `counter` once, and puts samples into Redis for a moment each.
///
/// # Errors
/// The servers'.
pub async fn advise(config: &Config, store: &Store, cache: &Cache) -> Result<Advice> {
    let metrics = config.metrics.codes();
    let mut kinds = Vec::new();
    for (name, code) in &config.kinds.0 {
        let (targets, sampled) = sample(store, Kind(*code), config.metrics.like()).await?;
        if targets == 0 {
            continue;
        }
        let mut numbers = HashMap::new();
        for some in sampled.chunks(500) {
            numbers.extend(store.numbers(some).await?);
        }
        let sample = Sample { kind: name, targets, metrics: &metrics, sampled: &sampled, numbers: &numbers };
        let mut layouts = Vec::new();
        for layout in candidates(config, targets)? {
            layouts.push(sample.weigh(config, cache, layout).await?);
        }
        kinds.push(KindAdvice { kind: name.clone(), targets, numbers: metrics.len() as u64, layouts });
    }
    Ok(Advice { hash_max_listpack_entries: cache.listpack_fields().await, kinds })
}

/// How many targets the kind has, and some of them, as if drawn by lot.
async fn sample(store: &Store, kind: Kind, metric: Metric) -> Result<(u64, Vec<Target>)> {
    let (mut targets, mut after, mut sampled) = (0_u64, TargetId(0), Vec::new());
    loop {
        if after >= LAST {
            return Ok((targets, sampled));
        }
        let range = store.list_range(kind, after, PAGE_COUNTERS).await?;
        after = range.until;
        for (target, _) in range.counters.iter().map(|counted| counted.number).filter(|(_, other)| *other == metric) {
            targets += 1;
            if sampled.len() < SAMPLED {
                sampled.push(target);
                continue;
            }
            // The hash of an id is as good as a lot, and the same each time.
            let place = (u128::from(crc32fast::hash(&target.id.0.to_be_bytes())) * u128::from(targets)) >> 32;
            if let Some(slot) = usize::try_from(place).ok().and_then(|place| sampled.get_mut(place)) {
                *slot = target;
            }
        }
    }
}

/// The number of buckets that suits so many targets, as a power of two.
fn suited_bits(targets: u64) -> u8 {
    let buckets = (targets as f64 / FIELDS_MEAN_MAX).max(1.0);
    buckets.log2().ceil().clamp(0.0, 28.0) as u8
}

fn candidates(config: &Config, targets: u64) -> Result<Vec<Layout>> {
    let suited = suited_bits(targets);
    let configured = config.redis.layout().map_err(anyhow::Error::msg)?;
    let mut layouts = Vec::new();
    for bits in suited.saturating_sub(2)..=(suited + 2).min(28) {
        layouts.push(Layout::new(Form::Packed, bits, "").map_err(anyhow::Error::msg)?);
    }
    for form in [Form::Entity, Form::String] {
        layouts.push(Layout::new(form, suited, "").map_err(anyhow::Error::msg)?);
    }
    layouts.retain(|layout| layout.form == Form::Packed || layout.form != configured.form);
    if !layouts.contains(&configured) {
        layouts.push(configured);
    }
    Ok(layouts)
}

/// Targets of one kind with their numbers.
struct Sample<'a> {
    kind: &'a str,
    targets: u64,
    metrics: &'a [Metric],
    sampled: &'a [Target],
    numbers: &'a HashMap<(Target, Metric), i64>,
}

impl Sample<'_> {
    async fn weigh(&self, config: &Config, cache: &Cache, layout: Layout) -> Result<Weight> {
        let keys = Keys::new(&config.redis, &config.metrics, layout.clone());
        let mean = self.targets as f64 / f64::from(layout.buckets());
        let per_target = if layout.form == Form::Packed {
            let (buckets, targets) = self.buckets(&keys, mean);
            let bytes: u64 = cache.weigh(&buckets).await?.iter().sum();
            (bytes as f64 + TABLE_BYTES * buckets.len() as f64) / targets.max(1) as f64
        } else {
            let things = self.keys(&keys);
            let targets = self.sampled.len().min(KEYS_WEIGHED);
            let bytes: u64 = cache.weigh(&things).await?.iter().sum();
            (bytes as f64 + TABLE_BYTES * things.len() as f64) / targets.max(1) as f64
        };
        let is_packed = layout.form == Form::Packed;
        Ok(Weight {
            layout: layout.to_string(),
            bytes_per_counter: per_target / self.metrics.len().max(1) as f64,
            bytes: (per_target * self.targets as f64) as u64,
            fields_mean: is_packed.then_some(mean),
            fields_most: is_packed.then(|| fields_most(&layout, mean, config.amqp.partitions)),
            configured: config.redis.layout().is_ok_and(|configured| configured == layout),
            advised: is_packed && layout.bucket_bits == suited_bits(self.targets),
        })
    }

    fn number(&self, target: Target, metric: Metric) -> i64 {
        self.numbers.get(&(target, metric)).copied().unwrap_or(0)
    }

    /// Buckets of the sizes that buckets of this mean have, and how many targets live in them.
    fn buckets(&self, keys: &Keys, mean: f64) -> (Vec<Weighed>, usize) {
        let (mut drawn, mut targets) = (self.sampled.iter().cycle(), 0);
        let bucket = |(place, deviations): (usize, &f64)| {
            let size = (mean + deviations * mean.sqrt()).round().max(1.0) as usize;
            let mut fields = vec![("_".to_owned(), "12345:67890".to_owned())];
            for target in drawn.by_ref().take(size.min(self.sampled.len())) {
                let numbers: Vec<i64> = self.metrics.iter().map(|metric| self.number(*target, *metric)).collect();
                let field = packed(self.metrics, &numbers);
                targets += 1;
                // All zero: Redis keeps nothing.
                if !field.is_empty() {
                    fields.push((target.id.to_string(), field));
                }
            }
            Weighed { name_len: keys.counters(self.kind, place as u32).len(), fields }
        };
        let buckets = OCTILES.iter().enumerate().map(bucket).collect();
        (buckets, targets)
    }

    /// The keys of some targets.
    fn keys(&self, keys: &Keys) -> Vec<Weighed> {
        let mut things = Vec::new();
        for target in self.sampled.iter().take(KEYS_WEIGHED) {
            let numbers = self.metrics.iter().map(|metric| (*metric, self.number(*target, *metric)));
            let numbers = numbers.filter(|(_, number)| *number != 0);
            let name_len = |metric: &Metric| keys.place(self.kind, *target, *metric).key.len();
            if keys.layout().form == Form::String {
                things.extend(numbers.map(|(metric, number)| Weighed {
                    name_len: name_len(&metric),
                    fields: vec![(String::new(), number.to_string())],
                }));
                continue;
            }
            let fields: Vec<(String, String)> =
                numbers.map(|(metric, number)| (keys.metric(metric).to_owned(), number.to_string())).collect();
            if let (Some(metric), false) = (self.metrics.first(), fields.is_empty()) {
                things.push(Weighed { name_len: name_len(metric), fields });
            }
        }
        things
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kinds.is_empty() {
            return write!(
                f,
                "no kind has counters in MySQL yet: packed suits any ids; choose bucket_bits by what you expect"
            );
        }
        for kind in &self.kinds {
            let KindAdvice { kind, targets, numbers, layouts } = kind;
            writeln!(f, "{kind}: {targets} targets, numbers of each: {numbers}")?;
            writeln!(f, "  layout      bytes/number     MiB in all   targets in a bucket (mean, most)")?;
            for weight in layouts {
                let Weight { layout, bytes_per_counter, bytes, fields_mean, fields_most, configured, advised } = weight;
                let mib = *bytes as f64 / 1_048_576.0;
                write!(f, "  {layout:<12}{bytes_per_counter:>10.2}{mib:>17.1}")?;
                match (fields_mean, fields_most) {
                    (Some(mean), Some(most)) => write!(f, "   {mean:>10.0} {most:>8}")?,
                    _ => write!(f, "   {:>10} {:>8}", "-", "-")?,
                }
                let note = match (configured, advised) {
                    (true, true) => "   as configured, and advised",
                    (true, false) => "   as configured",
                    (false, true) => "   advised",
                    (false, false) => "",
                };
                writeln!(f, "{note}")?;
            }
        }
        let most = self.kinds.iter().flat_map(|kind| &kind.layouts).filter(|layout| layout.advised);
        let most = most.filter_map(|layout| layout.fields_most).max().unwrap_or(0);
        let limit = self.hash_max_listpack_entries;
        let set = limit.map_or_else(
            || format!("not told to this account, by default {LISTPACK_FIELDS}"),
            |limit| limit.to_string(),
        );
        write!(f, "hash-max-listpack-entries must be {most} or more for what is advised; it is {set}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_up_to_a_hundred_and_twenty_eight_targets() {
        for (targets, bits) in [(1, 0), (128, 0), (129, 1), (1_048_576, 13), (1_048_577, 14), (u64::MAX, 28)] {
            assert_eq!(suited_bits(targets), bits, "{targets}");
        }
    }
}
