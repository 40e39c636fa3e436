//! A delivered message, and the batch of messages that one transaction writes.
//!
//! The broker limits the count of messages in flight, not their bytes, and the AMQP library takes every message that
//! arrives. Suppose that MySQL does not answer, and lists of 1 MiB each arrive after millions of single events. These
//! lists can fill the memory. So the session takes each message from the library immediately and counts its bytes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::AMQPValue;

use super::clock::Clock;
use crate::letter::{self, Headers};
use tallyd_base::config::Map;
use tallyd_core::event::{CountEvent, LikeEvent, SetEvent};
use tallyd_core::flow::Message;
use tallyd_core::mapping::Envelope;
use tallyd_core::model::Micros;
use tallyd_mysql::jobs::run_of;
use tallyd_mysql::letters::DeadLetter;

const TRACEPARENTS_MAX: usize = 3;

/// A received message with its headers decoded. Large headers are shortened to the part that a dead letter keeps.
#[derive(Debug)]
pub(super) struct Arrived {
    pub body: Vec<u8>,
    pub headers: Headers,
    pub returns: i64,
    pub redelivered: bool,
    pub is_direct: bool,
    pub encoding: Option<String>,
    pub envelope: Envelope,
}

impl Message for Arrived {
    fn returns(&self) -> i64 {
        self.returns
    }

    /// The bytes of the body and of the received headers. A message with an empty body can have 128 KiB of headers.
    fn bytes(&self) -> usize {
        self.body.len() + self.headers.bytes
    }
}

impl Arrived {
    pub(super) fn of(delivery: Delivery, map: Option<&Map>) -> Self {
        let Delivery { data: body, redelivered, properties, exchange, routing_key, .. } = delivery;
        let (exchange, returns) = (exchange.as_str(), returns(redelivered, &properties));
        let (headers, envelope) = match map {
            Some(map) => letter::mapped(&properties, exchange, routing_key.as_str(), Some(map)),
            None => (letter::headers(&properties), Envelope::default()),
        };
        let encoding = letter::encoding(&properties).map(str::to_ascii_lowercase);
        Self { body, headers, returns, redelivered, is_direct: exchange.is_empty(), encoding, envelope }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Origin {
    pub body: Vec<u8>,
    pub headers: Arc<str>,
}

/// An event with the message that contains it. If MySQL refuses the event, the event's part of the message becomes a
/// dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Received {
    pub event: Event,
    pub origin: Arc<Origin>,
    pub range: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Like(LikeEvent),
    Count(CountEvent),
    Set(SetEvent),
}

impl Event {
    pub(super) fn at(&self) -> Micros {
        match self {
            Self::Like(event) => event.at,
            Self::Count(event) => event.at,
            Self::Set(event) => event.at,
        }
    }

    /// Whether the event is older than `floor` (the time of the ledger's oldest entries). Returns false for likes,
    /// because the ledger has no likes.
    pub(super) fn is_before(&self, floor: Micros) -> bool {
        !matches!(self, Self::Like(_)) && self.at() < floor
    }
}

impl Received {
    pub(super) fn like(&self) -> Option<LikeEvent> {
        if let Event::Like(event) = self.event { Some(event) } else { None }
    }

    pub(super) fn counted(&self) -> Option<CountEvent> {
        if let Event::Count(event) = self.event { Some(event) } else { None }
    }

