//! Tests the counters in each layout, and during a migration from one layout to another.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod moved;
mod old_keys;
mod plain;
mod read;
mod warned;

use std::sync::Arc;

use crate::common;
use common::{Daemon, Dice, Model, World, event_of, redis_likes, target};
use tallyd_core::model::UserId;
use tallyd_rabbitmq::Publisher;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The number of targets on which users click.
const TARGETS: u64 = 60;

/// Starts a test environment with a daemon, and loads all counters into Redis.
async fn settled(name: &str, settings: &str) -> (World, Daemon, Publisher) {
    let world = World::new(name, settings).await;
    let daemon = world.consuming().await;
    // The daemon can be running a reconcile, so the test retries.
    world.succeeds(&["reconcile"]).await;
    let publisher = world.publisher().await;
    (world, daemon, publisher)
}

/// Starts a task in which users click until `stop`. Tasks with different values of `number` have different users.
/// `unlikes` is the percentage of clicks that are unlikes. The task returns a model of the clicks that Redis counted.
fn crowd(world: &World, number: u64, unlikes: u64, stop: &CancellationToken) -> JoinHandle<Model> {
    let client = Arc::new(world.api_server());
    let stop = stop.clone();
    tokio::spawn(async move {
        let (mut model, mut dice, mut next) = (Model::default(), Dice::of_run(number), number * 1_000_000);
        while !stop.is_cancelled() {
            let known = model.rows.iter().find(|(_, (_, liked))| *liked).map(|(pair, _)| *pair);
            let clicked = match known {
                Some((target, user)) if dice.percent(unlikes) => client.unlike(target, user, &[]).await,
                _ => {
                    next += 1;
                    client.like(target(1 + dice.below(TARGETS)), UserId(next), &[]).await
                }
            };
            model.apply(&event_of(clicked.unwrap()));
        }
        model
    })
}

/// Checks that MySQL is equal to the model, and that a client reads the same counts from Redis.
async fn assert_all_equal(world: &World, publisher: &Publisher, model: &Model) {
    world.drained(publisher).await;
    world.assert_equals(model).await;
    assert_read(world, model).await;
}

async fn assert_read(world: &World, model: &Model) {
    let client = world.api_server();
    let targets: Vec<_> = (1..=TARGETS).map(target).collect();
    let counters = model.counters();
    let expected: Vec<_> = targets.iter().map(|target| Some(counters.get(target).copied().unwrap_or(0))).collect();
    assert_eq!(redis_likes(&client, &targets).await, expected);
}
