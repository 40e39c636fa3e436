//! The rules for Prometheus, the dashboard for Grafana, and their manual. Every alert is tested with sample values, has
//! a section in the manual, and uses only metrics that the daemon exports.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod alerts;
mod dashboard;
mod expressions;
mod metrics;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn path(of: &str) -> PathBuf {
    root().join(of)
}

fn read(of: &str) -> String {
    fs::read_to_string(path(of)).unwrap_or_else(|error| panic!("{of}: {error}"))
}

fn yaml(of: &str) -> Value {
    serde_saphyr::from_str(&read(of)).unwrap_or_else(|error| panic!("{of}: {error}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no list {key} in {value}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no text {key} in {value}"))
}

/// Runs promtool. Returns promtool's output if promtool finds a problem.
fn promtool(arguments: &[&str], file: &Path) -> Result<(), String> {
    let fetched = path("target/tools/promtool");
    let output = Command::new(if fetched.exists() { fetched } else { PathBuf::from("promtool") })
        .args(arguments)
        .arg(file)
        .output()
        .expect("promtool can't be run: dev/test fetches it into target/tools");
    let said = [output.stdout, output.stderr].concat();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&said).into_owned()) }
}
