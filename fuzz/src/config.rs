//! Fuzzes the configuration: any text must be accepted or rejected, and every problem must name its place.

use std::cell::RefCell;
use std::io::{Seek, Write};

use tallyd_base::config::{examine, parse, parse_pause};
use tempfile::NamedTempFile;

thread_local! {
    static FILE: RefCell<NamedTempFile> = RefCell::new(tempfile::Builder::new().prefix("tallyd-fuzz-").tempfile().expect("a file"));
}

/// The input is the text of a configuration file. After a zero byte, the input contains environment variables, one in
/// each line.
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
        assert!(!error.0.is_empty(), "rejected without a problem");
        for problem in &error.0 {
            let says_where =
                problem.starts_with("fuzz.toml") || names.iter().any(|name| problem.starts_with(name.as_str()));
            assert!(says_where || problem.contains('['), "names no file and no key: {problem}");
        }
    }
    let _ = parse_pause(text);
    // If the configuration reads files of the machine, the remaining checks are skipped.
    if names.is_empty() && !text.contains("file") {
        whole(text);
    }
}

/// Also runs the checks that the types can't express.
fn whole(text: &str) {
    FILE.with_borrow_mut(|file| {
        file.rewind().and_then(|()| file.as_file().set_len(0)).expect("the file can't be emptied");
        file.write_all(text.as_bytes()).expect("the file can't be written");
        if let Err(problems) = examine(file.path()) {
            assert!(!problems.is_empty(), "rejected without a problem");
            for problem in problems {
                assert!(problem.origin.is_some() || problem.key.is_some(), "names no file and no key: {problem}");
            }
        }
    });
}
