//! Messages that were received and are in no batch yet.
//!
//! The broker counts messages, not bytes, and the library takes whatever comes: lists of a mebibyte after millions of single events would
//! fill the memory while MySQL does not answer. So everything is taken from the library immediately, and its bytes are counted.

use std::collections::VecDeque;

use lapin::message::Delivery;
use lapin::types::AMQPValue;
use lapin::{Acker, BasicProperties};

use crate::letter::{self, Headers};

/// A message as it came, with its headers read. Of large headers only as much is kept as a dead letter would have.
#[derive(Debug)]
pub(super) struct Arrived {
    pub body: Vec<u8>,
    pub headers: Headers,
    /// How often the broker has taken it back.
    pub returns: i64,
    pub redelivered: bool,
    /// It was published to the queue directly, through no exchange of events.
    pub is_direct: bool,
    pub acker: Acker,
}

impl Arrived {
    /// The bytes of its body and of its headers as they came: an empty body can have 128 KiB of headers.
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

/// Messages in the order they came, and how large they are together.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    messages: VecDeque<Arrived>,
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

    /// The bytes of each message.
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
