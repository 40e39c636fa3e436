//! Tests the output and the exit codes of the command line, on which scripts and systemd rely. To test an exit code, a
//! test causes the failure that the code reports.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod help;
mod secrets;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::common;
use common::ports::free_port;
use common::{World, stderr, stdout};
use sqlx::AssertSqlSafe;

/// Runs the program with a configuration, but without servers.
struct Alone {
    folder: tempfile::TempDir,
}

impl Alone {
    fn new(config: &str) -> Self {
        let alone = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(alone.config(), config).unwrap();
        alone
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("config.toml")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
        command.arg("--config").arg(self.config()).env_remove("CREDENTIALS_DIRECTORY").env_remove("RUST_LOG");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }
}

#[track_caller]
fn assert_exits(output: &Output, code: i32, said: &str) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(said), "\"{said}\" is not in: {text}");
}

// ---------------------------------------------------------------------------------------------- 0 and 64

#[test]
fn the_version_names_the_release_and_how_it_was_built() {
    let version = stdout(&Alone::new("").run(&["--version"]));
    let known = format!("tallyd {} (", env!("CARGO_PKG_VERSION"));
    assert!(version.starts_with(&known) && version.trim().ends_with(')'), "{version}");
}

#[test]
fn a_command_line_that_is_wrong_exits_with_64() {
    let alone = Alone::new("");
    for (arguments, said) in [
        (vec!["--nonsense"], "--nonsense"),
        (vec!["restart"], "restart"),
        (vec!["reconcile", "--full", "--changed"], "cannot be used with"),
        (vec!["reconcile", "--changed", "--target", "video:1"], "cannot be used with"),
        (vec!["reconcile", "--format", "yaml"], "yaml"),
        (vec!["reconcile", "--target", "video"], "write KIND:ID"),
        (vec!["reconcile", "--target", "video:0"], "write KIND:ID"),
        (vec!["reconcile", "--target", "film:1"], "the kinds are video"),
    ] {
        assert_exits(&alone.run(&arguments), 64, said);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_board_or_period_that_is_not_there_exits_with_64() {
    let world = World::new("cli_scope", "[[board]]\nname = \"likes\"\nperiod = \"week\"").await;
    for (arguments, said) in [
        (&["archive", "--board", "like"][..], "no board is called \"like\"; configured boards: likes"),
        (&["archive", "--yes", "--period", "2026-W60"], "is not a period"),
        (
            &["archive", "--yes", "--period", "2026-11-18"],
            "is a day, but the requested boards have no periods of that length",
        ),
        (&["archive", "--yes", "--period", "2999-W01"], "is not closed"),
    ] {
        assert_exits(&world.tallyd(arguments), 64, said);
    }
}

// ---------------------------------------------------------------------------------------------- 1 and 2

#[tokio::test(flavor = "multi_thread")]
async fn a_board_that_can_not_be_archived_exits_with_1() {
    let world = World::new("cli_kept", "[[board]]\nname = \"likes\"\nperiod = \"week\"").await;
    assert_exits(&world.tallyd(&["archive"]), 0, "");
    let mut redis = world.redis().await;
    let key = world.cache.keys.board("likes", "2026-W40");
    let () = redis::cmd("ZADD").arg(key).arg("inf").arg("42").query_async(&mut redis).await.unwrap();
    assert_exits(&world.tallyd(&["archive", "--dry-run"]), 0, "");
    let output = world.tallyd(&["archive"]);
    assert_exits(&output, 1, "");
    assert!(
        stdout(&output).contains("likes 2026-W40: kept (MySQL cannot store the member 42: its score is infinite"),
        "{}",
        stdout(&output)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_that_finds_drift_exits_with_2() {
    let world = World::new("cli_drift", "").await;
    world.publisher().await;
    assert_exits(&world.tallyd(&["--reconcile-once"]), 0, "");
    assert_exits(&world.tallyd(&["reconcile", "--dry-run"]), 0, "");
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(common::target(42)));
    let () = redis::cmd("HSET").arg(key).arg("42").arg("5").query_async(&mut redis).await.unwrap();
    let output = world.tallyd(&["reconcile", "--dry-run"]);
    assert_exits(&output, 2, "");
    assert!(stdout(&output).contains("video:42: drifted, Redis 5, MySQL 0"), "{}", stdout(&output));
    // Without --dry-run the command repairs the drift, and exits with 0.
    assert_exits(&world.tallyd(&["reconcile"]), 0, "");
    assert_exits(&world.tallyd(&["reconcile", "--dry-run"]), 0, "");
}

// ---------------------------------------------------------------------------------------------- 75

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_is_held_exits_with_75_and_names_its_holder() {
    let world = World::new("cli_lock", "").await;
    for (job, arguments) in [("reconcile", ["reconcile"]), ("archive", ["archive"])] {
        let sql = format!(
            "INSERT INTO job_lock (job, run, owner, lease_until) VALUES ('{job}', 1, 'elsewhere:7', NOW(6) + INTERVAL 1 MINUTE)"
        );
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
        let output = world.tallyd(&arguments);
        assert_exits(&output, 75, "elsewhere:7 is already running this job");
        assert_eq!(stdout(&output), "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_exits_with_75() {
    let world = World::new("cli_away", "").await;
    world.publisher().await;
    let port = free_port();
    let (mysql, redis, amqp) = (
        ("TALLYD__MYSQL__URL", format!("mysql://root@127.0.0.1:{port}/tally")),
        ("TALLYD__REDIS__URL", format!("redis://127.0.0.1:{port}/0")),
        ("TALLYD__AMQP__URL", format!("amqp://u@127.0.0.1:{port}/%2f")),
    );
    for (arguments, away) in [
        (vec!["reconcile"], &mysql),
        (vec!["archive"], &mysql),
        (vec!["migrate"], &mysql),
        (vec!["config", "check"], &mysql),
        (vec!["reconcile"], &redis),
        (vec!["config", "check"], &redis),
        (vec!["config", "check"], &amqp),
    ] {
        let begun = Instant::now();
        let output = world.command().args(&arguments).env(away.0, &away.1).output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{arguments:?} without {}: {}", away.0, stderr(&output));
        assert!(begun.elapsed() < Duration::from_secs(8), "{arguments:?} waited {:?}", begun.elapsed());
    }
    // Where the daemon counts all numbers, a reconcile asks RabbitMQ for nothing.
    let output = world.command().arg("reconcile").env(amqp.0, &amqp.1).output().unwrap();
    assert_exits(&output, 0, "16 lost buckets loaded");
}

// ---------------------------------------------------------------------------------------------- 78

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_exits_with_78_and_ends_no_daemon() {
    let world = World::new("cli_login", "").await;
    world.publisher().await;
    let wrong = ["MYSQL", "REDIS", "AMQP"].map(|section| format!("TALLYD__{section}__PASSWORD"));
    for (command, variable) in ["reconcile", "reconcile", "config check"].into_iter().zip(&wrong) {
        let output = world.command().args(command.split(' ')).env(variable, "wrong").output().unwrap();
        assert_eq!(output.status.code(), Some(78), "{variable}: {}", stderr(&output));
    }
    for variables in [&wrong[..], &wrong[1..]] {
        let variables: Vec<(&str, &str)> = variables.iter().map(|variable| (variable.as_str(), "wrong")).collect();
        let daemon = world.daemon_with(&variables);
        daemon.logged("\"outage-begun\"").await;
        assert!(daemon.stop().success());
    }
}

#[test]
fn a_configuration_that_is_wrong_exits_with_78_and_says_where() {
    for (config, said) in [
        (
            "[log]\nlevel = \"info\"\n\n[amqp]\nprefech = 5\n",
            "config.toml:5:1: unknown key `prefech` in [amqp]: did you mean `prefetch`?",
        ),
        ("[amqp]\nurl = \"amqp://tallyd@127.0.0.1/\"\n", "the vhost with the empty name"),
        ("[amqp]\nurl = \"amqp://127.0.0.1/%2f\"\n", "has no user"),
        ("[amqp]\nprefetch = 19999\n", "set it to 20000 or more"),
        ("[amqp]\nqueue_type = \"fast\"\n", "[amqp] queue_type is \"fast\": allowed are \"quorum\", \"classic\""),
        ("[mysql]\npassword_file = \"tallyd.no-password\"\n", "tallyd.no-password is in none of /etc/credstore, "),
        ("[mysql]\npassword_file = \"/nonexistent/password\"\n", "/nonexistent/password"),
        ("[reconcile]\nfull_cron = \"often\"\n", "[reconcile] full_cron is \"often\""),
        ("[log]\nlevel = \"tallyd=loud\"\n", "tallyd=loud"),
        ("nonsense", "config.toml:1:"),
    ] {
        let alone = Alone::new(config);
        for arguments in [vec!["config", "check", "--offline"], vec!["reconcile"], vec![]] {
            assert_exits(&alone.run(&arguments), 78, said);
        }
    }
    let alone = Alone::new("");
    fs::remove_file(alone.config()).unwrap();
    assert_exits(&alone.run(&["config", "check"]), 78, "config.toml can't be read");
}

#[test]
fn all_problems_are_said_at_once() {
    let alone = Alone::new(
        "[amqp]\npartitions = 0\n[mysql]\nurl = \"mysql://u@h\"\n[[board]]\nname = \"A\"\nperiod = \"day\"\n",
    );
    let output = alone.run(&["config", "check", "--offline"]);
    for said in ["partitions is 0, allowed are 1 to 256", "has no database", "[[board]] A: a name must have"] {
        assert_exits(&output, 78, said);
    }
    assert_eq!(stdout(&output), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_is_missing_or_newer_exits_with_78_and_says_what_to_run() {
    let world = World::new("cli_schema", "").await;
    let all = [vec![], vec!["reconcile"], vec!["archive"], vec!["config", "check"]];
    sqlx::query("INSERT INTO _sqlx_migrations SELECT 9999, description, installed_on, success, checksum, execution_time FROM _sqlx_migrations LIMIT 1")
        .execute(&world.pool)
        .await
        .unwrap();
    sqlx::query("UPDATE schema_floor SET step = 9999").execute(&world.pool).await.unwrap();
    for arguments in all.iter().chain([&vec!["migrate"]]) {
        assert_exits(&world.tallyd(arguments), 78, "was made by a newer tallyd");
    }
    sqlx::query("DROP TABLE _sqlx_migrations").execute(&world.pool).await.unwrap();
    assert_exits(&world.tallyd(&["migrate"]), 78, "was made by a newer tallyd");
    sqlx::query("UPDATE schema_floor SET step = 4").execute(&world.pool).await.unwrap();
    for arguments in &all {
        assert_exits(&world.tallyd(arguments), 78, "run `tallyd migrate`");
    }
    // MySQL has the tables already. So this run also tests that each migration step can run again.
    let output = world.tallyd(&["migrate"]);
    assert_exits(&output, 0, "");
    assert!(stdout(&output).contains("up to date after"), "{}", stdout(&output));
    assert!(stdout(&world.tallyd(&["migrate"])).contains("the schema is up to date\n"));
}

// ---------------------------------------------------------------------------------------------- what is printed

#[test]
fn check_config_says_what_will_be_run() {
    let alone =
        Alone::new("[amqp]\nurl = \"amqp://u@rabbit.example.com:5672/shop\"\npartitions = 4\n[archive]\ncron = \"\"\n");
    let output = alone.run(&["config", "check", "--offline"]);
    assert_exits(&output, 0, "");
    let text = stdout(&output);
    assert!(text.contains("(vhost \"shop\"), partitions: 4"), "{text}");
    let runs = |job: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(job)).unwrap();
        (line.matches(" UTC").count(), line.trim().to_owned())
    };
    assert_eq!((runs("changed").0, runs("full").0), (3, 3), "{text}");
    assert!(runs("full").1.contains(" 04:30:00 UTC"), "{text}");
    assert_eq!(runs("archive"), (0, "never".to_owned()));
    assert_eq!(runs("filters"), (0, "never".to_owned()), "there are none");
    assert!(text.ends_with("the configuration is valid\n"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_config_asks_every_server() {
    let world = World::new("cli_check", "").await;
    let output = world.tallyd(&["config", "check"]);
    assert_exits(&output, 0, "");
    for server in ["rabbitmq", "mysql", "redis"] {
        assert!(stdout(&output).contains(&format!("ok       {server}-answers")), "{}", stdout(&output));
    }
}

#[test]
fn the_environment_wins_over_the_file() {
    let alone = Alone::new("[amqp]\npartitions = 4\n");
    let offline = |variable: (&str, &str)| {
        alone.command().args(["config", "check", "--offline"]).env(variable.0, variable.1).output().unwrap()
    };
    assert!(stdout(&offline(("TALLYD__AMQP__PARTITIONS", "7"))).contains("partitions: 7"));
    assert!(stdout(&offline(("TALLYD__ARCHIVE__CRON", "0 0 3 * * *"))).contains(" 03:00:00 UTC"));
    assert_exits(
        &offline(("TALLYD__AMQP__PARTITION", "7")),
        78,
        "TALLYD__AMQP__PARTITION: unknown key `partition` in [amqp]: did you mean `partitions`?",
    );
    assert_exits(&offline(("TALLYD__AMQP__PARTITIONS", "many")), 78, "TALLYD__AMQP__PARTITIONS: ");
}

#[tokio::test(flavor = "multi_thread")]
async fn rust_log_wins_over_the_level_in_the_file() {
    let world = World::new("cli_rust_log", "[log]\nlevel = \"info\"").await;
    let logs = |filter: &str| stderr(&world.command().arg("archive").env("RUST_LOG", filter).output().unwrap());
    assert!(logs("").contains("\"event\":\"job-started\""), "{}", logs(""));
    assert_eq!(logs("off"), "");
    assert!(!logs("warn").contains("job-started"));
    assert_exits(&world.command().arg("archive").env("RUST_LOG", "tallyd=loud").output().unwrap(), 78, "RUST_LOG");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_go_to_stderr_if_only_a_parent_writes_to_the_journal() {
    let world = World::new("cli_journal", "").await;
    let output = world.command().arg("archive").env("JOURNAL_STREAM", "1:2").output().unwrap();
    assert_exits(&output, 0, "\"event\":\"job-started\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_go_to_stdout_and_logs_to_stderr() {
    let world = World::new("cli_streams", "").await;
    world.publisher().await;
    let output = world.tallyd(&["reconcile", "--format", "json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["mode"], "full");
    for line in stderr(&output).lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(line["event"].is_string() && line["message"].is_string(), "{line}");
    }
}
