//! What the consumer can't apply becomes a dead letter.

use super::batch::{Origin, Received};
pub(super) use crate::dead_letters::letter::{Headers, headers, refused};
use crate::event::Refusal;
use crate::model::Micros;
use crate::store::letters::DeadLetter;

/// An event that could be read and is refused all the same.
pub(super) fn refused_event(received: &Received, refusal: Refusal, queue: &str, now: Micros) -> DeadLetter {
    let Origin { body, headers } = received.origin.as_ref();
    refused(refusal, body.get(received.range.clone()).unwrap_or(body), headers, queue, now)
}
