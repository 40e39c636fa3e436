//! Tests `tallyd admin export`, which keeps a site's old table up to date after the site has switched to tallyd.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::collections::BTreeSet;
use std::process::Stdio;

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_rabbitmq::Publisher;

use crate::common::{Daemon, Dice, Model, World, body, eventually, signal, stack, stderr, stdout, target};

/// An export to a table in which an unlike deletes the row.
const HARD: &str = "[[export]]\nname = \"old\"\nkind = \"video\"\n\
    upsert = \"INSERT INTO old_likes (post_id, user_id, created_at) VALUES (:target, :user, :at) ON DUPLICATE KEY UPDATE created_at = created_at -- keep\"\n\
    delete = \"DELETE FROM old_likes WHERE post_id = :target AND user_id = :user # one\"\n";

const HARD_TABLE: &str =
    "CREATE TABLE old_likes (post_id BIGINT, user_id BIGINT, created_at DATETIME(6), PRIMARY KEY (post_id, user_id))";

/// An export to a table in which an unlike keeps the row. Times are in milliseconds.
const SOFT: &str = "[[export]]\nname = \"old\"\nkind = \"video\"\nunit = \"ms\"\n\
    upsert = \"INSERT INTO old_likes VALUES (:target, :user, :deleted, :at) ON DUPLICATE KEY UPDATE gone = VALUES(gone), at_ms = VALUES(at_ms)\"\n";

const SOFT_TABLE: &str = "CREATE TABLE old_likes (post_id BIGINT, user_id BIGINT, gone BOOLEAN, at_ms BIGINT, PRIMARY KEY (post_id, user_id))";

async fn run(world: &World, sql: &str) {
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&world.pool).await.unwrap();
}

/// Makes a site that has just switched to tallyd, with a daemon and the old table.
async fn site(name: &str, export: &str, table: &str) -> (World, Publisher, Daemon) {
    let world = World::new(name, export).await;
    run(&world, table).await;
    let publisher = world.publisher().await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    (world, publisher, daemon)
}

/// Publishes likes and unlikes of 40 users on 30 targets.
async fn click(world: &World, publisher: &Publisher, dice: &mut Dice, model: &mut Model, clicks: u64) {
    let one = |_| {
        let (on, user, liked) = (target(1 + dice.below(30)), UserId(1 + dice.below(40)), dice.percent(60));
        let event = LikeEvent { target: on, user, at: tallyd_base::runtime::clock::now(), liked };
        model.apply(&event);
        body(&event)
    };
    let events: Vec<_> = (0..clicks).map(one).collect();
    world.publish(publisher, &events).await;
}

fn liked(model: &Model) -> BTreeSet<(u64, u64)> {
    let liked = model.rows.iter().filter(|(_, (_, is_del))| !is_del);
    liked.map(|((target, user), _)| (target.id.0, user.0)).collect()
}

