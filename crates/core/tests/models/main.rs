//! Models of what surrounds tallyd's pure decisions. The decisions are the functions that the daemon calls.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod fence;
mod outbox;
mod prefetch;
mod queue;
mod repair;
mod session;

use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use stateright::{Checker, Model};

/// Visits every state of the model, and checks its properties in each.
fn check<M>(model: M)
where
    M: Model + Debug + Send + Sync + 'static,
    M::State: Clone + Debug + PartialEq + Hash + Send + Sync,
    M::Action: Clone + Debug + PartialEq,
{
    let (began, said) = (Instant::now(), format!("{model:?}"));
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states in {:.1} s: {said}", checker.unique_state_count(), began.elapsed().as_secs_f32());
    checker.assert_properties();
}
