//! The layouts of counters in Redis: the keys of each layout, and the code that fills and reads it.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use redis::{ConnectionLike, Pipeline};
use serde::Serialize;
use tallyd_base::config::Config;
use tallyd_core::model::{Kind, Metric, Target, TargetId};
use tallyd_redis::keys::{Keys, LOADED};
use tallyd_redis::layout::{self, Form};

use crate::counts::Counts;
use crate::server::Server;

/// The names of each target's counters.
const NAMES: [&str; METRICS] = ["like", "comment", "forward", "favor"];

/// The number of counters of each target.
pub const METRICS: usize = 4;

/// Targets of a page.
const PAGE: usize = 20;

/// Number of fields in a bucket, as in config.toml.
const BUCKET_FIELDS: f64 = 122.0;

/// Maximum number of pairs that are collected before they are sent.
const PAIRS: usize = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// A string for each counter: counter:42:like.
    String,
    /// A hash as articles on this layout describe it: the key is the low 9 bits of the id, the field is the id.
    Articles,
    /// The layout of the articles without their mistake: the key of a hash is id >> 9, the field is id & 511.
    Corrected,
    /// A hash for each target (for example counter:video:42), with a field for each counter.
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

    /// Returns the key and the field of a counter. A string has no field.
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
        let mut strings = Filling::new("MSET", server);
        for (id, values) in counts.iter() {
            for (metric, value) in NAMES.iter().zip(values) {
                // For strings, one command sets the values of any keys.
                strings.add("", &self.place(*id, metric).0, &value.to_string())?;
            }
        }
        strings.write()
    }

    /// For hashes, one command sets several fields of one hash.
    fn load_hashes(self, counts: &Counts, server: &mut Server) -> Result<()> {
        let mut hashes = Filling::new("HSET", server);
        for (id, values) in counts.iter() {
            for (metric, value) in NAMES.iter().zip(values) {
                let (key, field) = self.place(*id, metric);
                hashes.add(&key, &field.unwrap_or_default(), &value.to_string())?;
            }
        }
        hashes.write()
    }

    /// Reads pages as clients do, and compares the values with the stored counts.
    pub fn check(self, counts: &Counts, server: &mut Server) -> Result<()> {
        for seed in 0..50 {
            let page = counts.page(seed, PAGE);
            let found: Vec<redis::Value> = self.read(counts, &page).query(&mut server.connection)?;
            let read: Vec<i64> = match self {
                Self::Packed => found.iter().filter_map(packed_numbers).flatten().collect(),
                _ => found.iter().flat_map(numbers).collect(),
            };
            let expected: Vec<i64> = page.iter().flat_map(|(_, values)| values.map(i64::from)).collect();
            ensure!(read == expected, "{} has other values", self.name());
        }
        Ok(())
    }

    /// Returns the pipeline that reads a page.
    fn read(self, counts: &Counts, page: &[(u64, [u32; METRICS])]) -> Pipeline {
        let mut pipeline = redis::pipe();
        for (id, _) in page {
            match self {
                Self::Packed => {
                    pipeline.cmd("HMGET").arg(bucket_key(&counts.keys, *id)).arg(LOADED).arg(*id);
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

    /// Returns pipelines that read pages. Each round reads different targets.
    pub fn pages(self, counts: &Counts, round: u64, pages: u64) -> Vec<Pipeline> {
        (0..pages).map(|page| self.read(counts, &counts.page(1_000 + round * pages + page, PAGE))).collect()
    }

    /// Returns pipelines that read the same pages with MGET. Empty if the layout has no strings.
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

/// Returns tallyd's keys. The number of buckets is the number that config.toml recommends.
pub fn keys(targets: u64) -> Keys {
    let Config { redis, metrics, .. } = Config::default();
    let bucket_bits = (targets as f64 / BUCKET_FIELDS).log2().round().max(0.0) as u8;
    Keys::new(&redis.key_prefix, &metrics, layout::Layout { form: Form::Packed, bucket_bits, template: None })
}

fn target(id: u64) -> Target {
    Target { kind: Kind(1), id: TargetId(id) }
}

fn bucket_key(keys: &Keys, id: u64) -> String {
    keys.counters("video", keys.bucket(target(id)))
}

/// Writes the counters in the format of lua/like.lua, and marks the buckets as loaded.
fn load_packed(counts: &Counts, server: &mut Server) -> Result<()> {
    let keys = &counts.keys;
    let mut hashes = Filling::new("HSET", server);
    for bucket in 0..keys.buckets() {
        hashes.add(&keys.counters("video", bucket), LOADED, "1:0")?;
    }
    for (id, values) in counts.iter() {
        let text = values.map(|value| value.to_string()).join(",");
        hashes.add(&bucket_key(keys, *id), &id.to_string(), &text)?;
    }
    hashes.write()
}

/// Returns the counts in an answer of Redis.
fn numbers(value: &redis::Value) -> Vec<i64> {
    match value {
        redis::Value::Array(values) => values.iter().flat_map(numbers).collect(),
        redis::Value::BulkString(text) => {
            std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// Parses the answer to an HMGET command for the field `_` and an id, as tallyd does. Returns the counts.
fn packed_numbers(value: &redis::Value) -> Option<Vec<i64>> {
    let redis::Value::Array(parts) = value else { return None };
    let Some(redis::Value::BulkString(text)) = parts.get(1) else { return None };
    let text = std::str::from_utf8(text).ok()?;
    (1..=METRICS).map(|place| layout::value(text, Metric(place as u8))).collect()
}

/// The pairs of keys that are being filled, in the format of Redis's protocol. When there are many pairs, one command
/// for each hash is sent.
struct Filling<'a> {
    command: &'static str,
    server: &'a mut Server,
    waiting: HashMap<String, Waiting>,
    pairs: usize,
}

/// The pairs of one hash.
#[derive(Default)]
struct Waiting {
    words: Vec<u8>,
    pairs: usize,
}

impl<'a> Filling<'a> {
    fn new(command: &'static str, server: &'a mut Server) -> Self {
        Self { command, server, waiting: HashMap::new(), pairs: 0 }
    }

    /// Adds a pair to the command for `key`. If `key` is empty, adds the pair to a command without a key (MSET).
    fn add(&mut self, key: &str, field: &str, value: &str) -> Result<()> {
        // Most hashes already have an entry. Only a new hash needs a copy of its name.
        let waiting = match self.waiting.get_mut(key) {
            Some(waiting) => waiting,
            None => self.waiting.entry(key.to_owned()).or_default(),
        };
        word(&mut waiting.words, field);
        word(&mut waiting.words, value);
        waiting.pairs += 1;
        self.pairs += 1;
        if self.pairs >= PAIRS { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Result<()> {
        let (mut bytes, commands) = (Vec::new(), self.waiting.len());
        for (key, Waiting { words, pairs }) in self.waiting.drain() {
            let own = if key.is_empty() { 1 } else { 2 };
            bytes.extend_from_slice(format!("*{}\r\n", own + 2 * pairs).as_bytes());
            word(&mut bytes, self.command);
            if !key.is_empty() {
                word(&mut bytes, &key);
            }
            bytes.extend_from_slice(&words);
        }
        self.pairs = 0;
        if commands > 0 {
            self.server.connection.req_packed_commands(&bytes, 0, commands).context("fill a server")?;
        }
        Ok(())
    }
}

fn word(bytes: &mut Vec<u8>, word: &str) {
    bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
}
