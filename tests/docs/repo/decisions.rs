//! Checks the form of the decision records and their index.

use std::fs;

use super::{read, root};

const FOLDER: &str = "docs/decisions";

/// The maximum length of a record, in words: about one page.
const WORDS_MAX: usize = 260;

/// Returns the sorted names of the records' files.
fn records() -> Vec<String> {
    let names = fs::read_dir(root().join(FOLDER)).unwrap().map(|entry| entry.unwrap().file_name());
    let mut records: Vec<String> =
        names.map(|name| name.into_string().unwrap()).filter(|name| name != "README.md").collect();
    records.sort_unstable();
    records
}

#[test]
fn the_index_of_decisions_lists_every_record_with_its_title() {
    let titles: Vec<String> = records()
        .iter()
        .map(|name| {
            let text = read(format!("{FOLDER}/{name}"));
            let (number, title) = text.lines().next().unwrap()[2..].split_once(". ").unwrap();
            format!("| [{number}]({name}) | {title} |")
        })
        .collect();
    let index = read(format!("{FOLDER}/README.md"));
    let listed: Vec<&str> = index.lines().filter(|line| line.starts_with("| [")).collect();
    assert_eq!(listed, titles);
}

#[test]
fn every_decision_has_its_number_and_its_parts_on_one_page() {
    for (place, name) in records().iter().enumerate() {
        let text = read(format!("{FOLDER}/{name}"));
        let number = format!("{:04}", place + 1);
        assert!(name.starts_with(&format!("{number}-")), "{name} is not {number}");
        assert!(text.starts_with(&format!("# {number}. ")), "{name}: its title does not begin with {number}");
        for part in ["Context", "Options", "Decision", "Tests"] {
            assert!(text.contains(&format!("\n**{part}.** ")), "{name} has no {part}");
        }
        let words = text.split_whitespace().count();
        assert!(words <= WORDS_MAX, "{name} has {words} words");
    }
}
