//! A batch, from its first message on: what one transaction writes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::clock::Clock;
use tallyd_core::event::{CountEvent, LikeEvent, SetEvent};
use tallyd_core::model::Micros;
use tallyd_mysql::jobs::run_of;
use tallyd_mysql::letters::DeadLetter;

/// A message as it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// One event, or a list of events.
    pub body: Vec<u8>,
    /// Headers as JSON; empty if there are none.
    pub headers: String,
}

/// An event with the message it came in, of which a dead letter is made if the database refuses the event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The decoded event.
    pub event: Event,
    /// The message, shared by all events of a list.
    pub origin: Arc<Origin>,
    /// The event's place in the message's body.
    pub range: Range<usize>,
}

/// An event to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A like or unlike.
    Like(LikeEvent),
    /// A number changes.
    Count(CountEvent),
    /// A number becomes a value.
    Set(SetEvent),
}

impl Event {
    /// When it happened.
    pub fn at(&self) -> Micros {
        match self {
            Self::Like(event) => event.at,
            Self::Count(event) => event.at,
            Self::Set(event) => event.at,
        }
    }

    /// Whether the ledger should know the event, and the event is older than the ledger's `floor`.
    pub fn is_before(&self, floor: Micros) -> bool {
        !matches!(self, Self::Like(_)) && self.at() < floor
    }
}

impl Received {
    /// The like or unlike that it is.
    pub fn like(&self) -> Option<LikeEvent> {
        if let Event::Like(event) = self.event { Some(event) } else { None }
    }

    /// The count that it is.
    pub fn counted(&self) -> Option<CountEvent> {
        if let Event::Count(event) = self.event { Some(event) } else { None }
    }

    /// The set that it is.
    pub fn set(&self) -> Option<SetEvent> {
        if let Event::Set(event) = self.event { Some(event) } else { None }
    }
}

/// The messages that one transaction writes.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// In the order they came.
    pub events: Vec<Received>,
    /// Messages that can never be applied.
    pub refused: Vec<DeadLetter>,
    /// The highest fence of each run among them.
    pub fences: BTreeMap<u64, u64>,
    /// The number of messages.
    pub messages: usize,
    /// The bytes of their bodies.
    pub bytes: usize,
    /// This machine's clock while they were decoded.
    pub clock: Clock,
}

impl Batch {
    /// Whether the batch must be written before it takes more. The last message can be a list that exceeds the bounds.
    pub fn is_full(&self, events_max: usize, bytes_max: usize) -> bool {
        self.events.len() + self.refused.len() + self.fences.len() >= events_max || self.bytes >= bytes_max
    }

    /// Notes a fence that follows the batch's events.
    pub fn take_fence(&mut self, fence: u64) {
        let highest = self.fences.entry(run_of(fence)).or_default();
        *highest = fence.max(*highest);
    }

    /// Whether there is more than one thing to write.
    pub fn can_split(&self) -> bool {
        self.events.len() + self.refused.len() > 1
    }

    /// Keeps one part and returns the other with the fences, which follow all events. Both are smaller if the batch can be split.
    #[must_use]
    pub fn split(&mut self) -> Self {
        // Events on the one side and dead letters on the other, or halves of what there is.
        let keeps = |all: usize, others: usize| if others > 0 { all } else { all / 2 };
        let (events, refused) = (self.events.len(), self.refused.len());
        Self {
            events: self.events.split_off(keeps(events, refused)),
            refused: self.refused.split_off(if events > 0 { 0 } else { refused / 2 }),
            fences: std::mem::take(&mut self.fences),
            clock: self.clock,
            ..Self::default()
        }
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.messages == 0
    }
}

#[cfg(test)]
mod tests {
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
                body: Vec::new(),
                headers: String::new(),
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
}
