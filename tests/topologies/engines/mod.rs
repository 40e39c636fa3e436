//! Tests MySQL on several servers: a failover behind a fixed address, and a Galera cluster, in which all nodes accept
//! writes. Other tests of this suite spread events by target.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod failover;
mod galera;
pub(crate) mod servers;
mod session;
mod settings;
mod spread;
mod vschema;

use crate::common;
use common::{Dice, Model, body, target};
use futures_util::future::join_all;
use tallyd_client::{Client, Event};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

/// Returns an endless stream of likes and unlikes of 2,000 users on 200 targets. Each event is later than the event
/// before it.
fn stream_of_likes(seed: u64) -> impl Iterator<Item = LikeEvent> {
    let mut dice = Dice::of_run(seed);
    (0..).map(move |number| LikeEvent {
        target: target(1 + dice.below(200)),
        user: UserId(1 + dice.below(2_000)),
        at: Micros(1_790_000_000_000_000 + number),
        liked: !dice.percent(20),
    })
}

/// Returns the bodies of the next `count` events, and applies the events to the model.
fn take(likes: &mut impl Iterator<Item = LikeEvent>, count: usize, model: &mut Model) -> Vec<(UserId, Vec<u8>)> {
    let events = likes.take(count).inspect(|event| model.apply(event));
    events.map(|event| body(&event)).collect()
}

/// Publishes the next events as lists, as the concurrent calls of an API server do. The first event of a list decides its
/// partition. Applies the events to the model.
async fn publish_lists(client: &Client, likes: &mut impl Iterator<Item = LikeEvent>, count: usize, model: &mut Model) {
    let events: Vec<Event> = likes.take(count).inspect(|event| model.apply(event)).map(Event::Like).collect();
    for at_once in events.chunks(500) {
        for published in join_all(at_once.iter().map(|event| client.publish(event, None))).await {
            published.unwrap();
        }
    }
}
