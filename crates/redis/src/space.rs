//! Estimates how compactly Redis stores buckets, and deletes all keys of a layout.

use redis::{Cmd, Pipeline, Value};
use tallyd_connect::fate::Fate;
use tallyd_core::keys::{KindNames, fields_beside};
use tallyd_core::layout::{BUCKET_BITS_MAX, Form, Layout};
use tallyd_core::model::{Metric, Target};

use super::counters::pieces;
use super::{Cache, Context, Result, text};

pub const LISTPACK_ENTRIES: &str = "hash-max-listpack-entries";

/// The default of this setting in Redis 7 and 8 and Valkey 8 and 9.
pub const LISTPACK_FIELDS: u64 = 512;

/// The maximum average number of targets per bucket. With fewer targets per bucket, keys take more memory. With more
/// targets per bucket, commands take more time.
pub const FIELDS_MEAN_MAX: f64 = 128.0;

/// The memory estimate assumes that each counter of a popular target has this number of digits.
const DIGITS: u64 = 7;

impl Cache {
    pub async fn listpack_fields(&self) -> Option<u64> {
        self.setting(LISTPACK_ENTRIES).await.ok().flatten()
    }

    pub async fn setting(&self, name: &str) -> Result<Option<u64>> {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg(name);
        let limit = |answer: &Value| {
            let pair = match answer {
                Value::Array(parts) => parts.get(1)?,
                Value::Map(pairs) => &pairs.first()?.1,
                _ => return None,
            };
            text(pair)?.parse().ok()
        };
        let answers = match self.ask_all("ask for Redis' settings", command).await {
            Err(error) if error.fate() == Fate::Refused => return Ok(None),
            answers => answers?,
        };
        Ok(answers.iter().map(limit).collect::<Option<Vec<u64>>>().and_then(|limits| limits.into_iter().min()))
    }

    /// First deletes the marks of loaded buckets, so that a client that still reads this layout gets unknown numbers,
    /// not zeros. In the layout `entity`, other fields of each hash stay.
    pub async fn drop_layout(&self, kinds: &KindNames, metrics: &[Metric], dry_run: bool) -> Result<u64> {
        let mut dropped = 0;
        for (_, name) in kinds.all() {
            dropped += self.drop_buckets(|bucket| vec![self.keys.counters(name, bucket)], dry_run).await?;
        }
        for (kind, name) in kinds.all() {
            dropped += self.drop_buckets(|bucket| self.keys.recent(name, bucket).into(), dry_run).await?;
            for metric in metrics {
                let mut next = Some("0".to_owned());
                while let Some(from) = next {
                    let (targets, to) = self.scan_targets((name, kind), *metric, &from).await?;
                    next = to;
                    let commands = targets.iter().map(|target| self.drop_number(name, *target, *metric, dry_run));
                    dropped += self.count_ones(commands.collect()).await?;
                }
            }
        }
        Ok(dropped)
    }

    pub(super) fn drop_number(&self, kind: &str, target: Target, metric: Metric, dry_run: bool) -> Cmd {
        let key = self.keys.place(kind, target, metric).key;
        let entity = self.keys.layout().form == Form::Entity;
        let mut command = redis::cmd(match (entity, dry_run) {
            (true, true) => "HEXISTS",
            (true, false) => "HDEL",
            (false, true) => "EXISTS",
            (false, false) => "UNLINK",
        });
        command.arg(key);
        if entity {
            command.arg(self.keys.metric(metric));
        }
        command
    }

    async fn drop_buckets(&self, keys: impl Fn(u32) -> Vec<String>, dry_run: bool) -> Result<u64> {
        let mut dropped = 0;
        for buckets in pieces(0..self.keys.buckets()) {
            let command = |key| {
                let mut command = redis::cmd(if dry_run { "EXISTS" } else { "UNLINK" });
                command.arg(key);
                command
            };
            dropped += self.count_ones(buckets.flat_map(&keys).map(command).collect()).await?;
        }
        Ok(dropped)
    }

    pub(super) async fn count_ones(&self, commands: Vec<Cmd>) -> Result<u64> {
        const ACTION: &str = "delete the keys of a layout";
        let mut ones = 0;
        for some in commands.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(some.len());
            for command in some {
                pipeline.add_command(command.clone());
            }
            for answer in self.run(ACTION, &pipeline).await? {
                let answer = answer.context(ACTION)?;
                ones += u64::from(answer == Value::Int(1));
            }
        }
        Ok(ones)
    }
}

/// Targets are spread randomly (Poisson). With 2^n buckets, hardly any bucket exceeds `mean + sqrt(2 mean ln 2^n) +
/// ln(2^n) / 3` (Bernstein's inequality), plus the fields that belong to no target.
pub fn fields_most(layout: &Layout, mean: f64, partitions: u16) -> u64 {
    let buckets = f64::from(layout.buckets()).ln();
    (mean + (2.0 * mean * buckets).sqrt() + buckets / 3.0).ceil() as u64 + fields_beside(partitions)
}

pub fn suited_bits(targets: u64) -> u8 {
    let buckets = (targets as f64 / FIELDS_MEAN_MAX).max(1.0);
    buckets.log2().ceil().clamp(0.0, f64::from(BUCKET_BITS_MAX)) as u8
}

/// Returns the number of bytes in the field of a popular target. The field is a list of numbers, and a metric's code is
/// the place of the metric in this list. Places without a metric contain a zero.
pub fn field_bytes(metrics: &[Metric]) -> u64 {
    let places = metrics.iter().map(|metric| u64::from(metric.0)).max().unwrap_or(0);
    places * 2 + metrics.len() as u64 * (DIGITS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_core::layout::{Form, bucket};
    use tallyd_core::model::TargetId;

    #[test]
    fn buckets_hold_up_to_a_hundred_and_twenty_eight_targets() {
        for (targets, bits) in [(1, 0), (128, 0), (129, 1), (1_048_576, 13), (1_048_577, 14), (u64::MAX, 28)] {
            assert_eq!(suited_bits(targets), bits, "{targets}");
        }
    }

    #[test]
    fn a_field_is_as_long_as_its_highest_code_has_it() {
        for (codes, bytes) in [(vec![1], 8), (vec![1, 2, 3], 24), (vec![40], 86), ((1..=8).collect(), 64)] {
            assert_eq!(field_bytes(&codes.iter().copied().map(Metric).collect::<Vec<_>>()), bytes, "{codes:?}");
        }
    }

    #[test]
    fn no_bucket_is_larger_than_expected() {
        for bits in [0, 4, 10] {
            let layout = Layout::new(Form::Packed, bits, "").unwrap();
            for mean in [1_u64, 30, 122] {
                let mut sizes = vec![1_u64; layout.buckets() as usize];
                for number in 0..mean * u64::from(layout.buckets()) {
                    // The ids are as sparse as snowflake ids.
                    sizes[bucket(TargetId(number << 22), bits) as usize] += 1;
                }
                let most = *sizes.iter().max().unwrap();
                let expected = fields_most(&layout, mean as f64, 1);
                assert!(most <= expected && expected <= most * 2 + 8, "2^{bits} of {mean}: {most}, {expected}");
            }
        }
    }
}
