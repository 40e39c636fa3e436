//! The configuration: any text is read or refused, and whatever is wrong says where.

use std::cell::RefCell;
use std::io::{Seek, Write};

use tallyd::config::{examine, parse, parse_pause};
use tempfile::NamedTempFile;

thread_local! {
    static FILE: RefCell<NamedTempFile> = RefCell::new(tempfile::Builder::new().prefix("tallyd-fuzz-").tempfile().expect("a file"));
}

/// A file's text; after a zero variables of the environment, one in each line.
pub fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (text, variables) = text.split_once('\0').unwrap_or((&text, ""));
    let variables: Vec<(String, String)> = variables
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (format!("TALLYD__{name}"), value.to_owned()))
        .collect();
    let names: Vec<String> = variables.iter().map(|(name, _)| name.clone()).collect();
    if let Err(error) = parse(text, "fuzz.toml", variables) {
        assert!(!error.0.is_empty(), "refused, and nothing is wrong");
        for problem in &error.0 {
            let says_where =
                problem.starts_with("fuzz.toml") || names.iter().any(|name| problem.starts_with(name.as_str()));
            assert!(says_where || problem.contains('['), "it does not say where: {problem}");
        }
    }
    let _ = parse_pause(text);
    // Files are the machine's.
    if names.is_empty() && !text.contains("file") {
        whole(text);
    }
}

/// With the checks of what the types can't say.
fn whole(text: &str) {
    FILE.with_borrow_mut(|file| {
        file.rewind().and_then(|()| file.as_file().set_len(0)).expect("the file is emptied");
        file.write_all(text.as_bytes()).expect("the file is written");
        if let Err(problems) = examine(file.path()) {
            assert!(!problems.is_empty(), "refused, and nothing is wrong");
            for problem in problems {
                assert!(problem.origin.is_some() || problem.key.is_some(), "it does not say where: {problem}");
            }
        }
    });
}
