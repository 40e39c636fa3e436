//! Checks that the program and the scripts accept the commands in the documents.

use std::process::Command;

use super::{blocks, documents, root};

/// Splits a line of a shell into commands, and each command into words. A command ends at a pipe, a list's separator, a
/// redirection or a comment.
fn split(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let mut quote = None;
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '|' | ';' | '&' | '(' | ')' | '<' | '>') => {
                words.extend(word.take());
                commands.push(std::mem::take(&mut words));
            }
            (None, '#') if word.is_none() => break,
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    commands.push(words);
    commands
}

/// Returns the commands in the shell blocks of all documents, each with its document's name.
fn commands() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for document in documents() {
        let document = document.to_str().unwrap();
        for block in blocks(document, "sh") {
            let block = block.replace("\\\n", " ");
            let commands = block.lines().flat_map(split);
            // Assignments of variables can precede the command.
            let is_variable = |word: &String| word.contains('=') && !word.starts_with('-');
            let commands = commands.map(|words| words.into_iter().skip_while(is_variable).collect::<Vec<_>>());
            found.extend(commands.filter(|words| !words.is_empty()).map(|words| (document.to_owned(), words)));
        }
    }
    found
}

#[test]
fn the_program_knows_every_command_in_the_documents() {
    let mut tried = 0;
    for (document, command) in commands() {
        let [program, arguments @ ..] = &command[..] else { continue };
        if program != "tallyd" {
            continue;
        }
        let output = Command::new(env!("CARGO_BIN_EXE_tallyd")).args(arguments).arg("--help").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{document}: tallyd {}\n{said}", arguments.join(" "));
        tried += 1;
    }
    assert!(tried > 60, "{tried} commands");
}

#[test]
fn every_script_that_the_documents_call_exists() {
    let mut tried = 0;
    for (document, command) in commands() {
        let program = command[0].as_str();
        let is_script = ["dev/", ".ci/"].iter().any(|folder| program.starts_with(folder));
        assert!(!is_script || root().join(program).exists(), "{document}: there is no {program}");
        tried += usize::from(is_script);
    }
    assert!(tried > 10, "{tried} commands");
}
