//! Messages that were received and are in no batch yet.
//!
//! The broker counts messages, not bytes, and the library takes whatever comes: who sends lists of a mebibyte after millions of single events
//! would fill the memory while MySQL is away. So all that has come is taken from the library at once and weighed.

use std::collections::VecDeque;

use lapin::Acker;
use lapin::message::Delivery;

use super::dead::{self, Headers};

/// A message as it came, with its headers read.
#[derive(Debug)]
pub(super) struct Arrived {
    pub delivery: Delivery,
    pub headers: Headers,
}

impl Arrived {
    /// Of its body and its headers: an empty body may come with 128 KiB of these.
    pub fn bytes(&self) -> usize {
        self.delivery.data.len() + self.headers.bytes
    }
}

impl From<Delivery> for Arrived {
    fn from(delivery: Delivery) -> Self {
        let headers = dead::headers(&delivery.properties);
        Self { delivery, headers }
    }
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    messages: VecDeque<Arrived>,
    /// Of all of them.
    pub bytes: usize,
}

impl Waiting {
    pub fn push(&mut self, delivery: Delivery) {
        let message = Arrived::from(delivery);
        self.bytes += message.bytes();
        self.messages.push_back(message);
    }

    pub fn pop(&mut self) -> Option<Arrived> {
        let message = self.messages.pop_front()?;
        self.bytes -= message.bytes();
        Some(message)
    }

    /// The newest one's, which answers for all before it. Forgets them.
    pub fn take_last(&mut self) -> Option<Acker> {
        let last = self.messages.pop_back().map(|message| message.delivery.acker);
        *self = Self::default();
        last
    }
}
