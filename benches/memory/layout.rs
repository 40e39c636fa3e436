//! The layouts: how each names its keys, is filled, and is read.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use redis::Pipeline;
use serde::Serialize;
use tallyd::cache::Cache;
use tallyd::cache::keys::{Keys, LOADED};
use tallyd::cache::layout;
use tallyd::config::Config;
use tallyd::model::{Kind, Metric, Target, TargetId};

use crate::counts::Counts;
use crate::server::Server;

/// The names of the counters that each target has.
const NAMES: [&str; METRICS] = ["like", "comment", "forward", "favor"];

/// How many counters each target has.
pub const METRICS: usize = 4;

/// Targets of a page.
const PAGE: usize = 20;

/// Fields of a bucket: config.toml says so.
const BUCKET_FIELDS: f64 = 122.0;

/// Pairs of one command, and commands of one pipeline, while it is filled.
const PAIRS: usize = 500;
const COMMANDS: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// A string for each counter: counter:42:like.
    String,
    /// The articles' hash as they write it: the key is the low 9 bits of the id, the field the id.
    Articles,
    /// The same as it was meant: the key is id >> 9, the field id & 511.
    Corrected,
    /// A hash for each target: counter:video:42, a field for each counter.
    Entity,
    /// tallyd's default.
    Packed,
}

impl Layout {
    pub const ALL: [Self; 5] = [Self::String, Self::Articles, Self::Corrected, Self::Entity, Self::Packed];

    pub fn name(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Articles => "articles",
            Self::Corrected => "corrected",
            Self::Entity => "entity",
            Self::Packed => "packed",
        }
    }

    /// The key and the field of a counter; no field where the key is a string.
    fn place(self, id: u64, metric: &str) -> (String, Option<String>) {
        match self {
            Self::String => (format!("counter:{id}:{metric}"), None),
            Self::Articles => (format!("counter:{}:{metric}", id & 511), Some(id.to_string())),
            Self::Corrected => (format!("counter:{}:{metric}", id >> 9), Some((id & 511).to_string())),
            Self::Entity | Self::Packed => (format!("counter:video:{id}"), Some(metric.to_owned())),
        }
    }

    /// Writes all counters.
    pub fn load(self, counts: &Counts, server: &mut Server) -> Result<()> {
        match self {
            Self::Packed => load_packed(counts, server),
            Self::String => self.load_strings(counts, server),
            _ => self.load_hashes(counts, server),
        }
    }

    fn load_strings(self, counts: &Counts, server: &mut Server) -> Result<()> {
        let mut command = redis::cmd("MSET");
        for (number, (id, values)) in counts.iter().enumerate() {
            for (metric, value) in NAMES.iter().zip(values) {
                command.arg(self.place(*id, metric).0).arg(value);
            }
            if (number + 1) % PAIRS == 0 || number + 1 == counts.targets() as usize {
                let () = command.query(&mut server.connection)?;
                command = redis::cmd("MSET");
            }
        }
        Ok(())
    }

    /// Hash by hash, some fields at once.
    fn load_hashes(self, counts: &Counts, server: &mut Server) -> Result<()> {
        let mut hashes = Hashes::new(server);
        for (id, values) in counts.iter() {
            for (metric, value) in NAMES.iter().zip(values) {
                let (key, field) = self.place(*id, metric);
                hashes.add(key, field.unwrap_or_default(), value.to_string())?;
            }
        }
        hashes.finish()
    }

    /// Reads pages as clients do, and compares them.
    pub fn check(self, counts: &Counts, server: &mut Server) -> Result<()> {
        for seed in 0..50 {
            let page = counts.page(seed, PAGE);
            let found: Vec<redis::Value> = self.read(counts, &page).query(&mut server.connection)?;
            let read: Vec<i64> = match self {
                Self::Packed => found.iter().filter_map(packed_numbers).flatten().collect(),
                _ => found.iter().flat_map(numbers).collect(),
            };
            let expected: Vec<i64> = page.iter().flat_map(|(_, values)| values.map(i64::from)).collect();
            ensure!(read == expected, "{} holds something else", self.name());
        }
        Ok(())
    }

    /// The pipeline of a page.
    fn read(self, counts: &Counts, page: &[(u64, [u32; METRICS])]) -> Pipeline {
        let keys = keys(counts);
        let mut pipeline = redis::pipe();
        for (id, _) in page {
            match self {
                Self::Packed => {
                    pipeline.cmd("HMGET").arg(bucket_key(&keys, *id)).arg(LOADED).arg(*id);
                }
                Self::Entity => {
                    pipeline.cmd("HMGET").arg(self.place(*id, "").0).arg(&NAMES);
                }
                _ => {
                    for (key, field) in NAMES.map(|metric| self.place(*id, metric)) {
                        match field {
                            Some(field) => pipeline.cmd("HGET").arg(key).arg(field),
                            None => pipeline.cmd("GET").arg(key),
                        };
                    }
                }
            }
        }
        pipeline
    }

    /// So many pages; other ones in each round.
    pub fn pages(self, counts: &Counts, round: u64, pages: u64) -> Vec<Pipeline> {
        (0..pages).map(|page| self.read(counts, &counts.page(1_000 + round * pages + page, PAGE))).collect()
    }

    /// The same by MGET; none where that isn't possible.
    pub fn mget_pages(self, counts: &Counts, round: u64, pages: u64) -> Vec<Pipeline> {
        if self != Self::String {
            return Vec::new();
        }
        let page = |seed| {
            let mut pipeline = redis::pipe();
            let command = pipeline.cmd("MGET");
            for (id, _) in counts.page(seed, PAGE) {
                for metric in NAMES {
                    command.arg(self.place(id, metric).0);
                }
            }
            pipeline
        };
        (0..pages).map(|number| page(1_000 + round * pages + number)).collect()
    }
}

