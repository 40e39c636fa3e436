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
