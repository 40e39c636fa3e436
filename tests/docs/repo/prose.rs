//! Checks the project's English: no banned words, no long sentences, no sentences that begin with a relative clause.
//! docs/development.md has the rules.

use std::fs;
use std::path::Path;

use super::text::{Paragraph, of_code, of_help, of_markdown};
use super::{read, root};

/// The maximum length of a sentence in words, and of a document's line in characters. A table's row can have any
/// length.
const WORDS_MAX: usize = 35;
const LINE_MAX: usize = 160;

/// Words that make readers read a sentence twice, each with the words to write instead. A bar separates forms of one
/// word.
const BANNED: [(&str, &str); 32] = [
    ("anew", "again"),
    ("at once", "immediately, or at the same time"),
    ("by itself|by themselves", "automatically"),
    ("for good", "permanently"),
    ("on the way|on its way|on their way", "in flight"),
    ("set aside|sets aside|setting aside", "dead-letter"),
    ("is away|are away|was away|were away|be away|been away", "unreachable"),
    ("go on|goes on|going on|went on|gone on", "continue"),
    ("stand still|stands still|stood still", "stall"),
    ("is at work|are at work", "is running"),
    ("make up for|makes up for|made up for|making up for", "recover"),
    ("whoever|whomever|whosoever", "the role, such as a client"),
    ("nobody", "the role, such as no reader"),
    ("one's own", "custom"),
    ("thrice", "three times"),
    ("shall", "should, or must"),
    ("mend|mends|mended|mending", "fix"),
    ("told", "reported"),
    ("rung", "triggered"),
    ("come of it|comes of it|came of it", "a result"),
    ("orderly", "clean"),
    ("give back|gives back|given back|gave back", "requeue, or release"),
    ("beforehand", "first"),
    ("lest", "so that ... not"),
    ("hence", "so"),
    ("thereof|therein|thereby", "of it, in it"),
    ("whilst", "while"),
    ("for want of", "without"),
    ("none where", "no ... if"),
    ("so many of", "that many"),
    ("as it stands", "unchanged"),
    ("of one's", "custom"),
];

/// A question can begin with these words, but a statement must not.
const BEGINNINGS: [&str; 10] = ["What", "Who", "Whose", "Whom", "Whoever", "Whatever", "That", "Those", "Of", "None"];

/// Quoted texts that may contain banned words: messages of MySQL, and names of accounts.
const QUOTED: [&str; 3] = ["has gone away", "\\\"nobody\\\"", "--reuid nobody"];

/// Returns the word in lower case, without the marks around it. The name of a variable in a format is not a word.
fn plain(word: &str) -> String {
    if word.contains('{') {
        return String::new();
    }
    word.trim_matches(|letter: char| !letter.is_alphanumeric()).to_lowercase()
}

/// Returns the banned words in a text, each with its replacement.
fn banned(text: &str) -> Vec<String> {
    let text = QUOTED.iter().fold(text.to_owned(), |text, quoted| text.replace(quoted, ""));
    let words: Vec<String> = text.split_whitespace().map(plain).collect();
    let mut found = Vec::new();
    for (forms, instead) in BANNED {
        for form in forms.split('|') {
            let phrase: Vec<&str> = form.split(' ').collect();
            if words.windows(phrase.len()).any(|window| window == phrase) {
                found.push(format!("\"{form}\": write {instead}"));
            }
        }
    }
    found
}

/// Returns the sentences of a paragraph, each with the number of its first line.
fn sentences(paragraph: &Paragraph) -> Vec<(usize, String)> {
    let (mut found, mut open) = (Vec::new(), None::<(usize, String)>);
    for (line, text) in paragraph {
        let mut words = text.split_whitespace().peekable();
        while let Some(word) = words.next() {
            let (_, sentence) = open.get_or_insert_with(|| (*line, String::new()));
            sentence.push_str(if sentence.is_empty() { "" } else { " " });
            sentence.push_str(word);
            let ends = word.trim_end_matches([')', '"', '*', '_', '\'']).ends_with(['.', '!', '?', ':', ';']);
            let begins = words.peek().is_none_or(|next| !next.starts_with(|it: char| it.is_lowercase()));
            if ends && begins {
                found.extend(open.take());
            }
        }
    }
    found.extend(open);
    found
}

/// Returns each fault in the paragraphs together with its line number.
fn faults(paragraphs: &[Paragraph]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for paragraph in paragraphs {
        for (line, sentence) in sentences(paragraph) {
            found.extend(banned(&sentence).into_iter().map(|fault| (line, fault)));
            let words = sentence.split(' ').filter(|word| word.chars().any(char::is_alphanumeric)).count();
            if words > WORDS_MAX {
                found.push((line, format!("a sentence of {words} words")));
            }
            let first = sentence.split(' ').next().unwrap_or_default();
            if BEGINNINGS.contains(&first) && !sentence.ends_with('?') {
                found.push((line, format!("a sentence begins with {first}")));
            }
        }
    }
    found
}

