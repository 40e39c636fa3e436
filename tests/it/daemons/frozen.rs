//! A daemon is frozen within a transaction, and resumes after another daemon has taken over its partitions.

use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

use crate::common::site::taken_from;
use crate::common::{Dice, Model, World, body, eventually, target};

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_was_frozen_before_its_commit_writes_nothing_when_it_wakes_up() {
    // With two partitions, two tasks could reach the pause point at the same time. Then the test would count these two
    // stops as one stop.
    let settings = "[amqp]\npartitions = 1\nheartbeat_s = 1\n[consumer]\nbatch_events_max = 100\n";
    let world = World::new("frozen", settings).await;
    let publisher = world.publisher().await;
    let (mut dice, mut model) = (Dice::of_run(7), Model::default());
    let bodies: Vec<_> = (0..5_000)
        .map(|number| {
            let (target, user) = (target(1 + dice.below(50)), UserId(1 + dice.below(500)));
            let at = Micros(1_790_000_000_000_000 + number);
            let event = LikeEvent { target, user, at, liked: !dice.percent(30) };
            model.apply(&event);
            body(&event)
        })
        .collect();
    let points = ["consumer:before-commit"; 50].join(",");
    let frozen = world.consuming_with(&[("TALLYD_PAUSE_POINT", &points)]).await;
    world.publish(&publisher, &bodies).await;
    // The first session ends when it knows the size of the messages. A session that has committed nothing could still
    // take the partition, so the daemon commits a batch in its second session before the last stop.
    let taken = || frozen.log().matches("\"partition-taken\"").count();
    loop {
        eventually("the daemon is frozen", || async { frozen.is_stopped() }).await;
        if taken() == 2 {
            break;
        }
        frozen.signal("CONT");
    }
    let _other = world.daemon();
    taken_from(&world, &frozen).await;
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    const TABLES: &str = "CHECKSUM TABLE like_record, counter, outbox, applied_event";
    let sums = || async {
        let sums: Vec<(String, Option<i64>)> = sqlx::query_as(TABLES).fetch_all(&world.pool).await.unwrap();
        sums
    };
    let sessions = || frozen.log().matches("\"consuming\"").count();
    let (before, earlier) = ((sums().await, taken()), sessions());
    frozen.signal("CONT");
    // If the daemon wrote another batch, it would stop before the commit, and would begin no session.
    eventually("the resumed daemon begins a new session", || async { sessions() > earlier }).await;
    assert_eq!((sums().await, taken()), before, "the resumed daemon must not take any partition back");
    assert!(frozen.stop().success());
    assert_eq!(sums().await, before.0);
}
