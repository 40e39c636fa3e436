//! Follows a newcomer's first steps: makes the documented accounts, publishes the first event from Python, and reads
//! the count.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::common;
use super::common::{World, as_api, eventually, stderr, stdout, target};
use super::example::Example;
use crate::common::scripts::{ApiServer, OnBoard};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_core::period::PeriodKind;
use tallyd_redis::ranks::Ranking;

/// A run of a job takes a second or two.
const JOB_FREE_WITHIN: Duration = Duration::from_secs(30);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(world: &World, id: &str) -> String {
    let output = Example::Python.run(world, &[], &["--read", "video", id]);
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output).trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_counts_at_once_and_its_events_reach_mysql() {
    let world = World::new("python", &as_api("")).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    assert_eq!(read(&world, "42"), "unknown", "before the first reconcile, the count must be unknown");
    assert!(world.tallyd(&["reconcile"]).status.success());
    assert_eq!(read(&world, "42"), "0");

    // Before some calls the test clears Redis' cache of scripts, because EVALSHA and EVAL must give the same result.
    let mut redis = world.redis().await;
    for user in ["1", "9223372036854775807"] {
        let () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut redis).await.unwrap();
        let output = Example::Python.run(&world, &[], &["video", "42", user]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let again = Example::Python.run(&world, &[], &["video", "42", "1"]);
    let again: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!((&again["changed"], &again["count"]), (&false.into(), &2.into()), "a double click: {again}");
    let output = Example::Python.run(&world, &[], &["--unlike", "video", "42", "1"]);
    let event: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&event["type"], &event["count"]), (&"unlike".into(), &1.into()), "{event}");
    assert_eq!(read(&world, "42"), "1");

    eventually("the events are in MySQL", || async {
        world.count("SELECT COUNT(*) FROM like_record WHERE kind = 1 AND target_id = 42").await == 2
            && world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 1 AND is_del = 1").await == 1
    })
    .await;
    assert_eq!(world.counters().await[&target(42)], 1);
    assert_eq!(world.redis_counters().await[&target(42)], 1);
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
    assert_eq!(world.report(&["reconcile"])["drifted"], 0);
}

/// Returns the SQL blocks under a heading of a document. The names in the blocks are replaced by the test world's
/// names.
fn documented_sql(world: &World, document: &str, heading: &str) -> String {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let (_, section) = text.split_once(&format!("# {heading}\n")).unwrap();
    let block = section.split("```sql\n").nth(1).unwrap().split("```").next().unwrap();
    block.replace("'tallyd", &format!("'{}", world.name)).replace("ON tally.", &format!("ON {}.", world.name))
}

/// Finds the document's line that starts with this prefix. Returns the rest of that line.
fn documented_line(document: &str, beginning: &str) -> String {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(beginning));
    line.unwrap_or_else(|| panic!("{document} has no line that begins with {beginning}")).to_owned()
}

fn rabbitmqctl(arguments: &[&str]) {
    let output = Command::new(root().join("dev/rabbitmqctl")).args(arguments).output().unwrap();
    assert!(output.status.success(), "rabbitmqctl {arguments:?}: {}", stderr(&output));
}

/// Replaces the user and the password in the address. Returns the new address.
pub fn logged_in(url: &str, user: &str, password: &str) -> String {
    let mut url = url::Url::parse(url).unwrap();
    url.set_username(user).unwrap();
    url.set_password(Some(password)).unwrap();
    url.to_string()
}

/// Reads the line of the document that starts with `beginning`, and gives the account the permissions in this line. The
/// patterns use the test world's name.
fn permit(world: &World, account: &str, beginning: &str) {
    let line = documented_line("docs/operations/security.md", beginning);
    let patterns: Vec<String> =
        line.split('\'').skip(1).step_by(2).map(|pattern| pattern.replace("tally", &world.name)).collect();
    rabbitmqctl(&["add_user", account, "secret"]);
    rabbitmqctl(&["set_permissions", account, &patterns[0], &patterns[1], &patterns[2]]);
}

