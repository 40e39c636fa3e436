//! docs/ is a book in mdBook's format. These tests check the book's table of contents and length.

use std::collections::BTreeSet;
use std::path::Path;

use super::{documents, read};

/// The maximum numbers of words in all pages together and in one page. The words in code blocks and decisions are not
/// counted.
const BOOK_WORDS_MAX: usize = 35_000;
const PAGE_WORDS_MAX: usize = 3_500;

/// Returns the paths, below docs/, of all pages of the book except the records of decisions.
fn pages() -> Vec<String> {
    let paths = documents().into_iter().filter_map(|path| Some(path.strip_prefix("docs").ok()?.to_owned()));
    let names = paths.map(|path| path.to_str().unwrap().to_owned());
    names.filter(|name| name != "SUMMARY.md" && !name.starts_with("decisions/0")).collect()
}

/// Returns a page's lines outside code blocks.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    let lines = text.lines().enumerate().map(|(place, line)| (place + 1, line));
    lines.filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the number of words in a line. A bar between two cells of a table is not a word.
fn words_of(line: &str) -> usize {
    line.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count()
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
        assert!(text.starts_with("# "), "docs/{page} begins with no title");
        let titles = prose(&text).filter(|(_, line)| line.starts_with("# ")).count();
        assert_eq!(titles, 1, "docs/{page}");
    }
}

#[test]
fn the_book_and_each_of_its_pages_are_short_enough() {
    let words = |page: &String| {
        let text = read(Path::new("docs").join(page));
        prose(&text).map(|(_, line)| words_of(line)).sum::<usize>()
    };
    let counted = pages().into_iter().filter(|page| !page.starts_with("decisions/"));
    let pages: Vec<(String, usize)> = counted.map(|page| (page.clone(), words(&page))).collect();
    let long: Vec<&(String, usize)> = pages.iter().filter(|(_, words)| *words > PAGE_WORDS_MAX).collect();
    assert!(long.is_empty(), "over {PAGE_WORDS_MAX} words: {long:?}");
    let all: usize = pages.iter().map(|(_, words)| words).sum();
    assert!(all <= BOOK_WORDS_MAX, "{all} words");
}
