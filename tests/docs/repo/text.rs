//! The sentences in documents and sources: paragraphs of Markdown, comments, and strings.

/// Lines that belong together, each with its number. Code spans are replaced by one word, links by their text.
pub type Paragraph = Vec<(usize, String)>;

/// Collects lines into paragraphs.
#[derive(Default)]
struct Collected {
    done: Vec<Paragraph>,
    open: Paragraph,
}

impl Collected {
    fn push(&mut self, line: usize, text: &str) {
        self.open.push((line, plain(text)));
    }

    fn end(&mut self) {
        if !self.open.is_empty() {
            self.done.push(std::mem::take(&mut self.open));
        }
    }

    fn alone(&mut self, line: usize, text: &str) {
        self.end();
        self.push(line, text);
        self.end();
    }

    fn finish(mut self) -> Vec<Paragraph> {
        self.end();
        self.done
    }
}

/// Replaces code spans by `X`, and links by their text.
fn plain(text: &str) -> String {
    let mut kept = String::new();
    for (place, part) in text.split('`').enumerate() {
        kept.push_str(if place % 2 == 0 { part } else { "X" });
    }
    let mut found = String::new();
    let mut rest = kept.as_str();
    while let Some((before, link)) = rest.split_once("](") {
        found.push_str(before);
        let Some((_, after)) = link.split_once(')') else { break };
        rest = after;
    }
    found.push_str(rest);
    found.replace(['[', ']', '*'], "")
}

/// Returns the text of a list's item without the item's mark.
fn item(line: &str) -> Option<&str> {
    let number = line.trim_start_matches(|letter: char| letter.is_ascii_digit());
    let numbered = if number.len() < line.len() { number.strip_prefix(". ") } else { None };
    numbered.or_else(|| line.strip_prefix("* ")).or_else(|| line.strip_prefix("- "))
}

pub fn of_markdown(text: &str) -> Vec<Paragraph> {
    let mut found = Collected::default();
    let mut last = 0;
    for (line, text) in super::book::prose(text) {
        let trimmed = text.trim();
        if line != last + 1 {
            found.end();
        }
        last = line;
        if trimmed.is_empty() || trimmed.starts_with(['#', '<', '!']) {
            found.end();
        } else if let Some(row) = trimmed.strip_prefix('|') {
            row.split('|').for_each(|cell| found.alone(line, cell.trim()));
        } else if let Some(item) = item(trimmed) {
            found.end();
            found.push(line, item);
        } else {
            found.push(line, trimmed);
        }
    }
    found.finish()
}

/// The texts of commands and options, as `--help` prints them.
pub fn of_help(text: &str) -> Vec<Paragraph> {
    let mut found = Collected::default();
    for (place, text) in text.lines().enumerate() {
        let trimmed = text.trim();
        // Manual pages repeat the texts.
        if trimmed.is_empty() || trimmed.starts_with(['$', '-', '[', '.', '\\', '"']) {
            found.end();
        } else if let Some((_, about)) = trimmed.split_once("  ") {
            found.end();
            found.push(place + 1, about.trim());
        } else {
            found.push(place + 1, trimmed);
        }
    }
    found.finish()
}

/// Returns the comments and the strings of a source file. Comments begin with `mark`, and strings have three words or
/// more.
pub fn of_code(text: &str, mark: &str) -> Vec<Paragraph> {
    let (mut found, mut is_code) = (Collected::default(), false);
    for (place, text) in text.lines().enumerate() {
        let (line, trimmed) = (place + 1, text.trim());
        let Some(comment) = trimmed.strip_prefix(mark) else {
            found.end();
            strings(trimmed).into_iter().filter(|it| is_sentence(it)).for_each(|it| found.alone(line, it));
            continue;
        };
        let indented = comment.trim_start_matches(['/', '!', '-', '#']);
        let comment = indented.trim();
        is_code ^= comment.starts_with("```");
        // These comments are diagrams, tables, or settings and statements that are switched off.
        let is_aligned = comment.contains("  ") || comment.contains("->") || indented.starts_with("   ");
        let is_off = mark == "#" && !indented.starts_with(' ');
        if is_code || comment.is_empty() || is_off || comment.starts_with(['|', '#']) {
            found.end();
        } else if is_aligned {
            comment.split("  ").filter(|it| is_sentence(it)).for_each(|it| found.alone(line, it.trim()));
        } else if let Some(item) = item(comment) {
            found.end();
            found.push(line, item);
        } else {
            found.push(line, comment);
        }
    }
    found.finish()
}

/// Tells whether a text is for people: it has three words or more, and is no code.
fn is_sentence(text: &str) -> bool {
    text.matches(' ').count() > 1 && !["SELECT ", "INSERT ", "=>", "->"].iter().any(|code| text.contains(code))
}

/// Returns the texts between double quotes on a line.
fn strings(line: &str) -> Vec<&str> {
    let (mut found, mut begin, mut is_escaped) = (Vec::new(), None, false);
    for (place, letter) in line.char_indices() {
        match (letter, begin) {
            _ if is_escaped => is_escaped = false,
            ('\\', Some(_)) => is_escaped = true,
            ('"', None) => begin = Some(place + 1),
            ('"', Some(from)) => {
                found.push(&line[from..place]);
                begin = None;
            }
            _ => {}
        }
    }
    found
}
