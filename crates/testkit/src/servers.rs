//! Starts and kills servers of the stack. Only one test at a time can do this.

use std::fs::OpenOptions;
use std::io::Write;
use std::process::Command;

use super::root;

pub fn kill(server: &str) {
    run("dev/down", &["--kill", server]);
}

pub fn start(server: &str) {
    run("dev/up", &[server]);
}

pub fn rabbitmqctl(arguments: &[&str]) {
    run("dev/rabbitmqctl", arguments);
}

/// Reports that the current test can't run on these servers, although it passes for the runner. `dev/test` prints the
/// reports after the runner's summary.
pub fn not_run(why: &str) {
    let line = format!("NOT RUN: {}: {why}\n", std::thread::current().name().unwrap_or("a test"));
    match std::env::var("TALLYD_TEST_NOT_RUN") {
        Ok(file) => OpenOptions::new().append(true).open(file).unwrap().write_all(line.as_bytes()).unwrap(),
        Err(_) => eprint!("{line}"),
    }
}

fn run(name: &str, arguments: &[&str]) {
    let output = script(name).args(arguments).output().unwrap();
    // dev/up prints its messages to stdout.
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{name} {arguments:?}: {}: {}", output.status, String::from_utf8_lossy(&said));
}

fn script(name: &str) -> Command {
    Command::new(root().join(name))
}
