//! Events arrive in any order, through two partitions, with redeliveries, crashes and rival transactions. The result
//! must be equal to the model.

use tallyd_core::model::UserId;
use tallyd_mysql::Store;

use super::common::{Dice, World, eventually, stderr};
use super::{Event, UNREAD, What, bodies, model, published, start, unread};

/// Makes `count` events of the last minute, for `targets` targets.
fn some(seed: u64, count: usize, targets: u64) -> Vec<Event> {
    let (mut dice, start) = (Dice::of_run(seed), start());
    let event = |_| {
        let what = match dice.below(10) {
            0 => What::Reset,
            1 => What::Set(dice.below(50).cast_signed()),
            _ => What::Count(dice.below(9).cast_signed() - 2),
        };
        // The events have only 200 different times, so many events have the same time.
        (1 + dice.below(targets), start + dice.below(200).cast_signed() * 250_000, what)
    };
    (0..count).map(event).collect()
}

/// Returns the events and some duplicates in random order, with random routing keys.
fn shuffled(seed: u64, events: &[Event]) -> Vec<(UserId, Vec<u8>)> {
    let mut dice = Dice::of_run(seed);
    let mut all: Vec<(usize, Event)> = events.iter().copied().enumerate().collect();
    let again: Vec<_> = all.iter().filter(|_| dice.percent(30)).copied().collect();
    all.extend(again);
    for place in (1..all.len()).rev() {
        all.swap(place, usize::try_from(dice.below(place as u64 + 1)).unwrap());
    }
    all.into_iter().map(|(number, event)| published(number, event, dice.below(1_000))).collect()
}

#[tokio::test]
async fn sets_and_counts_end_the_same_in_any_order_on_two_partitions() {
    let settings = format!("[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 40\n{UNREAD}");
    let world = World::new("sets_order", &settings).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let events = some(11, 1_500, 12);
    world.consumed(&publisher, &shuffled(1, &events)).await;
    assert_eq!(unread(&world).await, model(&events));
    world.consumed(&publisher, &shuffled(2, &events)).await;
    assert_eq!(unread(&world).await, model(&events), "the same events again must change nothing");
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
}

#[tokio::test]
async fn a_set_survives_the_daemons_death_before_and_after_its_commit() {
    let world = World::new("sets_killed", &format!("[consumer]\nbatch_events_max = 70\n{UNREAD}")).await;
    let publisher = world.publisher().await;
    let events = some(12, 300, 5);
    world.publish(&publisher, &shuffled(3, &events)).await;
    for point in ["consumer:before-commit", "consumer:after-commit", "consumer:after-commit", "consumer:before-commit"]
    {
        let crashed = world.command().env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&crashed).contains("fault-point"), "{}", stderr(&crashed));
    }
    let mut daemon = world.consuming().await;
    let more = some(13, 2_000, 5);
    // The ids of these events are different from the ids of the first events.
    let numbered: Vec<_> =
        more.iter().enumerate().map(|(at, event)| published(at + 1_000, *event, at as u64)).collect();
    for piece in numbered.chunks(500) {
        world.publish(&publisher, piece).await;
        daemon.kill();
        daemon = world.daemon();
    }
    world.drained(&publisher).await;
    assert_eq!(unread(&world).await, model(&[events, more].concat()));
}

#[tokio::test]
async fn what_was_lately_added_is_emptied_while_batches_are_written() {
    let world = World::new("sets_prune", &format!("[consumer]\nbatch_events_max = 20\n{UNREAD}")).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let events = some(14, 2_000, 20);
    let published = bodies(&events);
    let store = Store::new(&world.config.mysql, 2).unwrap();
    let publishing = async { world.publish(&publisher, &published).await };
    let emptying = async {
        let old = tallyd_base::runtime::clock::now().0 - 20 * 86_400_000_000;
        for number in 0..8 {
            let insert = format!("INSERT INTO recent_delta VALUES (1, 1, 4, {}, REPEAT('x', 16), 7)", old + number);
            sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&world.pool).await.unwrap();
            let keep = world.config.consumer.applied_event_keep.0;
            eventually("the old day is emptied", || async {
                // If another session uses the table, the deletion waits for a few seconds and then fails. The daemon
                // also empties old days when it starts.
                store.forget_applied(tallyd_base::runtime::clock::now(), keep).await.is_ok()
                    && world.count("SELECT COUNT(*) FROM recent_delta WHERE id = REPEAT('x', 16)").await == 0
            })
            .await;
        }
    };
    tokio::join!(publishing, emptying);
    world.drained(&publisher).await;
    assert_eq!(unread(&world).await, model(&events));
}

/// Locks the counters from the last to the first. The daemon locks the counters from the first to the last. This
/// transaction has changed more rows than a batch changes. So in a deadlock, MySQL usually aborts the batch of the
/// daemon.
async fn lock_backwards(world: &World, rounds: u32) {
    sqlx::query("CREATE TABLE ballast (n INT)").execute(&world.pool).await.unwrap();
    let rows = vec!["(1)"; 2_000].join(",");
    for _ in 0..rounds {
        let mut tx = world.pool.begin().await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(format!("INSERT INTO ballast VALUES {rows}"))).execute(&mut *tx).await.unwrap();
        for id in (1..=6).rev() {
            let locked =
                sqlx::query("SELECT value FROM number_set WHERE kind = 1 AND target_id = ? AND metric = 4 FOR UPDATE")
                    .bind(id)
                    .fetch_all(&mut *tx)
                    .await;
            // Sometimes MySQL aborts this transaction instead of the batch.
            if locked.is_err() {
                break;
            }
        }
        let _ = tx.rollback().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_partitions_that_set_and_count_the_same_numbers_end_as_the_model_says() {
    let settings =
        format!("[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 30\n[log]\nlevel = \"debug\"\n{UNREAD}");
    let world = World::new("sets_rivals", &settings).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let events = some(15, 6_000, 6);
    let bodies = shuffled(4, &events);
    // The daemon writes rows for these first events. Later, `lock_backwards` locks these rows.
    world.consumed(&publisher, &bodies[..500]).await;
    let publishing = async { world.publish(&publisher, &bodies[500..]).await };
    tokio::join!(publishing, lock_backwards(&world, 60));
    world.drained(&publisher).await;
    assert_eq!(unread(&world).await, model(&events));
    let slots = world.count("SELECT COUNT(DISTINCT slot) FROM counter WHERE metric = 4").await;
    assert_eq!(slots, 2, "both partitions have written");
    assert!(daemon.log().contains("\"contention\""), "MySQL must have aborted a batch because of a deadlock");
}
