//! The command line and passwords: it reads them from files, and prints none.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use super::{Alone, assert_exits, closed_port};
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
    let port = closed_port();
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
    world.close().await;
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
