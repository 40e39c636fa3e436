//! An erase run crashes between any two steps, and a later run completes it.

use std::process::{Child, Output, Stdio};

use redis::AsyncCommands;
use serde_json::json;
use tallyd_core::model::UserId;
use tallyd_core::period::{Calendar, Period, PeriodKind};
use tallyd_moving::erase::FAULT_POINTS;

use super::{Likes, METRICS, USER, VIDEO, erase, named, report};
use crate::common::{World, eventually, signal, stderr, target};

const BOARD: &str = "[[rule]]\nmetric = \"like\"\nboard = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"\narchive_grace = \"0s\"\nexpire_after = \"1h\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn an_erase_that_is_killed_anywhere_is_ended_by_the_next() {
    for (number, point) in FAULT_POINTS.into_iter().enumerate() {
        let world = World::new(&format!("erase_killed_{number}"), &format!("{METRICS}{BOARD}")).await;
        let publisher = world.publisher().await;
        let mut likes = Likes::new();
        for user in 1..=20 {
            likes.add(target(VIDEO), UserId(user));
            likes.add(target(user), UserId(user));
        }
        likes.publish(&world, &publisher).await;
        let daemon = world.daemon();
        world.drained(&publisher).await;
        // On this day, which is archived, other members have the same score as the target.
        let today = Period::containing(PeriodKind::Day, tallyd_base::runtime::clock::now(), &Calendar::UTC);
        let key = world.cache.keys.board("hot", &today.previous().unwrap().to_string());
        for member in [VIDEO, 7, 90_000_000_000] {
            let () = world.redis().await.zadd(&key, member.to_string(), 3.0).await.unwrap();
        }
        assert!(world.tallyd(&["archive"]).status.success());

        let name = format!("video:{VIDEO}");
        let mut command = world.command();
        let killed = command
            .args(["admin", "erase", "--yes", "--target", &name])
            .env("TALLYD_FAULT_POINT", point)
            .output()
            .unwrap();
        assert!(stderr(&killed).contains("fault-point"), "{point}: {}", stderr(&killed));
        // The test ends the leases of the killed run.
        world.end_leases().await;
        let resumed = report(&erase(&world, &["--target", &name, "--resume"]), 0);
        assert_eq!(resumed["liked_again"], 0, "{point}");
        assert_eq!(named(&world, VIDEO).await, [] as [String; 0], "{point}");

        likes.model.rows.retain(|(of, _), _| *of != target(VIDEO));
        world.assert_equals(&likes.model).await;
        let places = "SELECT COUNT(*) FROM leaderboard_archive WHERE member = '0' AND place = 3";
        assert_eq!(world.count(places).await, 1, "{point}");
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_erase_goes_on_after_the_last_page() {
    let world = World::new("erase_resumed", METRICS).await;
    let publisher = world.publisher().await;
    let mut likes = Likes::new();
    // The user likes more targets than one page holds.
    (1..=2_500).for_each(|id| likes.add(target(id), USER));
    likes.publish(&world, &publisher).await;
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    let user = USER.to_string();
    let mut command = world.command();
    let killed = command
        .args(["admin", "erase", "--yes", "--user", &user])
        .env("TALLYD_FAULT_POINT", "erase:page")
        .output()
        .unwrap();
    assert!(stderr(&killed).contains("fault-point"), "{}", stderr(&killed));
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 500, "one page is done");
    world.end_leases().await;

    // This run must not use the checkpoint of a run for another id.
    let other = report(&erase(&world, &["--target", "video:2600", "--resume"]), 0);
    assert!(other["resumed_run"].is_null(), "{other}");
    let resumed = report(&erase(&world, &["--user", &user, "--resume"]), 0);
    assert!(resumed["resumed_run"].is_u64(), "{resumed}");
    assert_eq!((&resumed["rows"], &resumed["unlikes"]), (&json!(2_500), &json!(2_500)));
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_is_newer_than_the_unlike_stays_and_is_reported() {
    let world = World::new("erase_again", METRICS).await;
    let publisher = world.publisher().await;
    let mut likes = Likes::new();
    (1..=9).for_each(|user| likes.add(target(VIDEO), UserId(user)));
    likes.publish(&world, &publisher).await;
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    let name = format!("video:{VIDEO}");
    let frozen = frozen_at("erase:published", &world, &["--target", &name]).await;
    likes.add(target(VIDEO), UserId(5));
    likes.publish(&world, &publisher).await;
    let first = report(&thawed(frozen), 1);
    assert_eq!((&first["rows"], &first["liked_again"]), (&json!(8), &json!(1)));
    assert!(first["left"].to_string().contains("1 like records were written after the unlikes"), "{first}");
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 5 AND is_del = 0").await, 1);

    assert_eq!(report(&erase(&world, &["--target", &name]), 0)["rows"], 1);
    assert_eq!(named(&world, VIDEO).await, [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_the_consumers_ends_an_erase_and_resume_continues_it() {
    let world = World::new("erase_paused", METRICS).await;
    let publisher = world.publisher().await;
    let mut likes = Likes::new();
    // The user likes more targets than one page holds.
    (1..=2_500).for_each(|id| likes.add(target(id), USER));
    likes.publish(&world, &publisher).await;
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    let user = USER.to_string();
    let frozen = frozen_at("erase:page", &world, &["--user", &user]).await;
    assert!(world.tallyd(&["pause", "consumer"]).status.success());
    let held = "SELECT COUNT(*) FROM partition_owner WHERE owner IS NOT NULL";
    eventually("the consumers are paused", || async { world.count(held).await == 0 }).await;
    let output = thawed(frozen);
    assert!(stderr(&output).contains("consumer is paused until"), "{}", stderr(&output));
    let paused = report(&output, 75);
    assert_eq!((&paused["ended"], &paused["rows"]), (&json!("stopped"), &json!(2_000)), "{paused}");
    assert_eq!(paused["ended_early"], "it was stopped: --resume continues");

    assert!(world.tallyd(&["resume", "consumer"]).status.success());
    let rest = report(&erase(&world, &["--user", &user, "--resume"]), 0);
    assert_eq!((&rest["ended"], &rest["rows"]), (&json!("done"), &json!(2_500)), "{rest}");
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
}

/// Starts an erase, and waits until it has stopped itself at the pause point.
async fn frozen_at(point: &str, world: &World, arguments: &[&str]) -> Child {
    let mut command = world.command();
    let command =
        command.args(["admin", "erase", "--yes", "--format", "json"]).args(arguments).env("TALLYD_PAUSE_POINT", point);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the erase has stopped itself", || async {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    })
    .await;
    child
}

/// Lets a frozen erase run to its end.
fn thawed(frozen: Child) -> Output {
    signal(&frozen, "CONT");
    frozen.wait_with_output().unwrap()
}
