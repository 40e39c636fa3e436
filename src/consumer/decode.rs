//! Decodes a message into events. The message is in tallyd's own JSON format, or in the format that the `[[map]]` block
//! of its queue describes.

use std::ops::Range;

use tallyd_base::config::Map;
use tallyd_core::event::{self, Message, Refusal, Terms};
use tallyd_core::mapping::{self, Envelope};
use tallyd_core::model::Micros;

/// Only a message that was published directly to the queue can be a fence. API servers can only publish to exchanges,
/// so they cannot forge one.
pub(super) fn decode(
    body: &[u8],
    is_direct: bool,
    map: Option<(&Map, &Envelope)>,
    (terms, now): (&Terms, Micros),
    mut each: impl FnMut(Result<Message, Refusal>, Range<usize>),
) {
    let Some(map) = map else {
        return event::decode_all(body, terms, now, |verdict, range| {
            let verdict = verdict.and_then(|message| if is_direct { Ok(message) } else { message.of_publisher() });
            each(verdict, range);
        });
    };
    match event::fence_of(body).filter(|_| is_direct) {
        Some(fence) => each(Ok(Message::Fence(fence)), 0..body.len()),
        // A replayed dead letter is also published directly.
        None => mapping::decode_all(body, map, terms, now, each),
    }
}
