//! By default the daemon counts likes. The tests that the documents name run in this mode, except the tests of a sentence
//! that begins with "If API servers count".

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{read, sources};

/// Returns the names of tests that `text` promises something with. Skips those behind "If API servers count" in the same
/// item of a list, or in the same row of a table.
fn promised(text: &str) -> Vec<String> {
    let is_start = |line: &str| line.starts_with('|') || line.starts_with(|letter: char| letter.is_ascii_digit());
    let mut items: Vec<String> = Vec::new();
    for line in text.lines() {
        match items.last_mut() {
            Some(item) if !is_start(line) => *item += line,
            _ => items.push(line.to_owned()),
        }
    }
    let of_daemon = items.iter().map(|item| item.split("If API servers count").next().unwrap_or_default());
    let spans = of_daemon.flat_map(|item| item.split('`').skip(1).step_by(2));
    spans.filter(|span| span.matches('_').count() >= 3).map(str::to_owned).collect()
}

/// Returns the text of each function with this name.
fn functions<'a>(code: &'a str, name: &str) -> Vec<&'a str> {
    let text = |(start, _)| {
        let line = code[..start].rfind('\n').map_or(0, |end| end + 1);
        let indent: String = code[line..].chars().take_while(|letter| *letter == ' ').collect();
        code[start..].split(&format!("\n{indent}}}")).next().unwrap_or_default()
    };
    code.match_indices(&format!("fn {name}(")).map(text).collect()
}

/// Returns the names of the functions that `text` calls.
fn called(text: &str) -> impl Iterator<Item = &str> {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.split('(').map(move |before| before.rsplit(|letter| !is_word(letter)).next().unwrap_or_default())
}

/// Returns whether the function, or one that it calls in these files, makes API servers count likes.
fn counts_by_api(files: &[&str], name: &str) -> bool {
    let (mut names, mut seen) = (vec![name], BTreeSet::new());
    while let Some(name) = names.pop() {
        if name == "as_api" {
            return true;
        }
        if seen.insert(name) {
            names.extend(files.iter().flat_map(|code| functions(code, name)).flat_map(called));
        }
    }
    false
}

#[test]
fn promises_are_proven_where_the_daemon_counts_the_likes() {
    let code: Vec<(PathBuf, String)> = ["src", "crates", "tests", "torture"].into_iter().flat_map(sources).collect();
    let text = |wanted: &Path| code.iter().find(|(path, _)| path == wanted).map(|(_, text)| text.as_str());
    let architecture = read("ARCHITECTURE.md");
    let invariants = architecture.split("\n## ").find(|part| part.contains("always holds\n")).unwrap();
    let promised = [promised(invariants), promised(&read("docs/guarantees.md"))].concat();
    assert!(promised.len() > 50, "{} names", promised.len());
    for name in promised {
        let (path, _) = code.iter().find(|(_, text)| text.contains(&format!("fn {name}("))).unwrap();
        let files = [path.clone(), path.with_file_name("mod.rs")].map(|path| text(&path).unwrap_or_default());
        assert!(!counts_by_api(&files, &name), "{name} runs with as_api: {}", path.display());
    }
}
