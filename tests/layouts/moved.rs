//! Counters move from one layout to another while likes go on.

use std::os::unix::process::ExitStatusExt;

use tallyd::client::{Clicked, Client};
use tallyd::model::{Metric, UserId};
use tokio_util::sync::CancellationToken;

use crate::common::{Model, World, eventually, redis_likes, stderr, stdout, target};
use crate::{assert_all_equal, assert_read, crowd, settled};

/// What a producer's clock may be off, and a second count late.
const WAITS: &str = "[reconcile]\nclock_skew_max = \"50ms\"\n";

const SIGABRT: i32 = 6;

/// The configuration of before, of meanwhile and of after the switch, and of the end.
fn settings(from: &str, to: &str) -> [String; 4] {
    let first = |layout: &str| format!("{WAITS}[redis]\n{layout}\n");
    let also = |layout: &str| format!("[redis.also]\n{layout}\n");
    [first(from), first(from) + &also(to), first(to) + &also(from), first(to)]
}

/// As commands name it.
fn name(layout: &str) -> &'static str {
    match layout {
        PACKED => "packed:4",
        MORE => "packed:7",
        ENTITY => "entity:4",
        _ => "string:4",
    }
}

const PACKED: &str = "layout = \"packed\"\nbucket_bits = 4";
const MORE: &str = "layout = \"packed\"\nbucket_bits = 7";
const ENTITY: &str = "layout = \"entity\"\nbucket_bits = 4";
const STRING: &str = "layout = \"string\"\nbucket_bits = 4";

