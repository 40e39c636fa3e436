//! A quorum queue with a single active consumer.
//!
//! Source: `rabbit_fifo.erl` of RabbitMQ 3.10 to 4.1. Returned messages are delivered before all others, in the order
//! in which they were returned. The queue counts the returns of each message, and dead-letters a message that was
//! returned more often than the delivery limit. When the active consumer's channel is closed, its messages return and
//! the next consumer becomes active in one step.

use std::collections::{BTreeSet, VecDeque};

use tallyd_core::flow;

/// RabbitMQ's default since 4.0. tallyd declares its queues with the same limit.
const RETURNS_MAX: i64 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: usize,
    pub returns: i64,
}

impl flow::Message for Message {
    fn returns(&self) -> i64 {
        self.returns
    }

    fn bytes(&self) -> usize {
        150
    }
}

/// A consumer's channel.
#[derive(Clone, Copy, Debug)]
struct Consumer {
    channel: u64,
    prefetch: u16,
}

#[derive(Debug, Default)]
pub struct Queue {
    returned: VecDeque<Message>,
    ready: VecDeque<Message>,
    /// The first one is active.
    consumers: VecDeque<Consumer>,
    /// The messages of the active consumer, with their delivery tags.
    unacked: VecDeque<(u64, Message)>,
    tag: u64,
    channels: u64,
    pub published: usize,
    /// The messages that are fences.
    pub fences: BTreeSet<usize>,
    pub dropped: Vec<usize>,
}

impl Queue {
    /// Publishes a message that has already been returned so often. Returns its id.
    pub fn publish(&mut self, returns: i64) -> usize {
        self.ready.push_back(Message { id: self.published, returns });
        self.published += 1;
        self.published - 1
    }

    pub fn publish_fence(&mut self) {
        let id = self.publish(0);
        self.fences.insert(id);
    }

    /// A consumer begins. Returns its channel.
    pub fn consume(&mut self, prefetch: u16) -> u64 {
        self.channels += 1;
        self.consumers.push_back(Consumer { channel: self.channels, prefetch });
        self.channels
    }

    /// Delivers up to `most` messages to the channel, if it is the active one.
    pub fn deliver(&mut self, channel: u64, most: usize) -> Vec<(Message, u64)> {
        let Some(active) = self.consumers.front().filter(|it| it.channel == channel) else { return Vec::new() };
        let room = usize::from(active.prefetch).saturating_sub(self.unacked.len());
        let mut delivered = Vec::new();
        while delivered.len() < room.min(most) {
            let Some(next) = self.returned.pop_front().or_else(|| self.ready.pop_front()) else { break };
            self.tag += 1;
            self.unacked.push_back((self.tag, next));
            delivered.push((next, self.tag));
        }
        delivered
    }

    /// Acknowledges the message of this tag and all before it. Returns these messages, or `None` if the channel is
    /// closed.
    pub fn acknowledge(&mut self, channel: u64, tag: u64) -> Option<Vec<Message>> {
        self.consumers.front().filter(|it| it.channel == channel)?;
        let count = self.unacked.partition_point(|(unacked, _)| *unacked <= tag);
        Some(self.unacked.drain(..count).map(|(_, message)| message).collect())
    }

    /// The channel is closed, or its consumer has died.
    pub fn close(&mut self, channel: u64) {
        if self.consumers.front().is_some_and(|it| it.channel == channel) {
            for (_, message) in std::mem::take(&mut self.unacked) {
                let message = Message { returns: message.returns + 1, ..message };
                if message.returns > RETURNS_MAX {
                    self.dropped.push(message.id);
                } else {
                    self.returned.push_back(message);
                }
            }
        }
        self.consumers.retain(|it| it.channel != channel);
    }

    pub fn close_all(&mut self) {
        while let Some(Consumer { channel, .. }) = self.consumers.front() {
            self.close(*channel);
        }
    }

    /// Whether the channel is open.
    pub fn has(&self, channel: u64) -> bool {
        self.consumers.iter().any(|it| it.channel == channel)
    }

    pub fn is_empty(&self) -> bool {
        self.returned.is_empty() && self.ready.is_empty() && self.unacked.is_empty()
    }
}