    pub(super) fn set(&self) -> Option<SetEvent> {
        if let Event::Set(event) = self.event { Some(event) } else { None }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Batch {
    pub events: Vec<Received>,
    pub refused: Vec<DeadLetter>,
    /// Maps the number of each job run to the highest fence that the run has sent.
    pub fences: BTreeMap<u64, u64>,
    pub messages: usize,
    pub bytes: usize,
    pub traceparents: Vec<String>,
    /// More messages waited when the batch was written.
    pub is_behind: bool,
    pub clock: Clock,
}

impl Batch {
    /// Whether the batch must be written before another message is added. The batch can exceed the limits, because its
    /// last message can be a list.
    pub(super) fn is_full(&self, events_max: usize, bytes_max: usize) -> bool {
        self.len() >= events_max || self.bytes >= bytes_max
    }

    pub(super) fn len(&self) -> usize {
        self.events.len() + self.refused.len() + self.fences.len()
    }

    pub(super) fn belongs_to(&mut self, traceparent: Option<&str>) {
        let is_new = |it: &&str| {
            self.traceparents.len() < TRACEPARENTS_MAX && !self.traceparents.iter().any(|known| known == it)
        };
        if let Some(traceparent) = traceparent.filter(is_new) {
            self.traceparents.push(traceparent.to_owned());
        }
    }

    pub(super) fn take_fence(&mut self, fence: u64) {
        let highest = self.fences.entry(run_of(fence)).or_default();
        *highest = fence.max(*highest);
    }

    pub(super) fn can_split(&self) -> bool {
        self.events.len() + self.refused.len() > 1
    }

    /// The second part gets the fences, because fences follow all events. If the batch [can be split](Self::can_split),
    /// both parts are smaller than the batch.
    #[must_use]
    pub(super) fn split(&mut self) -> Self {
        // One part gets the events and the other part the dead letters. A batch that has only events or only dead
        // letters is split in the middle.
        let keeps = |all: usize, others: usize| if others > 0 { all } else { all / 2 };
        let (events, refused) = (self.events.len(), self.refused.len());
        Self {
            events: self.events.split_off(keeps(events, refused)),
            refused: self.refused.split_off(if events > 0 { 0 } else { refused / 2 }),
            fences: std::mem::take(&mut self.fences),
            is_behind: self.is_behind,
            clock: self.clock,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages == 0
    }
}

/// Returns how often the message was returned to the broker, from the header `x-delivery-count` of quorum queues. On a
/// first delivery the header is ignored, because a publisher has set it, not the broker.
fn returns(redelivered: bool, properties: &BasicProperties) -> i64 {
    let headers = properties.headers().as_ref().filter(|_| redelivered);
    match headers.and_then(|headers| headers.inner().get("x-delivery-count")) {
        Some(AMQPValue::LongLongInt(count)) => *count,
        Some(AMQPValue::LongInt(count)) => i64::from(*count),
        Some(AMQPValue::LongUInt(count)) => i64::from(*count),
        Some(AMQPValue::ShortInt(count)) => i64::from(*count),
        Some(AMQPValue::ShortShortInt(count)) => i64::from(*count),
        Some(AMQPValue::ShortShortUInt(count)) => i64::from(*count),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use lapin::types::FieldTable;
    use proptest::prelude::*;

    use super::*;
    use tallyd_core::model::{Kind, Target, TargetId, UserId};

    proptest! {
        #[test]
        fn both_parts_of_a_batch_are_smaller_and_lose_nothing(events in 0..9_usize, refused in 0..9_usize) {
            let received = Received {
                event: Event::Like(LikeEvent {
                    target: Target { kind: Kind(1), id: TargetId(1) },
                    user: UserId(1),
                    at: Micros(1),
                    liked: true,
                }),
                origin: Arc::default(),
                range: 0..0,
            };
            let letter = DeadLetter {
                apart: String::new(),
                body: Vec::new(),
                headers: Arc::default(),
                reason: "",
                error: String::new(),
                queue: String::new(),
                first_seen: Micros(1),
            };
            let mut first = Batch {
                events: vec![received; events],
                refused: vec![letter; refused],
                fences: BTreeMap::from([(0, 7)]),
                ..Batch::default()
            };
            prop_assume!(first.can_split());
            let second = first.split();
            let size = |batch: &Batch| batch.events.len() + batch.refused.len();
            prop_assert!(size(&first) > 0 && size(&second) > 0);
            prop_assert_eq!(size(&first) + size(&second), events + refused);
            prop_assert_eq!((first.fences, second.fences), (BTreeMap::new(), BTreeMap::from([(0, 7)])));
        }
    }

    #[test]
    fn returns_are_read_from_the_header_of_what_is_redelivered() {
        assert_eq!(returns(true, &BasicProperties::default()), 0);
        let mut headers = FieldTable::default();
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(7));
        let properties = BasicProperties::default().with_headers(headers);
        assert_eq!((returns(true, &properties), returns(false, &properties)), (7, 0));
    }
}
