//! A quorum queue with one active consumer.
//!
//! Source: `rabbit_fifo.erl` of RabbitMQ 3.10 to 4.1. Returned messages are delivered before all others, in the order
//! in which they were returned. The queue counts the returns of each message, and dead-letters a message that was
//! returned more often than the delivery limit.

use std::collections::VecDeque;

/// RabbitMQ's default since 4.0. tallyd declares its queues with the same limit.
const RETURNS_MAX: i64 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: usize,
    pub returns: i64,
}

#[derive(Debug, Default)]
pub struct Queue {
    returned: VecDeque<Message>,
    ready: VecDeque<Message>,
    pub dropped: Vec<Message>,
    unacked: VecDeque<Message>,
}

impl Queue {
    /// Publishes messages that have already been returned so often.
    pub fn with(returns: impl IntoIterator<Item = i64>) -> Self {
        let ready = returns.into_iter().enumerate().map(|(id, returns)| Message { id, returns });
        Self { ready: ready.collect(), ..Self::default() }
    }

    /// Delivers until the consumer has `prefetch` messages. Returns the messages that were delivered.
    pub fn deliver(&mut self, prefetch: u16) -> Vec<Message> {
        let mut delivered = Vec::new();
        while self.unacked.len() < usize::from(prefetch) {
            let Some(next) = self.returned.pop_front().or_else(|| self.ready.pop_front()) else { break };
            self.unacked.push_back(next);
            delivered.push(next);
        }
        delivered
    }

    /// The consumer acknowledges its oldest `count` messages.
    pub fn acknowledge(&mut self, count: usize) {
        self.unacked.drain(..count);
    }

    /// The consumer's channel is closed, or the consumer has died.
    pub fn close(&mut self) {
        for message in std::mem::take(&mut self.unacked) {
            let message = Message { returns: message.returns + 1, ..message };
            if message.returns > RETURNS_MAX {
                self.dropped.push(message);
            } else {
                self.returned.push_back(message);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.returned.is_empty() && self.ready.is_empty() && self.unacked.is_empty()
    }
}
