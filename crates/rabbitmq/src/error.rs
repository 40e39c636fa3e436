//! The errors of RabbitMQ. Each error says how the work continues after it.

use std::time::Duration;

use lapin::ErrorKind;
use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;

use super::probe::{ACCESS_REFUSED, NOT_ALLOWED, NOT_FOUND, NOT_IMPLEMENTED};

/// An error of RabbitMQ, or of the connection to RabbitMQ.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker rejected the call, or the connection failed.
    #[error("{action}")]
    Call {
        /// The action that failed.
        action: &'static str,
        #[source]
        source: Whole<lapin::Error>,
    },
    /// The broker did not answer a call within `[amqp] timeout_ms`.
    #[error("{action}: no answer within {} ms", .limit.as_millis())]
    NoAnswer {
        /// The action that timed out.
        action: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The client cannot verify the server, or the server does not trust the client.
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
    /// The exchange has no queue for the message's routing key.
    #[error("the broker returned the message: {reply} (no queue is bound for it)")]
    Returned {
        /// The broker's text.
        reply: String,
    },
    /// The broker rejected the message, because a queue is full or is moving to another node.
    #[error("the broker rejected the message: a queue is full, or is moving to another node")]
    Nacked,
    /// Publisher confirms are off.
    #[error("publisher confirms are off for this channel")]
    Unconfirmed,
    /// An address in the configuration cannot be used.
    #[error("{0}")]
    Config(String),
    /// Wraps another error, and adds the name of the queue or node that failed.
    #[error("{what}")]
    About {
        /// The text that was added: the name of a queue or node, or an instruction for the operator.
        what: String,
        #[source]
        source: Box<Self>,
    },
}

impl BrokerError {
    /// Adds a text to the error: the name of the queue or node, or an instruction for the operator.
    pub(crate) fn about(self, what: impl Into<String>) -> Self {
        Self::About { what: what.into(), source: Box::new(self) }
    }

    /// Returns the original error, without the text that `about` added.
    pub fn root(&self) -> &Self {
        match self {
            Self::About { source, .. } => source.root(),
            root => root,
        }
    }

    /// Says how to continue after this error.
    pub fn fate(&self) -> Fate {
        match (self.root(), self.code()) {
            (Self::TlsFault(_), _) => Fate::Untrusted,
            (_, Some((ACCESS_REFUSED | NOT_FOUND | NOT_ALLOWED | NOT_IMPLEMENTED, _))) => Fate::Refused,
            (Self::Config(_), _) => Fate::Misconfigured,
            (Self::Returned { .. } | Self::Nacked | Self::Unconfirmed, _) => Fate::Item,
            (Self::Call { .. } | Self::NoAnswer { .. } | Self::About { .. }, _) => Fate::Passing,
        }
    }

    /// Returns true if an exchange or a queue is missing. A daemon declares both when it starts.
    pub fn is_missing(&self) -> bool {
        matches!(self.code(), Some((NOT_FOUND, _)))
    }

    /// Returns AMQP's error code and the broker's text.
    pub(crate) fn code(&self) -> Option<(u16, String)> {
        let Self::Call { source, .. } = self.root() else { return None };
        match source.0.kind() {
            ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
            _ => None,
        }
    }
}

/// The result of a call to RabbitMQ.
pub type Result<T> = std::result::Result<T, BrokerError>;
