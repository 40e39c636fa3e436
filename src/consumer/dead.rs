//! What the consumer can't apply becomes a dead letter.

use super::batch::{Origin, Received};
pub(super) use crate::dead::letter::{Headers, headers, refused};
use crate::event::{Reason, Refusal};
use crate::model::Micros;
use crate::store::letters::DeadLetter;

/// An event whose row the database refused, and no other's.
pub(super) fn refused_by_database(received: &Received, error: String, queue: &str, now: Micros) -> DeadLetter {
    let refusal = Refusal { reason: Reason::RefusedByDatabase, error };
    let Origin { body, headers } = received.origin.as_ref();
    refused(refusal, body.get(received.range.clone()).unwrap_or(body), headers, queue, now)
}
