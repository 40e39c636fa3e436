//! `tallyd status` and `tallyd admin healthcheck` with the real daemon: output and exit codes.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::fs::{self, File};
use std::net::TcpListener;
use std::process::{Command, Output};

use crate::common;
use common::ports::free_port;
use common::proxy::Proxy;
use common::{Daemon, World, body, eventually, signal, stderr, stdout, target};
use serde_json::Value;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

const ANY: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n";

/// The URL of the daemon's admin port.
async fn url(daemon: &Daemon) -> String {
    daemon.logged("\"admin-listening\"").await;
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"admin-listening\"")).unwrap();
    format!("http://{}", serde_json::from_str::<Value>(line).unwrap()["address"].as_str().unwrap())
}

#[track_caller]
fn assert_exits(output: &Output, code: i32, said: &str) {
    let text = stdout(output) + &stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(said), "\"{said}\" is not in: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_tells_people_what_is_wrong_and_programs_everything() {
    let world = World::new("status_command", &format!("{ANY}[[board]]\nname = \"likes\"\nperiod = \"week\"\n")).await;
    let daemon = world.daemon();
    let url = url(&daemon).await;
    let told_now = |world: &World| {
        let output = world.tallyd(&["status", "--url", &url]);
        assert_exits(&output, 0, "tallyd ");
        stdout(&output)
    };
    eventually("the daemon is ready", || async { told_now(&world).contains("\nready: events are written\n") }).await;
    let publisher = world.publisher().await;
    let like = |user| {
        let like =
            LikeEvent { target: target(42), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true };
        body(&like)
    };
    world.publish(&publisher, &[like(1), like(2), (UserId(3), b"{".to_vec())]).await;
    eventually("likes, board and dead letter are reported", || async {
        let text = told_now(&world);
        [", 2 since the start\n", "\nlikes  ", "malformed-json         1\n", "   tallyd dead list --open\n"]
            .iter()
            .all(|part| text.contains(part))
    })
    .await;
    let text = told_now(&world);
    for part in ["SERVER    STATUS", "mysql     up", "PARTITION  STATUS", "JOB  ", "!  dead letters are open"] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "output without a terminal must have no colours");
    let told = world.report(&["status", "--url", &url]);
    assert_eq!((&told["events_committed"], &told["ready"]), (&Value::from(2), &Value::from(true)));
    assert_eq!(told["troubles"][0]["command"], "tallyd dead list --open");

    world.write(&format!("{ANY}[kinds]\nvideo = 0\n"));
    daemon.signal("HUP");
    let refused = "!  the last reload was rejected, and the previous configuration stays in force: ";
    eventually("a rejected reload is reported", || async { told_now(&world).contains(refused) }).await;
    world.write(ANY);
    daemon.signal("HUP");
    eventually("an accepted reload removes the line", || async { !told_now(&world).contains(refused) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_is_watched_goes_on_while_the_daemon_is_away_until_it_is_told_to_stop() {
    let port = free_port();
    let world = World::new("status_watch", &format!("[admin]\nlisten = \"127.0.0.1:{port}\"\n")).await;
    let daemon = world.daemon();
    url(&daemon).await;
    // This configuration is invalid, and its password file does not exist. So the command can't use this configuration
    // to reach MySQL.
    let broken = fs::read_to_string(world.config_path()).unwrap();
    let broken = broken.replace("[mysql]", "[mysql]\npassword_file = \"/nowhere\"\nunknown = 1");
    let config = world.folder.path().join("broken.toml");
    fs::write(&config, broken).unwrap();
    let shown = world.folder.path().join("shown");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
    command.args(["status", "--watch", "--config"]).arg(&config);
    let mut watching = command.stdout(File::create(&shown).unwrap()).spawn().unwrap();
    let separator = format!("{}\n", "-".repeat(80));
    let said = |text: &str| fs::read_to_string(&shown).unwrap().contains(text);
    eventually("the status is printed twice", || async {
        fs::read_to_string(&shown).unwrap().matches(&separator).count() >= 2
    })
    .await;
    daemon.kill();
    let away = format!("no daemon answers at http://127.0.0.1:{port}/: ");
    eventually("the daemon is reported as unreachable", || async { said(&away) }).await;
    assert!(said("before that:\n\ntallyd "));
    fs::write(&shown, "").unwrap();
    let daemon = world.daemon();
    eventually("the restarted daemon is shown", || async { said(&format!(":{} ", daemon.child.id())) }).await;
    signal(&watching, "INT");
    assert_eq!(watching.wait().unwrap().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthcheck_exits_with_0_when_ready_and_1_when_not() {
    let world = World::new("healthcheck", ANY).await;
    let (proxy, mysql) = Proxy::before(world.config.mysql.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__MYSQL__URL", mysql.as_str())]);
    let url = url(&daemon).await;
    let check = |more: &[&str]| world.tallyd(&[&["admin", "healthcheck", "--url", &url], more].concat());
    eventually("the daemon is ready", || async { check(&[]).status.code() == Some(0) }).await;
    assert_exits(&check(&[]), 0, "ready\n");
    proxy.hold();
    proxy.cut();
    eventually("the daemon is not ready", || async { check(&[]).status.code() == Some(1) }).await;
    eventually("the reason is printed", || async { stdout(&check(&[])).contains("mysql is unreachable: ") }).await;
    assert_exits(&check(&["--live"]), 0, "live\n");
    proxy.release();
    eventually("the daemon is ready again", || async { check(&[]).status.code() == Some(0) }).await;
}

#[test]
fn a_daemon_that_is_away_exits_with_75_and_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    let run = |listen: &str, arguments: &[&str]| {
        fs::write(&config, format!("[admin]\nlisten = \"{listen}\"\n")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
        command.arg("--config").arg(&config).args(arguments).output().unwrap()
    };
    let closed = format!("127.0.0.1:{}", free_port());
    // This server accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    for command in [&["status"][..], &["admin", "healthcheck"]] {
        let output = run(&closed, command);
        assert_exits(&output, 75, &format!("no daemon answers at http://{closed}/: Connection refused"));
        assert!(stderr(&output).contains("systemctl status tallyd"), "{}", stderr(&output));
        assert_exits(&run(&closed, &[command, &["--url", silent.as_str()]].concat()), 75, "no answer within 3 s");
        assert_exits(&run("", command), 64, "[admin] listen is empty");
        assert_exits(&run("127.0.0.1:0", command), 64, "use --url");
        assert_exits(&run(&closed, &[command, &["--url", "https://localhost"]].concat()), 64, "doesn't support https");
        assert_exits(&run("nowhere", command), 78, "[admin] listen is \"nowhere\"");
    }
    assert_exits(&run(&closed, &["status", "--watch"]), 75, "no daemon answers");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_admin_port_is_no_healthy_daemon() {
    let world = World::new("healthcheck_other", ANY).await;
    let daemon = world.daemon();
    let url = url(&daemon).await;
    // This path does not exist. A misconfigured proxy can send requests to such a path.
    let elsewhere = format!("{url}/other/");
    assert_exits(&world.tallyd(&["admin", "healthcheck", "--url", &elsewhere]), 1, "404 Not Found: unknown path");
    assert_exits(&world.tallyd(&["status", "--url", &elsewhere]), 1, "404 Not Found: unknown path");
}
