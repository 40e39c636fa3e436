//! Parses docs/moving.md. For each step, stores the code blocks that do the step, and separately the code blocks that
//! undo the step.

use std::fs;

use crate::common::root;

pub const PAGE: &str = "docs/moving.md";

/// One code block of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// Settings to add.
    Toml(String),
    /// SQL statements that an administrator runs.
    Sql(String),
    /// Sample events.
    Json(String),
    /// A shell command.
    Sh(String),
}

#[derive(Clone, Debug, Default)]
pub struct Step {
    pub forward: Vec<Block>,
    pub back: Vec<Block>,
}

/// Texts of the page, each with its replacement in a test. The test changes no other text of the page.
pub type Names = Vec<(&'static str, String)>;

/// Returns the steps in order, with the replacements in `names`.
pub fn steps(names: &Names) -> Vec<Step> {
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let sections = page.split("\n## ").filter(|section| section.starts_with(|first: char| first.is_ascii_digit()));
    let steps: Vec<Step> = sections
        .zip(1..)
        .map(|(section, number)| {
            assert!(section.starts_with(&format!("{number}. ")), "{section}");
            assert!(section.contains("*Check:*") && section.contains("*Way back:*"), "{section}");
            step(section, names)
        })
        .collect();
    assert_eq!(steps.len(), 10);
    steps
}

fn step(section: &str, names: &Names) -> Step {
    let mut step = Step::default();
    let mut is_back = false;
    for (place, part) in section.split("```").enumerate() {
        if place % 2 == 0 {
            is_back |= part.contains("*Way back:*");
            continue;
        }
        let (language, text) = part.split_once('\n').unwrap();
        let text = names.iter().fold(text.to_owned(), |text, (of_page, of_test)| text.replace(of_page, of_test));
        let blocks = if is_back { &mut step.back } else { &mut step.forward };
        match language {
            "toml" => blocks.push(Block::Toml(text)),
            "sql" => blocks.push(Block::Sql(text)),
            "json" => blocks.push(Block::Json(text)),
            "sh" => blocks.extend(text.lines().map(|line| Block::Sh(line.to_owned()))),
            other => panic!("the page has a block of {other}"),
        }
    }
    step
}
