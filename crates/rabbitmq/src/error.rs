//! The errors of RabbitMQ. Each error says how the work continues after it.

use std::time::Duration;

use lapin::ErrorKind;
use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;

use super::probe::{ACCESS_REFUSED, NOT_ALLOWED, NOT_FOUND, NOT_IMPLEMENTED};

#[derive(Clone, Debug, thiserror::Error)]
pub enum BrokerError {
    #[error("{action}")]
    Call {
        action: &'static str,
        #[source]
        source: Whole<lapin::Error>,
    },
    #[error("{action}: no answer within {} ms", .limit.as_millis())]
    NoAnswer { action: &'static str, limit: Duration },
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
    #[error("the broker returned the message: {reply} (no queue is bound for it)")]
    Returned { reply: String },
    /// The broker rejected the message, because a queue is full or is moving to another node.
    #[error("the broker rejected the message: a queue is full, or is moving to another node")]
    Nacked,
    #[error("publisher confirms are off for this channel")]
    Unconfirmed,
    #[error("{0}")]
    Config(String),
    #[error("{what}")]
    About {
        what: String,
        #[source]
        source: Box<Self>,
    },
}

impl BrokerError {
    pub(crate) fn about(self, what: impl Into<String>) -> Self {
        Self::About { what: what.into(), source: Box::new(self) }
    }

    pub fn root(&self) -> &Self {
        match self {
            Self::About { source, .. } => source.root(),
            root => root,
        }
    }

    pub fn fate(&self) -> Fate {
        match (self.root(), self.code()) {
            (Self::TlsFault(_), _) => Fate::Untrusted,
            (_, Some((ACCESS_REFUSED | NOT_FOUND | NOT_ALLOWED | NOT_IMPLEMENTED, _))) => Fate::Refused,
            (Self::Config(_), _) => Fate::Misconfigured,
            (Self::Returned { .. } | Self::Nacked | Self::Unconfirmed, _) => Fate::Item,
            (Self::Call { .. } | Self::NoAnswer { .. } | Self::About { .. }, _) => Fate::Passing,
        }
    }

    pub fn is_missing(&self) -> bool {
        matches!(self.code(), Some((NOT_FOUND, _)))
    }

    pub(crate) fn code(&self) -> Option<(u16, String)> {
        let Self::Call { source, .. } = self.root() else { return None };
        match source.0.kind() {
            ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
            _ => None,
        }
    }
}

pub type Result<T> = std::result::Result<T, BrokerError>;
