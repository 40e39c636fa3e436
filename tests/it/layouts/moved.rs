//! Counters migrate from one layout to another while likes continue.

use std::os::unix::process::ExitStatusExt;

use tallyd_core::model::UserId;
use tokio_util::sync::CancellationToken;

use super::{assert_all_equal, assert_read, crowd, settled};
use crate::common::scripts::Clicked;
use crate::common::{Daemon, Model, World, as_api, event_of, eventually, lose, redis_likes, stderr, stdout, target};

/// With this setting, Redis must count an event within 50 ms after the event's `at`. The default is one second.
const WAITS: &str = "[reconcile]\nclock_skew_max = \"50ms\"\n";

const SIGABRT: i32 = 6;

/// Returns four configurations: before the migration, before the switch, after the switch, and at the end.
fn settings(from: &str, to: &str) -> [String; 4] {
    let first = |layout: &str| format!("{WAITS}[redis]\n{layout}\n");
    let also = |layout: &str| format!("[redis.also]\n{layout}\n");
    [first(from), first(from) + &also(to), first(to) + &also(from), first(to)]
}

/// Returns the name of the layout that commands use.
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

/// Migrates the counters. The command itself checks the result. The test retries the command only while another run
/// holds the lock.
async fn migrate(world: &World, from: &str, to: &str) {
    eventually("the counters are migrated", || async {
        let ended = world.tallyd(&["admin", "layout", "migrate", "--from", name(from), "--to", name(to)]);
        let said = format!("{}{}", stdout(&ended), stderr(&ended));
        assert!(matches!(ended.status.code(), Some(0 | 75)), "{said}");
        assert_eq!(ended.status.success(), said.contains("agrees with MySQL"), "{said}");
        ended.status.success()
    })
    .await;
}

