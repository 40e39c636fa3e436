//! Runs the fuzz targets with a stable compiler. The inputs are the targets' corpora and mutations of these corpora,
//! and a seed determines the mutations. `dev/fuzz` runs more inputs, and uses libFuzzer if it is installed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

pub(crate) mod mutate;
#[path = "../../../fuzz/src/lib.rs"]
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::Dice;
use mutate::Mutations;

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Reads a number from an environment variable. Developers use these variables to choose the number of mutations or
/// the duration.
fn asked(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} must be a number, but is {text}")))
}

/// Calls the target with each file of the corpus, and with `runs` mutations of these files. An environment variable can
/// change the number of mutations.
fn fuzz(name: &str, runs: u64, target: fn(&[u8])) {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder("fuzz/corpus").join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort_unstable();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(corpus.len() > 3, "{name} has {} files", corpus.len());
    for input in &corpus {
        tried(name, input, target);
    }
    let minutes = asked("TALLYD_FUZZ_MINUTES");
    let runs = asked("TALLYD_FUZZ_RUNS").unwrap_or(if minutes.is_some() { u64::MAX } else { runs });
    let (began, mut done) = (Instant::now(), 0);
    let until = minutes.map(|minutes| began + Duration::from_secs(minutes * 60));
    let mut mutations = Mutations::of(&corpus, Dice::of_run(1));
    while done < runs && until.is_none_or(|until| done % 1_000 != 0 || Instant::now() < until) {
        tried(name, mutations.next(), target);
        done += 1;
    }
    println!("{name}: tried {done} inputs in {:.1} s", began.elapsed().as_secs_f64());
}

/// Runs one input, and saves the input if the target panics.
fn tried(name: &str, input: &[u8], target: fn(&[u8])) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(input))) else { return };
    let path = folder("fuzz/artifacts").join(name).join("found-by-the-suite");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, input).unwrap();
    eprintln!("{name}: {} bytes, kept in {}: {}", input.len(), path.display(), input.escape_ascii());
    resume_unwind(panic);
}

#[test]
fn fuzzed_event_bodies_that_are_taken_are_json_and_mean_what_they_say() {
    fuzz("event", 30_000, targets::event);
}

#[test]
fn fuzzed_dead_letters_can_be_kept_and_shown_whatever_they_hold() {
    fuzz("dead", 10_000, targets::dead);
}

#[test]
fn fuzzed_config_is_read_or_its_faults_are_named() {
    fuzz("config", 800, targets::config);
}

#[test]
fn fuzzed_score_is_packed_exactly_and_in_order_or_refused() {
    fuzz("score", 30_000, targets::score);
}

#[test]
fn fuzzed_layout_and_key_names_are_read_back_or_refused() {
    fuzz("layout", 20_000, targets::layout);
}

#[test]
fn fuzzed_redis_replies_are_read_or_refused() {
    fuzz("redis_replies", 15_000, targets::redis_replies);
}

#[test]
fn fuzzed_bodies_of_a_site_are_mapped_or_refused_with_a_sentence() {
    fuzz("map", 30_000, targets::map);
}
