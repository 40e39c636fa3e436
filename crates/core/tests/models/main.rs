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

use stateright::{Checker, HasDiscoveries, Model};

/// Returns the first number, or the second one with `TALLYD_TEST_SIZE=full` (dev/check-all).
fn size<T>(usual: T, full: T) -> T {
    if std::env::var("TALLYD_TEST_SIZE").is_ok_and(|size| size == "full") { full } else { usual }
}

/// Goes through all states of the model, until a property fails.
fn check<M>(model: M, bounds: &impl Debug)
where
    M: Model<State: Clone + Debug + Hash + PartialEq + Send + Sync, Action: Clone + Debug + PartialEq>
        + Send
        + Sync
        + 'static,
{
    let began = Instant::now();
    let checker = model.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("{} states in {:.1} s: {bounds:?}", checker.unique_state_count(), began.elapsed().as_secs_f32());
    checker.assert_properties();
}
