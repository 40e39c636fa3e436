//! The largest frame that connections accept. The library allocates two buffers of 32 frames for each connection. If the
//! library knows the size of a frame before it connects, it touches only the memory that it needs. Otherwise it fills
//! both buffers with zeros, 8 MiB with RabbitMQ's default size (decision 0017).

use std::sync::atomic::{AtomicBool, Ordering};

use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::uri::AMQPUri;

/// The default of RabbitMQ's setting `frame_max`, in bytes. RabbitMQ splits longer bodies, but not longer headers.
const FRAME_MAX: u32 = 131_072;

/// The highest limit, which also applies after a frame has exceeded the former limit. Both buffers then have 32 MiB.
/// Without a limit, the library allocates buffers for RabbitMQ's own limit, which can be 4 GiB.
const LIFTED: u32 = 1 << 20;

/// `frame_max` of the configured address, or [`FRAME_MAX`]. If RabbitMQ's own limit is higher, no connection can
/// receive a message with larger headers. So after the first such message, new connections use [`LIFTED`]; what exceeds
/// this too goes to the queue of returned messages.
#[derive(Debug, Default)]
pub(crate) struct FrameLimit {
    is_lifted: AtomicBool,
}

impl FrameLimit {
    pub(crate) fn set(&self, uri: &mut AMQPUri) {
        let is_lifted = self.is_lifted.load(Ordering::Relaxed);
        uri.query.frame_max = Some(match uri.query.frame_max.unwrap_or(FRAME_MAX) {
            // In AMQP, zero means that there is no limit.
            configured @ 1..LIFTED if !is_lifted => configured,
            _ => LIFTED,
        });
    }

    pub(crate) fn note(&self, error: &lapin::Error) {
        let ErrorKind::ProtocolError(wrong) = error.kind() else { return };
        if *wrong.kind() == AMQPErrorKind::Hard(AMQPHardError::FRAMEERROR) {
            self.is_lifted.store(true, Ordering::Relaxed);
        }
    }
}
