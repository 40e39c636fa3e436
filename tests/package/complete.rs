//! Checks the completions with real shells, and the manual pages with groff.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{stderr, stdout};

/// Runs the program without a configuration file.
fn tallyd(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
    command.args(arguments).args(["--config", "/nowhere/config.toml"]).output().unwrap()
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    output.unwrap_or_else(|error| panic!("{program}: {error}: apt-get install it (dev/test does)"))
}

#[test]
fn every_shell_reads_its_completions() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let output = tallyd(&["admin", "completions", shell]);
        assert!(output.status.success(), "{}", stderr(&output));
        let script = folder.path().join(shell);
        fs::write(&script, &output.stdout).unwrap();
        let read = run(shell, &["-n", script.to_str().unwrap()]);
        assert!(read.status.success() && stderr(&read).is_empty(), "{shell}: {}", stderr(&read));
        for word in ["config", "dry-run", "restore"] {
            assert!(stdout(&output).contains(word), "{shell} does not complete {word}");
        }
    }
    assert_eq!(tallyd(&["admin", "completions", "cmd"]).status.code(), Some(64));
}

#[test]
fn bash_completes_a_command_and_its_options() {
    let complete = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let script = format!(
            "source <({} admin completions bash); COMP_WORDS=({line} ''); COMP_CWORD={}; _tallyd tallyd '{}' '{}'; echo ${{COMPREPLY[@]}}",
            env!("CARGO_BIN_EXE_tallyd"),
            words.len() - 1,
            words[words.len() - 1],
            words[words.len().saturating_sub(2)],
        );
        stdout(&run("bash", &["-c", &script])).trim().to_owned()
    };
    assert_eq!(complete("tallyd conf"), "config");
    assert_eq!(complete("tallyd config check --off"), "--offline");
    assert_eq!(complete("tallyd board top --ranking comp"), "competition");
}

/// Returns the words of a page as a terminal shows them. Fails on any warning of groff.
fn rendered(page: &Path) -> String {
    let output = run("groff", &["-man", "-Tascii", "-rLL=120n", "-P-c", "-P-u", "-P-b", "-ww", page.to_str().unwrap()]);
    assert!(output.status.success() && stderr(&output).is_empty(), "{}: {}", page.display(), stderr(&output));
    stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    let output = tallyd(&["admin", "man", "--dir", pages.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(&pages).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = rendered(&path);
        assert!(text.starts_with(&format!("{name}(1)")), "{text}");
        assert!(text.contains(&format!("{name} - ")), "{text}");
        assert!(text.contains("EXIT STATUS 0 done"), "{text}");
        names.push(name);
    }
    // There must be exactly one page for each command in the help.
    let help = stdout(&tallyd(&["--help"]));
    let commands = help.split("Run:").nth(1).unwrap().split("Options:").next().unwrap();
    let commands =
        commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|it| !it.is_empty()));
    for command in commands.filter(|command| *command != "help") {
        assert!(names.contains(&format!("tallyd-{command}")), "no page for {command}: {names:?}");
    }
    assert!(
        names.contains(&"tallyd-board-top".to_owned()) && !names.iter().any(|name| name.contains("help")),
        "{names:?}"
    );
}

#[test]
fn the_page_of_the_program_tells_of_files_signals_and_the_environment() {
    let output = tallyd(&["admin", "man"]);
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("tallyd.1");
    fs::write(&page, &output.stdout).unwrap();
    let text = rendered(&page);
    for part in ["SIGHUP", "/etc/tallyd/config.toml", "TALLYD__SECTION__KEY", "tallyd-config(1)", "--reconcile-once"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}
