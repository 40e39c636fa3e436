//! Tests the help and the manual page of each command, and `tallyd` without a command.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Alone, assert_exits};
use crate::common::{World, stderr, stdout};

/// If this environment variable is set, the test writes the snapshot file instead of comparing it.
const UPDATE: &str = "TALLYD_UPDATE_SNAPSHOT";

/// Returns all commands in the order of the help. Each command comes before its subcommands.
fn commands(alone: &Alone, above: &[String]) -> Vec<Vec<String>> {
    let help = help(alone, above);
    // Under several headings. Options and arguments begin with other characters, and descriptions are further right.
    let lines = help.lines().filter_map(|line| line.strip_prefix("  "));
    let names = lines.filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    let names = names.filter_map(|line| line.split(' ').next());
    let below =
        names.filter(|name| *name != "help").flat_map(|name| commands(alone, &[above, &[name.to_owned()]].concat()));
    std::iter::once(above.to_vec()).chain(below).collect()
}

fn help(alone: &Alone, command: &[String]) -> String {
    let words: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
    let output = alone.run(&words);
    assert_exits(&output, 0, "");
    stdout(&output)
}

#[test]
fn the_help_and_manual_of_every_command_are_as_noted() {
    let alone = Alone::new("");
    let pages = alone.folder.path().join("man1");
    assert_exits(&alone.run(&["admin", "man", "--dir", pages.to_str().unwrap()]), 0, "");
    let mut text = String::new();
    for command in commands(&alone, &[]) {
        let name = [&["tallyd".to_owned()], command.as_slice()].concat();
        let page = fs::read_to_string(pages.join(format!("{}.1", name.join("-")))).unwrap();
        // The removed lines only define the apostrophe, and the manual page repeats these lines in each section.
        let lines = page.lines().filter(|line| !line.starts_with(".ie") && !line.starts_with(".el"));
        let page = lines.collect::<Vec<_>>().join("\n").replace(env!("CARGO_PKG_VERSION"), "VERSION");
        text += &format!("$ {} --help\n{}\n$ man {}\n{page}\n", name.join(" "), help(&alone, &command), name.join("-"));
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/cli/commands.txt");
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&file, text).unwrap();
        return;
    }
    let noted = fs::read_to_string(&file).unwrap_or_default();
    let differs = noted.lines().zip(text.lines()).find(|(noted, said)| noted != said);
    assert!(noted == text, "{differs:?}: run the test with {UPDATE}=1, then look at git diff {}", file.display());
}

/// Runs the program in a terminal.
fn typed(alone: &Alone, arguments: &str) -> (Option<i32>, String) {
    let line = format!("{} --config {} {arguments}", env!("CARGO_BIN_EXE_tallyd"), alone.config().display());
    let output = Command::new("script").args(["-qec", &line, "/dev/null"]).stdin(Stdio::null()).output();
    let output = output.expect("script can't be run: apt-get install bsdutils");
    (output.status.code(), stdout(&output))
}

#[test]
fn without_a_command_a_terminal_gets_the_help_and_64() {
    // If the program started as a daemon, it would exit with 78 here.
    let alone = Alone::new("nonsense");
    for arguments in ["", "-v"] {
        let (code, said) = typed(&alone, arguments);
        assert_eq!(code, Some(64), "{said}");
        assert!(said.contains("Usage: tallyd") && said.contains("Exit codes: 0"), "{said}");
    }
    assert_eq!(typed(&alone, "run").0, Some(78));
    assert_exits(&alone.run(&[]), 78, "config.toml:1:");
    assert_exits(&alone.run(&["run"]), 78, "config.toml:1:");
}

#[tokio::test(flavor = "multi_thread")]
async fn verbose_and_quiet_override_the_level_of_the_log() {
    let world = World::new("cli_verbose", "[log]\nlevel = \"info\"").await;
    let logs = |arguments: &[&str], filter: &str| {
        let output = world.command().args(arguments).env("RUST_LOG", filter).output().unwrap();
        assert_exits(&output, 0, "");
        stderr(&output).contains("\"event\":\"job-started\"")
    };
    assert!(!logs(&["archive"], "error") && logs(&["archive", "-v"], "error") && logs(&["-vv", "archive"], "error"));
    assert!(logs(&["archive"], "") && !logs(&["archive", "-q"], "") && !logs(&["-qq", "archive"], "info"));
    assert_exits(&world.tallyd(&["archive", "-v", "-q"]), 64, "cannot be used with");
}
