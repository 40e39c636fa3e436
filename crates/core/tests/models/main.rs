//! Models of what surrounds tallyd's pure decisions. The decisions are the functions that the daemon calls.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod archive;
mod fence;
mod outbox;
mod prefetch;
mod queue;
mod repair;
mod session;
mod snapshots;
mod zsets;

use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Property};

/// The state of a model.
trait World: Clone + Debug + Hash + PartialEq + Send + Sync + 'static {
    type Event: Clone + Debug + PartialEq;

    /// Returns all events that can happen next.
    fn events(&self) -> Vec<Self::Event>;

    fn does(&mut self, event: Self::Event);

    /// Makes states equal that differ only in an order that does not matter.
    fn sort(&mut self) {}

    /// Whether the states after this one can show anything new.
    fn is_within_bounds(&self) -> bool {
        true
    }

    fn properties() -> Vec<Property<Following<Self>>>;
}

/// All states that follow these.
struct Following<W>(Vec<W>);

impl<W: World> Model for Following<W> {
    type State = W;
    type Action = W::Event;

    fn init_states(&self) -> Vec<W> {
        self.0.clone()
    }

    fn actions(&self, world: &W, actions: &mut Vec<W::Event>) {
        actions.extend(world.events());
    }

    fn next_state(&self, world: &W, event: W::Event) -> Option<W> {
        let mut next = world.clone();
        next.does(event);
        next.sort();
        Some(next)
    }

    fn within_boundary(&self, world: &W) -> bool {
        world.is_within_bounds()
    }

    fn properties(&self) -> Vec<Property<Self>> {
        W::properties()
    }
}

/// Returns the first number, or the second one with `TALLYD_TEST_SIZE=full` (dev/check-all).
fn size<T>(usual: T, full: T) -> T {
    if std::env::var("TALLYD_TEST_SIZE").is_ok_and(|size| size == "full") { full } else { usual }
}

/// Goes through all states that follow `starts`, until a property fails.
fn check<W: World>(bounds: &impl Debug, starts: Vec<W>) {
    let began = Instant::now();
    let checker = Following(starts).checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("{} states in {:.1} s: {bounds:?}", checker.unique_state_count(), began.elapsed().as_secs_f32());
    checker.assert_properties();
}
