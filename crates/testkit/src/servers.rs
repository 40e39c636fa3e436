//! Starts and kills servers of the stack. Only one test at a time can use this module.

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

fn run(name: &str, arguments: &[&str]) {
    let output = script(name).args(arguments).output().unwrap();
    // dev/up prints its messages to stdout.
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{name} {arguments:?}: {}: {}", output.status, String::from_utf8_lossy(&said));
}

fn script(name: &str) -> Command {
    Command::new(root().join(name))
}
