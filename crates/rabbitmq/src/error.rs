//! What can go wrong with RabbitMQ, and what becomes of the work then.

use std::time::Duration;

use lapin::ErrorKind;
use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;

use super::probe::{ACCESS_REFUSED, NOT_ALLOWED, NOT_FOUND, NOT_IMPLEMENTED};

/// An error of RabbitMQ, or on the way to it.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker said no, or the connection failed.
    #[error("{action}")]
    Call {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: Whole<lapin::Error>,
    },
    /// The broker accepted a call and didn't answer within `[amqp] timeout_ms`.
    #[error("{action}: no answer within {} ms", .limit.as_millis())]
    NoAnswer {
        /// What was tried.
        action: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The server can't be believed to be the one that is meant, or doesn't believe us.
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
    /// No queue is bound for a message.
    #[error("the broker gave the message back: {reply} (no queue is bound for it)")]
    Returned {
        /// The broker's words.
        reply: String,
    },
    /// A queue is full, or on its way to another node.
    #[error("the broker could not take the message")]
    Nacked,
    /// Nobody has switched confirms on.
    #[error("the channel does not confirm")]
    Unconfirmed,
    /// An address can't be used.
    #[error("{0}")]
    Config(String),
    /// One of the others, and what it is about.
    #[error("{what}")]
    About {
        /// A queue, a node, or what to do.
        what: String,
        /// The error itself.
        #[source]
        source: Box<Self>,
    },
}

impl BrokerError {
    /// Says what it is about.
    pub(crate) fn about(self, what: impl Into<String>) -> Self {
        Self::About { what: what.into(), source: Box::new(self) }
    }

    /// The error itself, without what it is about.
    pub fn root(&self) -> &Self {
        match self {
            Self::About { source, .. } => source.root(),
            root => root,
        }
    }

    /// What becomes of the work.
    pub fn fate(&self) -> Fate {
        match (self.root(), self.code()) {
            (Self::TlsFault(_), _) => Fate::Untrusted,
            (_, Some((ACCESS_REFUSED | NOT_FOUND | NOT_ALLOWED | NOT_IMPLEMENTED, _))) => Fate::Refused,
            (Self::Config(_), _) => Fate::Misconfigured,
            (Self::Returned { .. } | Self::Nacked | Self::Unconfirmed, _) => Fate::Item,
            (Self::Call { .. } | Self::NoAnswer { .. } | Self::About { .. }, _) => Fate::Passing,
        }
    }

    /// AMQP's code of a refusal, and the broker's words.
    pub(crate) fn code(&self) -> Option<(u16, String)> {
        let Self::Call { source, .. } = self.root() else { return None };
        match source.0.kind() {
            ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
            _ => None,
        }
    }
}

/// The result of whatever asks RabbitMQ.
pub type Result<T> = std::result::Result<T, BrokerError>;