/// Makes an account in Redis for the test world's keys. The account's rights come from the document's line that starts
/// with this prefix.
async fn allow(world: &World, account: &str, beginning: &str) {
    let rules =
        documented_line("docs/operations/security.md", beginning).replace("~tally:", &format!("~{}:", world.name));
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER").arg(account).arg(rules.split(' ').collect::<Vec<_>>());
    let () = command.query_async(&mut world.redis().await).await.unwrap();
}

/// Runs the client examples in other languages with all their functions. Each example leaves one like.
fn use_clients(world: &World, addresses: &[(&str, &str)]) {
    let settings = [addresses, &[("CLICKS_MAX", "5")]].concat();
    for (example, user) in [(Example::Python, "7"), (Example::Node, "8")] {
        let run = |arguments: &[&str]| {
            let output = example.run(world, &settings, arguments);
            assert!(output.status.success(), "{example:?} {arguments:?}: {}", stderr(&output));
        };
        for arguments in [&["video", "42", user][..], &["--unlike", "video", "42", user], &["video", "42", user]] {
            run(arguments);
        }
        run(&["--read", "--mysql", "video", "42", "43"]);
        run(&["--liked-by", user, "video", "42", "43"]);
        let nowhere = [&settings[..], &[("EXCHANGE", "tally.nowhere")]].concat();
        let output = example.run(world, &nowhere, &["video", "44", user]);
        assert!(!output.status.success(), "{example:?}: the click must be undone");
    }
}

/// Runs all steps of a producer that uses boards.
async fn use_boards(world: &World, redis_url: &str) {
    let mut config = world.api.clone();
    config.redis.url = redis_url.into();
    let client = ApiServer::new(&config);
    let on = OnBoard { board: "first", member: b"42" };
    client.add_to_board(on, "like", 2).await.unwrap();
    let first = ("first", PeriodKind::Total);
    for ranking in [Ranking::Ordinal, Ranking::Dense] {
        assert_eq!(client.board_page(first, 1, 5, ranking).await.unwrap().members, 1);
        assert_eq!(client.board_around(first, b"42", 1, ranking).await.unwrap().entries.len(), 1);
        assert_eq!(client.board_of(first, &[b"42".to_vec()], ranking).await.unwrap().len(), 1);
    }
    client.read(&[target(42)]).await.unwrap();
}

/// Starts a daemon while the ledger (the table `applied_event`) has events of an expired day.
async fn empty_the_ledger(world: &World, rights: &[(&str, &str)]) -> common::Daemon {
    let old = "INSERT INTO applied_event VALUES (UNIX_TIMESTAMP() - 20 * 86400, REPEAT('x', 16)); \
               INSERT INTO recent_delta VALUES (1, 1, 3, (UNIX_TIMESTAMP() - 20 * 86400) * 1000000, REPEAT('x', 16), 1)";
    sqlx::raw_sql(old).execute(&world.pool).await.unwrap();
    let daemon = world.daemon_with(rights);
    daemon.logged("\"consuming\"").await;
    daemon.logged("ledger-emptied").await;
    for left in ["SELECT COUNT(*) FROM applied_event", "SELECT COUNT(*) FROM recent_delta"] {
        assert_eq!(world.count(left).await, 0);
    }
    daemon
}