/// Returns the target and the user of each row of the old table that fulfills `condition`.
async fn old(world: &World, condition: &str) -> BTreeSet<(u64, u64)> {
    let sql = format!("SELECT CAST(post_id AS UNSIGNED), CAST(user_id AS UNSIGNED) FROM old_likes WHERE {condition}");
    let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pass_writes_likes_and_unlikes_and_resume_continues_there() {
    let (world, publisher, _daemon) = site("export_hard", HARD, HARD_TABLE).await;
    // Both rows were written before the site switched to tallyd. After the switch, user 901 takes back the like of the
    // second row.
    run(&world, "INSERT INTO old_likes VALUES (1, 900, '2026-01-01'), (2, 901, '2026-01-01')").await;
    let (mut model, mut dice) = (Model::default(), Dice::of_run(5));
    let unlike =
        LikeEvent { target: target(2), user: UserId(901), at: tallyd_base::runtime::clock::now(), liked: false };
    model.apply(&unlike);
    world.publish(&publisher, &[body(&unlike)]).await;
    click(&world, &publisher, &mut dice, &mut model, 600).await;
    // The export skips an event that arrives two hours late.
    let at = tallyd_base::runtime::clock::now().before(std::time::Duration::from_secs(7_200));
    let late = LikeEvent { target: target(3), user: UserId(902), at, liked: true };
    world.publish(&publisher, &[body(&late)]).await;
    world.drained(&publisher).await;

    let first = world.report(&["admin", "export", "old", "--since", "30m"]);
    let mut expected = liked(&model);
    expected.insert((1, 900));
    assert_eq!(old(&world, "1").await, expected, "{first}");
    assert_eq!((&first["ended"], &first["passes"]), (&"done".into(), &1.into()), "{first}");
    let since = first["since"].as_i64().unwrap();
    assert!(first["until"].as_i64().unwrap() > since, "{first}");

    click(&world, &publisher, &mut dice, &mut model, 300).await;
    world.drained(&publisher).await;
    let second = world.report(&["admin", "export", "old", "--resume"]);
    assert_eq!(second["since"], first["until"], "{second}");
    let mut expected = liked(&model);
    expected.insert((1, 900));
    assert_eq!(old(&world, "1").await, expected, "{second}");
    let text = stdout(&world.tallyd(&["admin", "export", "old", "--resume"]));
    assert!(
        text.contains("events that arrived more than 1 min 0 s late were not exported: `tallyd import --verify`"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn it_follows_live_likes_until_it_is_stopped_or_killed() {
    let server = format!("server = \"site\"\n[server.site]\nurl = \"{}{{world}}\"\n", stack("MYSQL_URL"));
    let (world, publisher, _daemon) = site("export_soft", &format!("{SOFT}{server}"), SOFT_TABLE).await;
    let (mut model, mut dice) = (Model::default(), Dice::of_run(6));
    let start = |begin: &[&str]| {
        let arguments = [&["admin", "export", "old", "--every", "1s"], begin].concat();
        world.command().args(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let follows = async |model: &Model| {
        world.drained(&publisher).await;
        eventually("the old table has all likes", || async { old(&world, "NOT gone").await == liked(model) }).await;
    };
    let mut running = start(&["--since", "1h"]);
    for _ in 0..3 {
        click(&world, &publisher, &mut dice, &mut model, 200).await;
        follows(&model).await;
    }
    let other = world.tallyd(&["admin", "export", "old", "--since", "1h"]);
    assert_eq!(other.status.code(), Some(75), "only one export can run: {}", stderr(&other));
    let times = "SELECT COUNT(*) FROM old_likes AS o JOIN like_record AS l ON l.target_id = o.post_id AND l.user_id = o.user_id \
                 WHERE l.is_del = o.gone AND FLOOR(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.update_at) / 1000) = o.at_ms";
    let rows = model.rows.len() as i64;
    eventually("each row has its event's time", || async { world.count(times).await == rows }).await;
    // The test kills the export and ends its lease. The next export continues after the killed export's last pass.
    running.kill().unwrap();
    running.wait().unwrap();
    click(&world, &publisher, &mut dice, &mut model, 200).await;
    world.end_leases().await;
    let resumed = world.tallyd(&["admin", "export", "old", "--resume"]);
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    follows(&model).await;

    let stopped = start(&["--resume"]);
    click(&world, &publisher, &mut dice, &mut model, 200).await;
    follows(&model).await;
    signal(&stopped, "TERM");
    let output = stopped.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("ended early: it was stopped: --resume continues"), "{}", stdout(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_that_can_not_be_run_are_refused_with_a_sentence() {
    let (world, publisher, _daemon) = site("export_refused", HARD, HARD_TABLE).await;
    let (mut model, mut dice) = (Model::default(), Dice::of_run(7));
    let refused = |arguments: &[&str], code, why: &str| {
        let output = world.tallyd(&[&["admin", "export"], arguments].concat());
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains(why), "{why}: {}", stderr(&output));
    };
    refused(
        &["old", "--resume"],
        1,
        "no run of old has stored its progress: add --since with the time of the cut-over",
    );
    refused(&["new", "--since", "1h"], 64, "no [[export]] is named new: the configured names are old");
    refused(&["old"], 64, "required arguments were not provided");
    refused(&["old", "--since", "1h", "--resume"], 64, "cannot be used with");
    click(&world, &publisher, &mut dice, &mut model, 20).await;
    world.drained(&publisher).await;
    run(&world, "RENAME TABLE old_likes TO moved_likes").await;
    refused(&["old", "--since", "1h"], 1, "[[export]] old: the server refuses a row from target ");
    // If the server rejects one row, the export writes no row of the same transaction.
    run(&world, "CREATE TABLE old_likes (post_id BIGINT, user_id TINYINT, created_at DATETIME(6), PRIMARY KEY (post_id, user_id))").await;
    let far =
        LikeEvent { target: target(30), user: UserId(70_000), at: tallyd_base::runtime::clock::now(), liked: true };
    world.publish(&publisher, &[body(&far)]).await;
    world.drained(&publisher).await;
    refused(&["old", "--since", "1h", "--every", "1s"], 1, "Out of range value for column 'user_id'");
    assert_eq!(old(&world, "1").await, BTreeSet::new());
    world.write(&HARD.replace(" AND user_id = :user", ""));
    refused(&["old", "--since", "1h"], 78, "[[export]] old: delete lacks :user");
    world.write(&HARD.replace("= :user", "= :user; DROP TABLE old_likes"));
    refused(&["old", "--since", "1h"], 78, "[[export]] old: delete has more than one statement");
}
