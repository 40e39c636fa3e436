//! Adds messages to a batch: unpacks and decodes each message, and makes dead letters of events that can't be applied.

use std::borrow::Cow;
use std::sync::Arc;

use tracing::debug;

use super::super::batch::{Arrived, Batch, Event, Origin, Received};
use super::super::counting::ReceivedCounts;
use super::super::decode::decode;
use crate::letter::packed::{ENCODINGS, unpacked};
use crate::letter::{self, Headers};
use tallyd_base::config::Map;
use tallyd_core::event::{LIST_EVENTS_MAX, Message, Reason, Refusal, Terms, traceparent_of};
use tallyd_core::model::Micros;
use tallyd_mysql::letters::DeadLetter;

#[derive(Default)]
pub(super) struct Filling {
    pub batch: Batch,
    pub oldest: Option<Micros>,
    pub received: ReceivedCounts,
}

impl Filling {
    pub(super) fn take(&mut self, message: Arrived, map: Option<&Map>, (terms, now): (&Terms, Micros), queue: &str) {
        self.received.messages += 1;
        self.received.redelivered += u64::from(message.redelivered);
        self.batch.messages += 1;
        self.batch.bytes += tallyd_core::flow::Message::bytes(&message);
        self.batch.clock.note(now);
        let Arrived {
            body,
            headers: Headers { json: headers, traceparent, .. },
            encoding,
            envelope,
            redelivered,
            is_direct,
            ..
        } = message;
        self.batch.belongs_to(traceparent.as_deref());
        let body = match unpacked(&body, encoding.as_deref()) {
            Ok(Cow::Borrowed(_)) => body,
            Ok(Cow::Owned(unpacked)) => {
                self.batch.bytes += unpacked.len();
                unpacked
            }
            Err(refusal) => {
                let letter = letter::refused(refusal, &body, &headers, queue, now);
                return self.batch.refused.push(letter);
            }
        };
        let map = map.map(|map| (map, &envelope));
        let origin = Arc::new(Origin { body, headers });
        let mut refused = Refused::default();
        decode(&origin.body, is_direct, map, (terms, now), |verdict, range| {
            let traceparent = origin.body.get(range.clone()).and_then(traceparent_of);
            self.batch.belongs_to(traceparent);
            let event = match verdict {
                Ok(Message::Like(event)) => Event::Like(event),
                Ok(Message::Count(event)) => Event::Count(event),
                Ok(Message::Set(event)) => Event::Set(event),
                // The queue can have returned earlier events behind this fence (decision 0019).
                Ok(Message::Fence(_)) if redelivered => return,
                Ok(Message::Fence(fence)) => return self.batch.take_fence(fence),
                Err(refusal) => {
                    let body = origin.body.get(range).unwrap_or(&origin.body);
                    let letter = |refusal| letter::refused(refusal, body, &origin.headers, queue, now);
                    return refused.note(with_encoding(refusal, encoding.as_deref()), letter);
                }
            };
            self.oldest = Some(self.oldest.map_or(event.at(), |oldest| oldest.min(event.at())));
            self.received.event(&event);
            self.batch.events.push(Received { event, origin: Arc::clone(&origin), range });
        });
        self.batch
            .refused
            .extend(refused.letters(|refusal| letter::refused(refusal, &origin.body, &origin.headers, queue, now)));
    }
}

fn with_encoding(refusal: Refusal, encoding: Option<&str>) -> Refusal {
    match encoding {
        Some(encoding) if refusal.reason == Reason::MalformedJson => {
            let error =
                format!("{}; its content_encoding is {encoding:?}, and tallyd unpacks only {ENCODINGS}", refusal.error);
            Refusal { error, ..refusal }
        }
        _ => refusal,
    }
}

#[derive(Default)]
struct Refused {
    letters: Vec<DeadLetter>,
    /// The first refusal, if possible of an event that can be applied later, and the count of all.
    first: Option<Refusal>,
    all: usize,
}

impl Refused {
    fn note(&mut self, refusal: Refusal, letter: impl FnOnce(Refusal) -> DeadLetter) {
        // The error's text is left out, because it can quote the message.
        debug!(event = "message-refused", reason = refusal.reason.code());
        self.all += 1;
        // A list is not worthless if one of its events can be applied later.
        let may_be_good = |refusal: &Refusal| Reason::may_be_good(refusal.reason.code(), false);
        if self.first.as_ref().is_none_or(|first| !may_be_good(first) && may_be_good(&refusal)) {
            self.first = Some(refusal.clone());
        }
        match self.all {
            0..=LIST_EVENTS_MAX => self.letters.push(letter(refusal)),
            _ => self.letters.clear(),
        }
    }

    fn letters(self, letter: impl FnOnce(Refusal) -> DeadLetter) -> Vec<DeadLetter> {
        match self.first {
            Some(Refusal { reason, error }) if self.all > LIST_EVENTS_MAX => {
                let error = format!(
                    "{} events of the list are refused, and this letter has the whole list; the first: {error}",
                    self.all
                );
                vec![letter(Refusal { reason, error })]
            }
            _ => self.letters,
        }
    }
}
