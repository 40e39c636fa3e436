//! The exchange spreads events over the partitions by their target.

use std::collections::HashSet;

use sqlx::Row;
use tallyd_core::model::UserId;

use super::common::{Dice, Model, World, event_of, target};

const BY_USER: &str = "[amqp]\npartitions = 4";
const BY_TARGET: &str = "[amqp]\npartitions = 4\npartition_by = \"target\"";

/// Returns for each target the slots in which `counter` has rows of this target.
async fn slots(world: &World, from: u64) -> Vec<HashSet<u16>> {
    let rows = sqlx::query("SELECT GROUP_CONCAT(slot) FROM counter WHERE target_id >= ? GROUP BY target_id").bind(from);
    let rows = rows.fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| row.get::<String, _>(0).split(',').map(|slot| slot.parse().unwrap()).collect()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_are_spread_by_target_and_exact_while_clients_change_to_that() {
    let mut world = World::new("spread", BY_USER).await;
    let publisher = world.publisher().await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    let _daemon = world.daemon();
    let by_user = world.api_server();
    world.set(BY_TARGET);
    let by_target = world.api_server();
    let (mut dice, mut model) = (Dice::of_run(41), Model::default());
    // Two clients publish alternately. One client spreads its events by user, and the other client by target. Both
    // clients have the same users and targets.
    for number in 0..1_200 {
        let client = if number % 2 == 0 { &by_user } else { &by_target };
        let (target, user) = (target(1 + dice.below(20)), UserId(1 + dice.below(20)));
        let clicked = match dice.percent(60) {
            true => client.like(target, user, &[]).await.unwrap(),
            false => client.unlike(target, user, &[]).await.unwrap(),
        };
        model.apply(&event_of(clicked));
    }
    for id in 101..=120 {
        for user in 1..=10 {
            let clicked = by_target.like(target(id), UserId(user), &[]).await.unwrap();
            model.apply(&event_of(clicked));
        }
    }
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    let report = world.report(&["reconcile"]);
    assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &0.into()), "{report}");
    assert!(slots(&world, 1).await.iter().any(|slots| slots.len() > 1), "likes of the first client are spread by user");
    let slots = slots(&world, 101).await;
    assert_eq!(slots.len(), 20);
    assert!(slots.iter().all(|slots| slots.len() == 1), "a target's likes came through several partitions: {slots:?}");
    assert!(
        slots.iter().collect::<Vec<_>>().windows(2).any(|two| two[0] != two[1]),
        "all likes of a target came through one partition"
    );
}