/// Brings the counters over, until that is proven.
async fn migrate(world: &World, from: &str, to: &str) {
    eventually("the counters have moved", || async {
        let ended = world.tallyd(&["layout", "migrate", "--from", name(from), "--to", name(to)]);
        if !ended.status.success() {
            eprintln!("{}{}", stdout(&ended), stderr(&ended));
        }
        ended.status.success() && stderr(&ended).contains("has what MySQL has")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_move_between_layouts_while_likes_go_on() {
    for (number, (from, to)) in [(PACKED, MORE), (STRING, PACKED), (PACKED, ENTITY)].into_iter().enumerate() {
        let [before, meanwhile, after, end] = settings(from, to);
        let (mut world, daemon, publisher) = settled(&format!("moved_{number}"), &before).await;
        let mut model = Model::default();
        let stop = CancellationToken::new();
        let early = crowd(&world, 1, 30, &stop);
        eventually("something is counted", || async { world.count("SELECT COUNT(*) FROM counter").await > 40 }).await;
        stop.cancel();
        model.rows.extend(early.await.unwrap().rows);

        world.set(&meanwhile);
        let stop = CancellationToken::new();
        let crowds = [crowd(&world, 2, 30, &stop), crowd(&world, 3, 30, &stop)];
        migrate(&world, from, to).await;
        // Some API servers read the new layout already, others still the old one.
        world.set(&after);
        let switched = crowd(&world, 4, 30, &stop);
        migrate(&world, to, from).await;
        world.set(&meanwhile);
        migrate(&world, from, to).await;
        stop.cancel();
        for crowd in crowds.into_iter().chain([switched]) {
            model.rows.extend(crowd.await.unwrap().rows);
        }
        world.drained(&publisher).await;
        migrate(&world, from, to).await;
        assert_all_equal(&world, &publisher, &model).await;
        world.set(&end);
        assert_read(&world, &model).await;

        let refused = world.tallyd(&["layout", "drop", name(to)]);
        assert_eq!(refused.status.code(), Some(64), "{}", stderr(&refused));
        let counted = stdout(&world.tallyd(&["layout", "drop", name(from), "--dry-run"]));
        let dropped = stdout(&world.tallyd(&["layout", "drop", name(from)]));
        assert_eq!(counted.replace("to be deleted", "deleted"), dropped);
        assert!(!dropped.starts_with(&format!("{}: 0 keys", name(from))), "{dropped}");
        let again = stdout(&world.tallyd(&["layout", "drop", name(from)]));
        assert_eq!(again, format!("{}: 0 keys deleted\n", name(from)));
        assert_read(&world, &model).await;
        assert!(daemon.stop().success());
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_is_killed_anywhere_is_completed_by_the_next() {
    let [before, meanwhile, _, end] = settings(PACKED, MORE);
    let (mut world, daemon, publisher) = settled("moved_killed", &before).await;
    let stop = CancellationToken::new();
    let early = crowd(&world, 1, 30, &stop);
    eventually("something is counted", || async { world.count("SELECT COUNT(*) FROM counter").await > 40 }).await;
    stop.cancel();
    let mut model = early.await.unwrap();
    world.set(&meanwhile);
    let stop = CancellationToken::new();
    let crowd = crowd(&world, 2, 30, &stop);
    for point in ["reconcile:loading", "reconcile:loaded", "reconcile:compared"] {
        let mut command = world.command();
        command.args(["layout", "migrate", "--from", "packed:4", "--to", "packed:7"]);
        let ended = command.env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert_eq!(ended.status.signal(), Some(SIGABRT), "{point}: {}", stderr(&ended));
        let sql = "UPDATE job_lock SET lease_until = NOW(6) WHERE job = 'reconcile'";
        sqlx::query(sql).execute(&world.pool).await.unwrap();
    }
    stop.cancel();
    model.rows.extend(crowd.await.unwrap().rows);
    world.drained(&publisher).await;
    migrate(&world, PACKED, MORE).await;
    world.set(&end);
    assert_all_equal(&world, &publisher, &model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_api_server_counts_in_one_layout_alone_is_found_and_mended() {
    let [before, meanwhile, _, end] = settings(PACKED, MORE);
    let (mut world, daemon, publisher) = settled("moved_alone", &before).await;
    let behind = Client::new(&world.config).unwrap();
    world.set(&meanwhile);
    let client = Client::new(&world.config).unwrap();
    let mut model = Model::default();
    for id in 1..=30 {
        model.apply(&client.like(target(id), UserId(7), &[]).await.unwrap().counted().unwrap().event);
    }
    world.drained(&publisher).await;
    migrate(&world, PACKED, MORE).await;
    for id in 1..=10 {
        model.apply(&behind.like(target(id), UserId(8), &[]).await.unwrap().counted().unwrap().event);
    }
    world.drained(&publisher).await;
    migrate(&world, PACKED, MORE).await;
    let repaired = "SELECT COUNT(*) FROM repair WHERE outcome = 'done' AND added = 1";
    assert_eq!(world.count(repaired).await, 10);
    world.set(&end);
    assert_all_equal(&world, &publisher, &model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_api_servers_on_either_side_of_the_switch_count_a_click_once() {
    let [_, meanwhile, after, _] = settings(PACKED, MORE);
    let (mut world, daemon, publisher) = settled("moved_switch", &meanwhile).await;
    let not_yet = Client::new(&world.config).unwrap();
    world.set(&after);
    assert!(world.tallyd(&["layout", "migrate", "--from", "packed:4", "--to", "packed:7"]).status.success());
    let already = Client::new(&world.config).unwrap();
    let first = not_yet.like(target(1), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert_eq!(already.like(target(1), UserId(7), &[]).await.unwrap(), Clicked::Same { count: Some(1) });
    let second = already.like(target(2), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert_eq!(not_yet.like(target(2), UserId(7), &[]).await.unwrap(), Clicked::Same { count: Some(1) });
    assert!(not_yet.take_back(&second, &[]).await.unwrap(), "it has the same `at` in both");
    let blind = not_yet.count(target(3), UserId(7), true, &[]).await.unwrap();
    not_yet.publish(&blind).await.unwrap();
    for client in [&not_yet, &already] {
        let likes = redis_likes(client, &[target(1), target(2), target(3)]).await;
        assert_eq!(likes, [Some(1), Some(0), Some(1)]);
    }
    let mut model = Model::default();
    // The one that was taken back had been published.
    for event in [first.event, second.event, blind.event] {
        model.apply(&event);
    }
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    let numbers = already.read(&[target(1)]).await.unwrap();
    assert_eq!(numbers[0].get(Metric(1)), Some(1));
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test]
async fn layouts_that_are_not_in_the_configuration_are_refused_with_what_to_do() {
    let mut world = World::new("moved_refused", WAITS).await;
    let refused = |arguments: &[&str], world: &World| {
        let ended = world.tallyd(arguments);
        assert_eq!(ended.status.code(), Some(64), "{}", stderr(&ended));
        stderr(&ended)
    };
    let migrate = ["layout", "migrate", "--from", "packed:4", "--to", "packed:9"];
    assert!(refused(&migrate, &world).contains("has no [redis.also]"));
    let [_, meanwhile, ..] = settings(PACKED, MORE);
    world.set(&meanwhile);
    assert!(refused(&migrate, &world).contains("write --from packed:4 --to packed:7"));
    for layout in ["packed:4", "packed:7"] {
        assert!(refused(&["layout", "drop", layout], &world).contains("take it out of [redis] and [redis.also] first"));
    }
    assert!(refused(&["layout", "drop", "hash:3"], &world).contains("write packed:BITS"));
    assert!(refused(&["layout", "drop", "string:4", "--counter-key", "x"], &world).contains("lacks {id}"));
    world.close().await;
}