/// All files of the repository, sorted by path. Folders of builds and packages are left out.
fn files() -> Vec<String> {
    let left_out = ["target", ".git", "node_modules", "__pycache__"];
    let (mut found, mut folders) = (Vec::new(), vec![root().to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                let name = path.file_name().unwrap();
                if !left_out.iter().any(|known| name == *known) {
                    folders.push(path);
                }
            } else {
                found.push(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.sort_unstable();
    found
}

fn mark_of(file: &str) -> Option<&'static str> {
    let name = Path::new(file);
    let is_script = ["dev/", ".ci/", "packaging/deb/"].iter().any(|folder| file.starts_with(folder));
    match name.extension().and_then(|extension| extension.to_str()) {
        // These files are data, or contain the list of banned words.
        _ if file.starts_with("fuzz/corpus") || file.ends_with("repo/prose.rs") => None,
        // A copy of a published crate.
        _ if file.starts_with("crates/lossy-strings/src") => None,
        // A step that has run must never change, not even its comments, because the database stores its checksum.
        _ if file.starts_with("migrations/") => None,
        Some("rs" | "js" | "mjs" | "go") => Some("//"),
        Some("lua" | "sql") => Some("--"),
        Some("py" | "sh" | "toml" | "yml" | "yaml" | "service") => Some("#"),
        None if is_script => Some("#"),
        _ => None,
    }
}

#[test]
fn comments_and_messages_are_in_plain_words() {
    let mut found = Vec::new();
    for file in files() {
        let Some(mark) = mark_of(&file) else { continue };
        let faults = faults(&of_code(&read(&file), mark));
        found.extend(faults.into_iter().map(|(line, fault)| format!("{file}:{line}: {fault}")));
    }
    assert!(found.is_empty(), "{} faults\n{}", found.len(), found.join("\n"));
}

#[test]
fn documents_are_in_plain_words_and_short_lines() {
    let mut found = Vec::new();
    for file in files().into_iter().filter(|file| file.ends_with(".md")) {
        let text = read(&file);
        let mut faults = faults(&of_markdown(&text));
        for (number, line) in super::book::prose(&text) {
            let length = line.chars().count();
            if length > LINE_MAX && !line.trim_start().starts_with(['|', '!']) {
                faults.push((number, format!("a line of {length} characters")));
            }
        }
        found.extend(faults.into_iter().map(|(line, fault)| format!("{file}:{line}: {fault}")));
    }
    assert!(found.is_empty(), "{} faults\n{}", found.len(), found.join("\n"));
}

/// Forms of "to be", after which a participle makes a passive.
const BEING: [&str; 6] = ["is", "are", "was", "were", "be", "been"];
const PARTICIPLES: [&str; 9] = ["shown", "written", "read", "sent", "kept", "made", "taken", "given", "found"];

/// These words begin a subordinate clause, which is allowed to be passive: "dead letters that were replayed".
const SUBORDINATE: [&str; 14] = [
    "that", "which", "who", "whose", "if", "when", "while", "until", "because", "after", "before", "to", "could",
    "where",
];

/// The first passive of a sentence's main clause.
fn passive(sentence: &str) -> Option<String> {
    let words: Vec<String> = sentence.split(' ').map(plain).collect();
    let main: Vec<&String> = words.iter().take_while(|word| !SUBORDINATE.contains(&&***word)).collect();
    let is_passive = |pair: &&[&String]| {
        BEING.contains(&&**pair[0]) && (pair[1].ends_with("ed") || PARTICIPLES.contains(&&**pair[1]))
    };
    main.windows(2).find(is_passive).map(|pair| format!("{} {}", pair[0], pair[1]))
}

#[test]
fn help_texts_order_and_are_not_passive() {
    let mut found = Vec::new();
    for paragraph in of_help(&read("tests/it/cli/commands.txt")) {
        for (line, sentence) in sentences(&paragraph) {
            found.extend(passive(&sentence).map(|passive| format!("{line}: \"{passive}\" is passive: {sentence}")));
            found.extend(banned(&sentence).into_iter().map(|fault| format!("{line}: {fault}")));
        }
    }
    assert!(found.is_empty(), "tests/it/cli/commands.txt\n{}", found.join("\n"));
}

#[test]
fn the_check_finds_each_kind_of_fault() {
    let text =
        "The daemon goes\non, and whoever reads\nis told. What is gone, is gone. What is it?\n\nOne `at once` is code.";
    let found: Vec<String> =
        faults(&of_markdown(text)).into_iter().map(|(line, fault)| format!("{line} {fault}")).collect();
    assert_eq!(
        found,
        [
            "1 \"goes on\": write continue",
            "1 \"whoever\": write the role, such as a client",
            "1 \"told\": write reported",
            "3 a sentence begins with What"
        ]
    );
    let long = ["word"; WORDS_MAX + 1].join(" ") + ".";
    assert_eq!(faults(&of_code(&format!("let a = 1;\n// {long}"), "//")), [(2, "a sentence of 36 words".to_owned())]);
}
