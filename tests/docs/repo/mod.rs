//! Checks of the repository itself: the sample configuration, the unit file and the documents agree with the code.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod book;
mod card;
mod commands;
mod decisions;
mod documents;
mod events;
mod floors;
mod modes;
mod project;
mod reference;
mod scripts;
mod settings;
mod unit;

use std::fs;
use std::path::{Path, PathBuf};

use tallyd_base::config::{self, Config};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the paths of the documents.
fn documents() -> Vec<PathBuf> {
    let at_the_root = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"];
    let mut found: Vec<PathBuf> = at_the_root.into_iter().map(PathBuf::from).collect();
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            if root().join(&path).is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns all Rust files under a folder, with their text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push((path.clone(), fs::read_to_string(path).unwrap()));
            }
        }
    }
    found
}

/// Returns the rows of the table under a heading. The cells come without their backticks.
fn table(document: &str, heading: &str) -> Vec<Vec<String>> {
    let text = read(document);
    let (_, after) =
        text.split_once(&format!("# {heading}\n")).unwrap_or_else(|| panic!("{document} has no {heading}"));
    let lines = after.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect();
    lines.skip(2).map(cells).collect()
}

/// Returns a document's code blocks in that language.
fn blocks(document: &str, language: &str) -> Vec<String> {
    let text = read(document);
    let opening = format!("```{language}\n");
    text.split(&opening).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

fn first_column(rows: &[Vec<String>]) -> Vec<&str> {
    rows.iter().map(|row| row[0].as_str()).collect()
}

fn parsed(text: &str) -> Result<Config, String> {
    config::parse(text, "config.toml", []).map_err(|error| error.to_string())
}

/// Returns the text of config.toml. Settings that are commented out in the file are turned on in this text.
fn with_examples() -> String {
    let setting = |line: &str| {
        line.strip_prefix('#').filter(|rest| !rest.is_empty() && !rest.starts_with([' ', ':'])).map(str::to_owned)
    };
    read("config.toml").lines().map(|line| setting(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}
