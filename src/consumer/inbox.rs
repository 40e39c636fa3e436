//! Messages that were received and are in no batch yet.
//!
//! The broker counts messages, not bytes, and the library takes whatever comes: who sends lists of a mebibyte after millions of single events
//! would fill the memory while MySQL is away. So all that has come is taken from the library at once and weighed.

use std::collections::VecDeque;

use lapin::message::Delivery;
use lapin::types::AMQPValue;
use lapin::{Acker, BasicProperties};

use crate::dead_letters::letter::{self, Headers};

/// A message as it came, with its headers read: of large ones no more is kept than what a dead letter would have.
#[derive(Debug)]
pub(super) struct Arrived {
    pub body: Vec<u8>,
    pub headers: Headers,
    /// How often the broker has taken it back.
    pub returns: i64,
    pub redelivered: bool,
    /// It came straight to the queue, through no exchange of events.
    pub is_direct: bool,
    pub acker: Acker,
}

impl Arrived {
    /// Of its body and its headers as they came: an empty body may come with 128 KiB of these.
    pub fn bytes(&self) -> usize {
        self.body.len() + self.headers.bytes
    }
}

impl From<Delivery> for Arrived {
    fn from(delivery: Delivery) -> Self {
        let Delivery { data: body, acker, redelivered, properties, exchange, .. } = delivery;
        let (headers, returns) = (letter::headers(&properties), returns(redelivered, &properties));
        Self { body, headers, returns, redelivered, is_direct: exchange.as_str().is_empty(), acker }
    }
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    messages: VecDeque<Arrived>,
    /// Of all of them.
    pub bytes: usize,
}

impl Inbox {
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

    /// Each one's bytes.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        self.messages.iter().map(Arrived::bytes)
    }
}

/// How often the broker has taken a message back: the header `x-delivery-count` of quorum queues. On a first delivery the header is the
/// publisher's.
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

    use super::*;

    #[test]
    fn returns_are_read_from_the_header_of_what_is_redelivered() {
        assert_eq!(returns(true, &BasicProperties::default()), 0);
        let mut headers = FieldTable::default();
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(7));
        let properties = BasicProperties::default().with_headers(headers);
        assert_eq!((returns(true, &properties), returns(false, &properties)), (7, 0));
    }
}
