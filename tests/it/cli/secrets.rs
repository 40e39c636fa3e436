//! The program reads passwords from files, and never prints them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use super::{Alone, assert_exits};
use crate::common::ports::free_port;
use crate::common::{World, stderr, stdout};

const SECRET: &str = "hunter2-b64-Zm9v";

#[track_caller]
fn assert_silent(output: &Output) {
    for text in [stdout(output), stderr(output)] {
        assert!(!text.contains(SECRET), "the password was printed: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_are_never_printed() {
    let port = free_port();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, format!("{SECRET}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let in_urls = format!(
        "[amqp]\nurl = \"amqp://u:{SECRET}@127.0.0.1:{port}/%2f\"\n\
         [mysql]\nurl = \"mysql://u:{SECRET}@127.0.0.1:{port}/t\"\nconnect_timeout_ms = 100\n\
         [redis]\nurl = \"redis://u:{SECRET}@127.0.0.1:{port}/0\"\n"
    );
    let in_files =
        ["amqp", "mysql", "redis"].map(|section| format!("[{section}]\npassword_file = \"{}\"\n", file.display()));
    let broken = format!("[amqp]\nurl = \"amqp://u:{SECRET}@127.0.0.1:{port}/%2f\n");
    let no_address = format!("[amqp]\nurl = \"amqp://u:{SECRET}@host:port/%2f\"\n[mysql]\nurl = \"{SECRET}\"\n");
    let own_key = format!("[mysql]\npassword = \"{SECRET}\"\n");
    let wrong_option = in_urls.replace("/t\"", "/t?ssl-mode=none\"");
    for config in [in_urls, in_files.concat(), broken, no_address, own_key, wrong_option] {
        let alone = Alone::new(&config);
        for arguments in
            [vec!["config", "check", "--offline"], vec!["config", "check"], vec!["reconcile"], vec!["migrate"]]
        {
            let mut command = alone.command();
            command.args(arguments).env("RUST_LOG", "trace").env("TALLYD__MYSQL__CONNECT_TIMEOUT_MS", "100");
            assert_silent(&command.output().unwrap());
        }
    }
    let alone = Alone::new("[mysql]\nconnect_timeout_ms = 100\n");
    for variable in ["TALLYD__MYSQL__PASSWORD", "TALLYD__AMQP__PASSWORD", "TALLYD__REDIS__PASSWORD"] {
        assert_silent(
            &alone.command().args(["config", "check"]).env(variable, SECRET).env("RUST_LOG", "trace").output().unwrap(),
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_the_servers_refuse_is_not_printed() {
    let world = World::new("cli_refused", "").await;
    for section in ["AMQP", "MYSQL", "REDIS"] {
        let variable = format!("TALLYD__{section}__PASSWORD");
        let output =
            world.command().args(["config", "check"]).env(variable, SECRET).env("RUST_LOG", "trace").output().unwrap();
        assert_ne!(output.status.code(), Some(0), "{section}");
        assert_silent(&output);
    }
}

#[test]
fn a_password_file_that_everyone_can_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, SECRET).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let alone = Alone::new(&format!("[redis]\npassword_file = \"{}\"\n", file.display()));
    let output = alone.run(&["config", "check", "--offline"]);
    assert_exits(&output, 78, "can be read by everyone");
    assert_silent(&output);
}

#[test]
fn a_relative_password_file_is_a_credential_of_systemd() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tallyd.mysql-password");
    fs::write(&file, SECRET).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o440)).unwrap();
    let alone = Alone::new("[mysql]\npassword_file = \"tallyd.mysql-password\"\n");
    let mut command = alone.command();
    let output =
        command.args(["config", "check", "--offline"]).env("CREDENTIALS_DIRECTORY", folder.path()).output().unwrap();
    assert_exits(&output, 0, "");
    assert_silent(&output);
}

/// All secrets of a container are in files, as Docker, Compose and Kubernetes mount them.
const FILES: [(&str, &str, &str); 7] = [
    ("AMQP__PASSWORD", "amqp-password", SECRET),
    ("MYSQL__PASSWORD", "mysql-password", SECRET),
    ("REDIS__PASSWORD", "redis-password", SECRET),
    ("ADMIN__TOKEN", "admin-token", SECRET),
    ("AMQP__URL", "amqp-url", "amqp://of-a-file@rabbit.example/%2f"),
    ("MYSQL__URL", "mysql-url", "mysql://of-a-file@mysql.example/t"),
    ("REDIS__URL", "redis-url", "redis://redis.example/3"),
];

/// Runs the program with files in `/run/secrets` that everyone can read.
fn in_container(alone: &Alone, arguments: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    for (_, name, text) in FILES {
        fs::write(folder.path().join(name), format!("{text}\n")).unwrap();
    }
    let script = format!(
        "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/secrets && cp {}/* /run/secrets && chmod 0444 /run/secrets/* && exec {} --config {} {arguments}",
        folder.path().display(),
        env!("CARGO_BIN_EXE_tallyd"),
        alone.config().display()
    );
    let mut command = std::process::Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script]);
    command.env_remove("RUST_LOG").env_remove("CREDENTIALS_DIRECTORY");
    for (variable, name, _) in FILES {
        let folder = if variable.ends_with("PASSWORD") { "" } else { "/run/secrets/" };
        command.env(format!("TALLYD__{variable}_FILE"), format!("{folder}{name}"));
    }
    command.output().unwrap()
}

#[test]
fn the_secrets_of_a_container_are_read_from_the_files_that_variables_name() {
    let alone = Alone::new("");
    let checked = in_container(&alone, "config check --offline");
    assert_exits(&checked, 0, "");
    assert_silent(&checked);
    let shown = in_container(&alone, "config show --origin");
    assert_silent(&shown);
    for (url, variable) in [
        ("amqp://of-a-file:***@rabbit.example/%2f", "TALLYD__AMQP__URL_FILE"),
        ("mysql://of-a-file:***@mysql.example/t", "TALLYD__MYSQL__URL_FILE"),
        ("redis.example/3", "TALLYD__REDIS__URL_FILE"),
    ] {
        let is_shown = |line: &str| line.contains(url) && line.ends_with(variable);
        assert!(stdout(&shown).lines().any(is_shown), "{}", stdout(&shown));
    }
}

#[test]
fn a_file_of_an_address_that_can_not_be_used_is_said_with_its_variable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("url");
    fs::write(&file, format!("mysql://u:{SECRET}@h/t\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let alone = Alone::new("");
    let said = |variables: &[(&str, &str)], expected: &str| {
        let output =
            alone.command().args(["config", "check", "--offline"]).envs(variables.iter().copied()).output().unwrap();
        assert_exits(&output, 78, expected);
        assert_silent(&output);
    };
    let of_file = ("TALLYD__MYSQL__URL_FILE", file.to_str().unwrap());
    said(&[of_file], "TALLYD__MYSQL__URL_FILE: the address in ");
    said(&[of_file], "has the mode 0644 and can be read by everyone");
    said(&[of_file, ("TALLYD__MYSQL__URL", "mysql://u@h/t")], "TALLYD__MYSQL__URL is also set: unset one of them");
    said(&[("TALLYD__MYSQL__URL_FILE", "/nowhere")], "the address in /nowhere: No such file");
}
