//! Errors that say why a call failed, and what the call did before it failed.

use std::sync::Arc;

use tallyd_core::card::CardError;
use tallyd_core::model::{BoardPeriod, Kind, Metric};
use tallyd_core::period::{PeriodError, PeriodKind};
use tallyd_mysql::StoreError;
use tallyd_rabbitmq::BrokerError;
use tallyd_redis::CacheError;
use tallyd_redis::feed::GainError;

use crate::Event;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// An argument is outside its range. Nothing was published.
    #[error("{0}")]
    Invalid(String),
    /// The site card has no kind or metric with this name. Nothing was published.
    #[error("unknown {what} {name:?}: the site card has {}", .has.join(", "))]
    UnknownName {
        /// `kind` or `metric`.
        what: &'static str,
        /// The requested name.
        name: String,
        /// The names in the card.
        has: Vec<String>,
    },
    /// The site card has no kind with this code. Nothing was published. Possibly the code is from
    /// [`Client::kind`](crate::Client::kind) while the client had no card: call it again.
    #[error("the site card has no kind with the code {0}")]
    NoKind(Kind),
    /// The site card has no metric with this code. Apart from this, the error is like [`ClientError::NoKind`].
    #[error("the site card has no metric with the code {}", .0.0)]
    NoMetric(Metric),
    /// The client has not seen a site card yet, so it can't read. A daemon writes the card.
    #[error("no site card could be read yet: start a daemon, or check the address and `key_prefix` of Redis")]
    NoCard,
    /// The card passed to [`Client::with_card`](crate::Client::with_card) can't be used.
    #[error(transparent)]
    Card(#[from] CardError),
    /// The rule of this number says `writer = "api"`, so an event that was not counted in Redis would be missing there.
    /// Nothing was published.
    #[error(
        "API servers count {0} (writer = \"api\"): call the scripts of docs/scripts.md, and publish the event with the `at` that the script returns"
    )]
    CountedByApi(String),
    /// The site card has no board with that name and that kind of period. Nothing was sent to a server.
    #[error("no [[board]] is named {board} and has period \"{period}\"")]
    NoBoard {
        /// The requested name.
        board: String,
        /// The requested kind of period.
        period: PeriodKind,
    },
    /// The board's time zone is unknown on this machine. Nothing was sent to a server.
    #[error(transparent)]
    Gain(#[from] GainError),
    /// The text is not the name of a period. Nothing was sent to a server.
    #[error(transparent)]
    Period(#[from] PeriodError),
    /// The period is archived, and neighbours of a member can only be read from Redis.
    #[error("{0}: the period is archived, and a member's neighbours can only be read from Redis")]
    Archived(BoardPeriod),
    /// The archive of the period was deleted, because it was older than the board's `archive_keep`.
    #[error("{0}: the archive of the period was deleted, because it was older than archive_keep")]
    Pruned(BoardPeriod),
    /// Redis lost the period during the archiving, and MySQL has no verified copy of the period.
    #[error("{0}: Redis lost the frozen zset of the period before the archiving ended")]
    Lost(BoardPeriod),
    /// Redis refused the call, or failed to answer. If Redis failed to answer, the call may have run.
    #[error(transparent)]
    Redis(#[from] CacheError),
    /// A script returned an unexpected answer. The server has another script under this script's name, or is not Redis.
    #[error("{0}")]
    Answer(&'static str),
    /// MySQL refused the query, timed out, or is unreachable. During the next five seconds, calls that need the same
    /// data fail with the same error, and don't ask MySQL.
    #[error(transparent)]
    MySql(Arc<StoreError>),
    /// RabbitMQ refused the message, did not confirm it in time, or is unreachable. RabbitMQ may still have received
    /// the message.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

impl From<StoreError> for ClientError {
    fn from(error: StoreError) -> Self {
        Self::MySql(Arc::new(error))
    }
}

pub(crate) fn require(is_valid: bool, problem: impl FnOnce() -> String) -> Result<(), ClientError> {
    if is_valid { Ok(()) } else { Err(ClientError::Invalid(problem())) }
}

/// Why an event was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Nothing was published: tallyd would not accept the event, or API servers count the number.
    #[error("publish an event")]
    NotSent(#[source] ClientError),
    /// The client published the event twice, and the broker did not confirm it. The broker may have the event
    /// nevertheless. Publish the same event again with [`Client::publish`](crate::Client::publish), not a new event.
    #[error("publish an event")]
    NotConfirmed {
        /// The event that was sent.
        event: Box<Event>,
        /// The reason why the broker did not confirm the event.
        #[source]
        source: BrokerError,
    },
}