/// The keys of tallyd, with as many buckets as config.toml advises.
fn keys(counts: &Counts) -> Keys {
    let mut config = Config::default().redis;
    config.bucket_bits = (counts.targets() as f64 / BUCKET_FIELDS).log2().round().max(0.0) as u8;
    Cache::new(&config).map(|cache| cache.keys).unwrap_or_else(|error| panic!("the default configuration: {error}"))
}

fn target(id: u64) -> Target {
    Target { kind: Kind(1), id: TargetId(id) }
}

fn bucket_key(keys: &Keys, id: u64) -> String {
    keys.counters("video", keys.bucket(target(id)))
}

/// As lua/like.lua writes them, in buckets that are loaded.
fn load_packed(counts: &Counts, server: &mut Server) -> Result<()> {
    let keys = keys(counts);
    let mut hashes = Hashes::new(server);
    for bucket in 0..keys.buckets() {
        hashes.add(keys.counters("video", bucket), LOADED.to_owned(), "1:0".to_owned())?;
    }
    for (id, values) in counts.iter() {
        let text = values.map(|value| value.to_string()).join(",");
        hashes.add(bucket_key(&keys, *id), id.to_string(), text)?;
    }
    hashes.finish()
}

/// The numbers in an answer of Redis.
fn numbers(value: &redis::Value) -> Vec<i64> {
    match value {
        redis::Value::Array(values) => values.iter().flat_map(numbers).collect(),
        redis::Value::BulkString(text) => {
            std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// What tallyd reads in an answer to HMGET of the field `_` and an id.
fn packed_numbers(value: &redis::Value) -> Option<Vec<i64>> {
    let redis::Value::Array(parts) = value else { return None };
    let Some(redis::Value::BulkString(text)) = parts.get(1) else { return None };
    let text = std::str::from_utf8(text).ok()?;
    (1..=METRICS).map(|place| layout::value(text, Metric(place as u8))).collect()
}

/// Hashes that are being filled. Fields wait until there are some for a hash, or many in all.
struct Hashes<'a> {
    server: &'a mut Server,
    waiting: BTreeMap<String, Vec<(String, String)>>,
    fields: usize,
}

impl<'a> Hashes<'a> {
    fn new(server: &'a mut Server) -> Self {
        Self { server, waiting: BTreeMap::new(), fields: 0 }
    }

    fn add(&mut self, key: String, field: String, value: String) -> Result<()> {
        self.waiting.entry(key).or_default().push((field, value));
        self.fields += 1;
        if self.fields >= PAIRS * COMMANDS { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Result<()> {
        let waiting: Vec<_> = std::mem::take(&mut self.waiting).into_iter().collect();
        self.fields = 0;
        for some in waiting.chunks(COMMANDS) {
            let mut pipeline = redis::pipe();
            for (key, fields) in some {
                for fields in fields.chunks(PAIRS) {
                    let command = pipeline.cmd("HSET").arg(key);
                    for (field, value) in fields {
                        command.arg(field).arg(value);
                    }
                    command.ignore();
                }
            }
            let () = pipeline.query(&mut self.server.connection).context("fill hashes")?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        self.write()
    }
}
