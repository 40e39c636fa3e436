//! docs/ is a book in mdBook's format. Checks its table of contents and its length.

use std::collections::BTreeSet;
use std::path::Path;

use super::{documents, read};

/// Returns the paths below docs/ of the book's pages, without the decision records.
fn pages() -> Vec<String> {
    let paths = documents().into_iter().filter_map(|path| Some(path.strip_prefix("docs").ok()?.to_owned()));
    let names = paths.map(|path| path.to_str().unwrap().to_owned());
    names.filter(|name| name != "SUMMARY.md" && !name.starts_with("decisions/0")).collect()
}

/// A page's lines outside code blocks.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    let lines = text.lines().enumerate().map(|(place, line)| (place + 1, line));
    lines.filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

#[test]
fn the_table_of_contents_names_each_page_of_the_book_once() {
    let contents = read("docs/SUMMARY.md");
    let links: Vec<&str> = contents.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    let named: BTreeSet<String> = links.iter().map(|link| (*link).to_owned()).collect();
    assert_eq!(named.len(), links.len(), "a page is named twice");
    assert_eq!(named, pages().into_iter().collect());
}

#[test]
fn every_page_of_the_book_begins_with_its_only_title() {
    for page in pages() {
        let text = read(Path::new("docs").join(&page));
        assert!(text.starts_with("# "), "docs/{page} does not begin with a title");
        let titles = prose(&text).filter(|(_, line)| line.starts_with("# ")).count();
        assert_eq!(titles, 1, "docs/{page}");
    }
}