/// Runs a command with these accounts, and returns its output. Repeats the command while the daemon runs the same job.
fn succeeded(world: &World, rights: &[(&str, &str)], arguments: &[&str]) -> String {
    let began = Instant::now();
    loop {
        let output = world.command().envs(rights.iter().copied()).args(arguments).output().unwrap();
        if output.status.code() != Some(75) || began.elapsed() > JOB_FREE_WITHIN {
            assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
            return stdout(&output);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough() {
    let board = "[[board]]\nname = \"likes\"\nperiod = \"week\"\narchive_grace = \"0s\"\nexpire_after = \"0s\"\n\
                 [[board]]\nname = \"first\"\nperiod = \"total\"\ntie = \"earliest\"";
    let world = World::new("rights", &as_api(board)).await;
    let (name, daemon_account, producer) =
        (world.name.clone(), format!("{}_d", world.name), format!("{}_p", world.name));

    let mut admin = MySqlConnection::connect(&common::stack("MYSQL_URL")).await.unwrap();
    // The database exists under another name. The account from the document must be able to create the daemon's tables
    // again.
    let sql =
        documented_sql(&world, "docs/operations/security.md", "MySQL accounts").replace("CREATE DATABASE tally;", "");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.unwrap();
    let tables: Vec<String> = sqlx::query_scalar("SHOW TABLES").fetch_all(&world.pool).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {}", tables.join(", ")))).execute(&world.pool).await.unwrap();
    permit(&world, &daemon_account, "rabbitmqctl set_permissions tallyd ");
    permit(&world, &producer, "rabbitmqctl set_permissions tallyd_api ");
    let mut redis = world.redis().await;
    for (account, beginning) in [(&daemon_account, "ACL SETUSER tallyd "), (&producer, "ACL SETUSER tallyd_api ")] {
        allow(&world, account, beginning).await;
    }

    let mysql = world.config.mysql.url.expose();
    let migrated = world
        .command()
        .arg("migrate")
        .env("TALLYD__MYSQL__URL", logged_in(mysql, &format!("{name}_migrate"), "choose-another"))
        .output()
        .unwrap();
    assert!(migrated.status.success(), "{}", stderr(&migrated));

    let [mysql, amqp, redis_url] = [
        logged_in(mysql, &name, "choose-one"),
        logged_in(world.config.amqp.url.expose(), &daemon_account, "secret"),
        logged_in(world.config.redis.url.expose(), &daemon_account, "choose-one"),
    ];
    let rights = [
        ("TALLYD__MYSQL__URL", mysql.as_str()),
        ("TALLYD__AMQP__URL", amqp.as_str()),
        ("TALLYD__REDIS__URL", redis_url.as_str()),
    ];
    let tallyd = |arguments: &[&str]| succeeded(&world, &rights, arguments);
    let daemon = empty_the_ledger(&world, &rights).await;
    tallyd(&["config", "check"]);
    tallyd(&["show", "video:42"]);
    tallyd(&["reconcile"]);
    let producer_amqp = logged_in(world.config.amqp.url.expose(), &producer, "secret");
    let producer_redis = logged_in(world.config.redis.url.expose(), &producer, "choose-another");
    let reader = logged_in(world.config.mysql.url.expose(), &format!("{name}_api"), "choose-a-third");
    let addresses =
        [("AMQP_URL", producer_amqp.as_str()), ("REDIS_URL", &producer_redis), ("MYSQL_URL", reader.as_str())];
    use_clients(&world, &addresses);
    eventually("the events are in MySQL", || async {
        world.count("SELECT COUNT(*) FROM like_record WHERE is_del = 0").await == 2
    })
    .await;

    use_boards(&world, &producer_redis).await;
    assert!(tallyd(&["board", "top", "first"]).contains("42"));
    assert!(tallyd(&["board", "list"]).contains("first"));

    repair_and_archive(&world, &tallyd, &mut redis).await;
    save_boards(&world, &tallyd, &mut redis).await;
    handle_dead_letters(&world, &tallyd).await;

    assert!(daemon.stop().success());
    for account in [&daemon_account, &producer] {
        rabbitmqctl(&["delete_user", account]);
        let () = redis::cmd("ACL").arg("DELUSER").arg(account).query_async(&mut redis).await.unwrap();
    }
    sqlx::raw_sql(AssertSqlSafe(format!("DROP USER '{name}'@'%', '{name}_migrate'@'%', '{name}_api'@'%'")))
        .execute(&mut admin)
        .await
        .unwrap();
}

/// Repairs a wrong counter in Redis, archives a board of a past week, and reconciles the changed counters.
async fn repair_and_archive(
    world: &World,
    tallyd: &dyn Fn(&[&str]) -> String,
    redis: &mut redis::aio::MultiplexedConnection,
) {
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(43)));
    let () = redis::cmd("HSET").arg(key).arg("43").arg("5").query_async(redis).await.unwrap();
    assert!(tallyd(&["reconcile"]).contains("1 repaired"));
    let key = world.cache.keys.board("likes", "2026-W40");
    let () = redis::cmd("ZADD").arg(&key).arg("3").arg("42").query_async(redis).await.unwrap();
    assert!(tallyd(&["archive"]).contains("likes 2026-W40: ended, 1 members"));
    tallyd(&["reconcile", "--changed"]);
}

/// Takes in a message that the broker dead-lettered, shows it, replays it and deletes it.
async fn handle_dead_letters(world: &World, tallyd: &dyn Fn(&[&str]) -> String) {
    let like = LikeEvent { target: target(45), user: UserId(7), at: tallyd_base::runtime::clock::now(), liked: true };
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    publisher.publish("", &world.broker.returned(), &common::body(&like).1).await.unwrap();
    let listed = tallyd(&["dead", "list"]);
    assert!(listed.contains("1 message was moved") && !listed.contains("could not be read"), "{listed}");
    tallyd(&["dead", "list", "--summary"]);
    assert!(tallyd(&["dead", "replay", "--reason", "returned-by-broker"]).contains("1 of 1"));
    eventually("the replayed like is in MySQL", || async {
        world.count("SELECT COUNT(*) FROM like_record WHERE target_id = 45").await == 1
    })
    .await;
    assert!(tallyd(&["dead", "purge", "--replayed", "--yes"]).contains("1 dead letters deleted"));
}

/// Saves a board, loses it and restores it. Restores another board from its archive.
async fn save_boards(world: &World, tallyd: &dyn Fn(&[&str]) -> String, redis: &mut redis::aio::MultiplexedConnection) {
    tallyd(&["board", "snapshot", "first", "total"]);
    tallyd(&["board", "snapshot", "first", "total"]);
    let (live, mark) = (world.cache.keys.board("first", "total"), world.cache.keys.board_mark("first", "total"));
    let () = redis::cmd("DEL").arg(&[&live, &mark]).query_async(redis).await.unwrap();
    assert!(tallyd(&["board", "restore", "first", "total", "--yes"]).contains("restored"));
    assert!(tallyd(&["board", "restore", "likes", "2026-W40", "--yes"]).contains("restored, 1 members"));
}

/// Returns the SQL block of docs/schema.md that contains this text.
fn step(mark: &str) -> AssertSqlSafe<String> {
    let text = fs::read_to_string(root().join("docs/schema.md")).unwrap();
    let mut blocks = text.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    AssertSqlSafe(blocks.find(|block| block.contains(mark)).unwrap().to_owned())
}

async fn execute(world: &World, sql: AssertSqlSafe<String>) {
    sqlx::raw_sql(sql).execute(&world.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_index_lists_what_a_user_likes() {
    let world = World::new("index", "").await;
    let rows = "INSERT INTO like_record VALUES \
                (1, 1, 7, 0, '2026-01-01'), (1, 2, 7, 1, '2026-01-02'), (1, 3, 7, 0, '2026-01-03'), (1, 4, 8, 0, '2026-01-04')";
    execute(&world, AssertSqlSafe(rows.to_owned())).await;
    execute(&world, step("ADD KEY")).await;
    let query = step("ORDER BY update_at DESC").0.replace('?', "7");
    let ids: Vec<u64> = sqlx::query_scalar(AssertSqlSafe(query)).fetch_all(&world.pool).await.unwrap();
    assert_eq!(ids, [3, 1]);
}