/// Restarts the daemon with the settings `settings`.
async fn restart(world: &mut World, daemon: Daemon, settings: &str) -> Daemon {
    assert!(daemon.stop().success());
    world.set(settings);
    world.consuming().await
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_move_between_layouts_while_likes_go_on() {
    for (number, (from, to)) in [(PACKED, MORE), (STRING, PACKED), (PACKED, ENTITY)].into_iter().enumerate() {
        let [before, meanwhile, after, end] = settings(from, to);
        let (mut world, mut daemon, publisher) = settled(&format!("moved_{number}"), &before).await;
        let mut model = Model::default();
        let stop = CancellationToken::new();
        let early = crowd(&world, 1, 30, &stop);
        eventually("more than 40 counters exist", || async { world.count("SELECT COUNT(*) FROM counter").await > 40 })
            .await;
        stop.cancel();
        model.rows.extend(early.await.unwrap().rows);

        daemon = restart(&mut world, daemon, &meanwhile).await;
        let stop = CancellationToken::new();
        let crowds = [crowd(&world, 2, 30, &stop), crowd(&world, 3, 30, &stop)];
        migrate(&world, from, to).await;
        // Some API servers already read the new layout, while others still read the old layout.
        daemon = restart(&mut world, daemon, &after).await;
        let switched = crowd(&world, 4, 30, &stop);
        migrate(&world, to, from).await;
        world.succeeds(&["reconcile", "--full"]).await;
        stop.cancel();
        for crowd in crowds.into_iter().chain([switched]) {
            model.rows.extend(crowd.await.unwrap().rows);
        }
        assert_all_equal(&world, &publisher, &model).await;
        migrate(&world, to, from).await;
        migrate(&world, from, to).await;
        daemon = restart(&mut world, daemon, &end).await;
        assert_read(&world, &model).await;

        let refused = world.tallyd(&["admin", "layout", "drop", name(to)]);
        assert_eq!(refused.status.code(), Some(64), "{}", stderr(&refused));
        let counted = stdout(&world.tallyd(&["admin", "layout", "drop", name(from), "--dry-run"]));
        let dropped = stdout(&world.tallyd(&["admin", "layout", "drop", "--yes", name(from)]));
        assert_eq!(counted.replace("to be deleted", "deleted"), dropped);
        assert!(!dropped.starts_with(&format!("{}: 0 keys", name(from))), "{dropped}");
        assert_eq!(world.tallyd(&["admin", "layout", "drop", &name(to).replace(':', ":0")]).status.code(), Some(64));
        let again = stdout(&world.tallyd(&["admin", "layout", "drop", "--yes", name(from)]));
        assert_eq!(again, format!("{}: 0 keys deleted\n", name(from)));
        assert_read(&world, &model).await;
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_is_killed_anywhere_is_completed_by_the_next() {
    let [before, meanwhile, _, end] = settings(PACKED, MORE);
    let (mut world, mut daemon, publisher) = settled("moved_killed", &before).await;
    let stop = CancellationToken::new();
    let early = crowd(&world, 1, 30, &stop);
    eventually("more than 40 counters exist", || async { world.count("SELECT COUNT(*) FROM counter").await > 40 })
        .await;
    stop.cancel();
    let mut model = early.await.unwrap();
    daemon = restart(&mut world, daemon, &meanwhile).await;
    let stop = CancellationToken::new();
    let crowd = crowd(&world, 2, 30, &stop);
    for point in ["reconcile:loading", "reconcile:loaded", "reconcile:compared"] {
        let mut command = world.command();
        command.args(["admin", "layout", "migrate", "--from", "packed:4", "--to", "packed:7"]);
        let ended = command.env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert_eq!(ended.status.signal(), Some(SIGABRT), "{point}: {}", stderr(&ended));
        let sql = "UPDATE job_lock SET lease_until = NOW(6) WHERE job = 'reconcile'";
        sqlx::query(sql).execute(&world.pool).await.unwrap();
    }
    stop.cancel();
    model.rows.extend(crowd.await.unwrap().rows);
    world.drained(&publisher).await;
    migrate(&world, PACKED, MORE).await;
    daemon = restart(&mut world, daemon, &end).await;
    assert_all_equal(&world, &publisher, &model).await;
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_api_server_counts_in_one_layout_alone_is_found_and_mended() {
    let [before, meanwhile, _, end] = settings(PACKED, MORE).map(|settings| as_api(&settings));
    let (mut world, mut daemon, publisher) = settled("moved_alone", &before).await;
    let behind = world.api_server();
    daemon = restart(&mut world, daemon, &meanwhile).await;
    let client = world.api_server();
    let mut model = Model::default();
    for id in 1..=30 {
        model.apply(&event_of(client.like(target(id), UserId(7), &[]).await.unwrap()));
    }
    world.drained(&publisher).await;
    migrate(&world, PACKED, MORE).await;
    for id in 1..=10 {
        model.apply(&event_of(behind.like(target(id), UserId(8), &[]).await.unwrap()));
    }
    world.drained(&publisher).await;
    migrate(&world, PACKED, MORE).await;
    let repaired = "SELECT COUNT(*) FROM repair WHERE outcome = 'done' AND added = 1";
    assert_eq!(world.count(repaired).await, 10);
    daemon = restart(&mut world, daemon, &end).await;
    assert_all_equal(&world, &publisher, &model).await;
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layout_that_was_left_is_not_taken_for_loaded_when_it_comes_back() {
    let [before, meanwhile, _, end] = settings(PACKED, MORE);
    let (mut world, mut daemon, publisher) = settled("moved_back", &before).await;
    let mut model = Model::default();
    let like = async |world: &World, user| {
        let client = world.api_server();
        let event = event_of(client.like(target(1), UserId(user), &[]).await.unwrap());
        world.drained(&publisher).await;
        event
    };
    model.apply(&like(&world, 1).await);
    daemon = restart(&mut world, daemon, &meanwhile).await;
    migrate(&world, PACKED, MORE).await;
    daemon = restart(&mut world, daemon, &end).await;
    assert!(world.tallyd(&["reconcile", "--changed"]).status.success());
    model.apply(&like(&world, 2).await);
    // The daemon returns to the first layout. The second layout is no longer configured. Its keys still exist, but do
    // not have the newest like.
    daemon = restart(&mut world, daemon, &before).await;
    let compared = world.tallyd(&["reconcile", "--changed"]);
    assert!(stderr(&compared).contains("layout-stale"), "{}", stderr(&compared));
    assert_all_equal(&world, &publisher, &model).await;
    // The next migration loads all counters into the second layout again.
    model.apply(&like(&world, 3).await);
    daemon = restart(&mut world, daemon, &meanwhile).await;
    migrate(&world, PACKED, MORE).await;
    daemon = restart(&mut world, daemon, &end).await;
    assert_all_equal(&world, &publisher, &model).await;
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_stops_when_redis_loses_what_readers_need_and_goes_on_afterwards() {
    let [before, meanwhile, _, end] = settings(STRING, PACKED);
    let (mut world, mut daemon, publisher) = settled("moved_flushed", &before).await;
    let stop = CancellationToken::new();
    let early = crowd(&world, 1, 0, &stop);
    eventually("more than 40 counters exist", || async { world.count("SELECT COUNT(*) FROM counter").await > 40 })
        .await;
    stop.cancel();
    let model = early.await.unwrap();
    world.drained(&publisher).await;
    daemon = restart(
        &mut world,
        daemon,
        &(meanwhile.clone() + "[reconcile]\npause_ms = 60000\npage_targets = 1\n").replace(WAITS, ""),
    )
    .await;
    let migrating = world
        .command()
        .args(["admin", "layout", "migrate", "--from", "string:4", "--to", "packed:4"])
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let running = "SELECT COUNT(*) FROM job_run WHERE mode = 'layout' AND layout IS NOT NULL";
    eventually("the migration is running", || async { world.count(running).await == 1 }).await;
    lose(&world).await;
    let ended = tokio::task::spawn_blocking(|| migrating.wait_with_output().unwrap()).await.unwrap();
    assert_eq!(ended.status.code(), Some(75), "{}", stderr(&ended));
    assert!(stderr(&ended).contains("Redis has lost counters"), "{}", stderr(&ended));
    daemon = restart(&mut world, daemon, &meanwhile).await;
    world.succeeds(&["reconcile"]).await;
    migrate(&world, STRING, PACKED).await;
    daemon = restart(&mut world, daemon, &end).await;
    assert_all_equal(&world, &publisher, &model).await;
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_api_servers_on_either_side_of_the_switch_count_a_click_once() {
    let [_, meanwhile, after, _] = settings(PACKED, MORE).map(|settings| as_api(&settings));
    let (mut world, daemon, publisher) = settled("moved_switch", &meanwhile).await;
    let not_yet = world.api_server();
    world.set(&after);
    assert!(world.tallyd(&["admin", "layout", "migrate", "--from", "packed:4", "--to", "packed:7"]).status.success());
    let already = world.api_server();
    let first = not_yet.like(target(1), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert!(matches!(already.like(target(1), UserId(7), &[]).await.unwrap(), Clicked::Same { count: Some(1), .. }));
    let second = already.like(target(2), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert!(matches!(not_yet.like(target(2), UserId(7), &[]).await.unwrap(), Clicked::Same { count: Some(1), .. }));
    assert!(!not_yet.take_back(&second, &[]).await.unwrap(), "the other request can still publish the like");
    assert!(not_yet.take_back(&second, &[]).await.unwrap(), "both layouts must have the same `at`");
    let blind = not_yet.count(target(3), UserId(7), true, &[]).await.unwrap();
    not_yet.publish_counted(&blind).await.unwrap();
    for client in [&not_yet, &already] {
        let likes = redis_likes(client, &[target(1), target(2), target(3)]).await;
        assert_eq!(likes, [Some(1), Some(0), Some(1)]);
    }
    let mut model = Model::default();
    // The second like was published before the client undid it in Redis, so MySQL gets it, too.
    for event in [first.event, second.event, blind.event] {
        model.apply(&event);
    }
    world.drained(&publisher).await;
    world.assert_rows_equal(&model).await;
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn layouts_that_are_not_in_the_configuration_are_refused_with_what_to_do() {
    let mut world = World::new("moved_refused", WAITS).await;
    let refused = |arguments: &[&str], world: &World| {
        let ended = world.tallyd(arguments);
        assert_eq!(ended.status.code(), Some(64), "{}", stderr(&ended));
        stderr(&ended)
    };
    let migrate = ["admin", "layout", "migrate", "--from", "packed:4", "--to", "packed:9"];
    assert!(refused(&migrate, &world).contains("has no [redis.also]"));
    let [_, meanwhile, ..] = settings(PACKED, MORE);
    world.set(&meanwhile);
    assert!(refused(&migrate, &world).contains("write --from packed:4 --to packed:7"));
    for layout in ["packed:4", "packed:7"] {
        assert!(
            refused(&["admin", "layout", "drop", layout], &world)
                .contains("remove that layout from [redis] and [redis.also] first")
        );
    }
    assert!(refused(&["admin", "layout", "drop", "hash:3"], &world).contains("write packed:BITS"));
    assert!(refused(&["admin", "layout", "drop", "string:4", "--counter-key", "x"], &world).contains("lacks {id}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_another_layout_is_refused_and_unloads_nothing() {
    let [before, meanwhile, _, other] = settings(PACKED, MORE);
    let (mut world, daemon, publisher) = settled("moved_other", &before).await;
    let mut model = Model::default();
    let client = world.api_server();
    for id in 1..=5 {
        model.apply(&event_of(client.like(target(id), UserId(7), &[]).await.unwrap()));
    }
    world.drained(&publisher).await;
    assert!(world.tallyd(&["reconcile", "--changed"]).status.success());
    for (settings, theirs) in [(&other, "packed:7"), (&meanwhile, "packed:4 and packed:7")] {
        world.set(settings);
        for arguments in [vec!["reconcile"], vec!["reconcile", "--target", "video:1"]] {
            let refused = world.tallyd(&arguments);
            assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
            let why = format!("the daemon that started last counts in packed:4, but this configuration has {theirs}:");
            assert!(stderr(&refused).contains(&why), "{}", stderr(&refused));
        }
    }
    world.set(&before);
    assert_eq!(world.report(&["reconcile", "--changed"])["buckets_loaded"], 0);
    assert_read(&world, &model).await;
    assert!(daemon.stop().success());
}
