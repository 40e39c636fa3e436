//! Decides what a run does with its fence in one partition's queue, from MySQL's rows and the queue's depth. Pure.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Depth {
    /// The broker answered "no messages and no consumers". The broker gives the same answer if the leader of a quorum
    /// queue does not answer within 250 ms, is being elected, or can't be reached. So this answer proves nothing.
    Unknown,
    Known {
        /// The number of ready messages. This number does not include messages that are delivered but not
        /// acknowledged.
        messages: u32,
        consumers: u32,
    },
}

impl Depth {
    pub fn of(messages: u32, consumers: u32) -> Self {
        if (messages, consumers) == (0, 0) { Self::Unknown } else { Self::Known { messages, consumers } }
    }

    pub fn messages(self) -> Option<u32> {
        if let Self::Known { messages, .. } = self { Some(messages) } else { None }
    }

    pub fn consumers(self) -> Option<u32> {
        if let Self::Known { consumers, .. } = self { Some(consumers) } else { None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Look {
    Unknown,
    Consumed { messages: u32 },
    Unconsumed { events: usize },
}

impl Look {
    /// `left` is the number of confirmed fences that MySQL's rows name in this queue. `None` if the queue has fewer
    /// messages: a daemon has just dropped fences, or the broker has lost messages. The caller must then delete these
    /// rows, except those of its own run.
    pub fn of(depth: Depth, left: usize) -> Option<Self> {
        match depth {
            Depth::Unknown => Some(Self::Unknown),
            Depth::Known { messages, consumers } if consumers > 0 => Some(Self::Consumed { messages }),
            Depth::Known { messages, .. } => {
                (messages as usize).checked_sub(left).map(|events| Self::Unconsumed { events })
            }
        }
    }
}

/// A run's fence and what is known about the partition. All of it must be read before the look at the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    pub number: u64,
    pub passed: u64,
    /// The epoch of the partition's holder.
    pub epoch: u64,
    /// The epoch in which the run has sent this fence.
    pub sent_in: Option<u64>,
    pub has_own: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    Yes,
    No,
    /// Only a later run's fence has a higher number. MySQL keeps only the highest number, so it does not show whether
    /// this run's fence has passed.
    TakenOver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing is in flight, if MySQL's rows about the queue are still the same now.
    Idle,
    Wait,
    Send,
    /// Record the fence, send it, and record the confirm: the queue perhaps has no consumer. The caller then waits.
    Leave,
}

impl Fence {
    pub fn passed(&self) -> Passed {
        if self.sent_in.is_some() && self.passed == self.number {
            return Passed::Yes;
        }
        if self.passed > self.number { Passed::TakenOver } else { Passed::No }
    }

    pub fn next(&self, look: Look) -> Next {
        let leaves = match look {
            Look::Unconsumed { events: 0 } if self.has_own => return Next::Idle,
            Look::Unconsumed { events } if events > 0 => return Next::Wait,
            Look::Unconsumed { .. } | Look::Unknown => true,
            Look::Consumed { .. } => false,
        };
        let is_there = self.sent_in == Some(self.epoch) || (leaves && self.has_own);
        match (is_there, leaves) {
            (true, _) => Next::Wait,
            (false, true) => Next::Leave,
            (false, false) => Next::Send,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_without_messages_and_consumers_is_not_known() {
        assert_eq!((Depth::of(0, 0).messages(), Depth::of(0, 0).consumers()), (None, None));
        for (messages, consumers) in [(1, 0), (0, 1), (3, 2)] {
            let depth = Depth::of(messages, consumers);
            assert_eq!((depth.messages(), depth.consumers()), (Some(messages), Some(consumers)));
        }
    }

    #[test]
    fn in_a_queue_without_consumer_all_but_fences_are_events() {
        assert_eq!(Look::of(Depth::of(0, 0), 2), Some(Look::Unknown));
        assert_eq!(Look::of(Depth::of(3, 1), 5), Some(Look::Consumed { messages: 3 }));
        assert_eq!(Look::of(Depth::of(3, 0), 2), Some(Look::Unconsumed { events: 1 }));
        assert_eq!(Look::of(Depth::of(3, 0), 3), Some(Look::Unconsumed { events: 0 }));
        assert_eq!(Look::of(Depth::of(3, 0), 4), None);
    }

    const FENCE: Fence = Fence { number: 5, passed: 0, epoch: 2, sent_in: None, has_own: false };

    #[test]
    fn only_a_fence_that_was_sent_passes_and_a_higher_one_hides_it() {
        for (sent_in, passed, expected) in [
            (Some(2), 5, Passed::Yes),
            (Some(1), 5, Passed::Yes),
            (None, 5, Passed::No),
            (Some(2), 4, Passed::No),
            (Some(2), 6, Passed::TakenOver),
            (None, 6, Passed::TakenOver),
        ] {
            assert_eq!(Fence { sent_in, passed, ..FENCE }.passed(), expected, "{sent_in:?} {passed}");
        }
    }

    #[test]
    fn a_run_sends_its_fence_once_for_each_holder_of_the_partition() {
        let (consumed, empty) = (Look::Consumed { messages: 9 }, Look::Unconsumed { events: 0 });
        for (look, sent_in, has_own, expected) in [
            (consumed, None, false, Next::Send),
            (consumed, Some(1), false, Next::Send),
            (consumed, Some(2), false, Next::Wait),
            (consumed, None, true, Next::Send),
            (empty, None, false, Next::Leave),
            (empty, Some(2), false, Next::Wait),
            (empty, Some(1), true, Next::Idle),
            (Look::Unconsumed { events: 1 }, None, false, Next::Wait),
            (Look::Unknown, None, false, Next::Leave),
            (Look::Unknown, Some(1), false, Next::Leave),
            (Look::Unknown, Some(2), false, Next::Wait),
            (Look::Unknown, None, true, Next::Wait),
        ] {
            assert_eq!(Fence { sent_in, has_own, ..FENCE }.next(look), expected, "{look:?} {sent_in:?} {has_own}");
        }
    }
}
