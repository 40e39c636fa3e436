//! A message to events: by tallyd's own JSON, or by the map whose queue it came through.

use std::ops::Range;

use crate::config::Map;
use tallyd_core::event::{self, Message, Refusal, Terms};
use tallyd_core::mapping;
use tallyd_core::model::Micros;

/// Judges a body. `is_direct`: it was published to the queue itself. API servers can publish to exchanges alone, so none of them can forge a
/// fence.
pub(super) fn decode(
    body: &[u8],
    is_direct: bool,
    map: Option<&Map>,
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
        // A dead letter that is replayed is direct, too.
        None => mapping::decode_all(body, map, terms, now, each),
    }
}
