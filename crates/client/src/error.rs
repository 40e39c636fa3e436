//! Errors that say why a call failed, and what the call did before it failed.

use tallyd_core::event::LikeEvent;
use tallyd_core::model::{BoardPeriod, Kind, Metric};
use tallyd_core::period::{PeriodError, PeriodKind};
use tallyd_mysql::StoreError;
use tallyd_rabbitmq::BrokerError;
use tallyd_redis::CacheError;
use tallyd_redis::feed::GainError;

use crate::counts::Changed;
use crate::{Counted, TakenBack};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// An argument is outside its range. Nothing was sent to a server.
    #[error("{0}")]
    Invalid(String),
    /// The settings have no such kind. Nothing was sent to a server.
    #[error("kind {0} is not in [kinds]")]
    NoKind(Kind),
    /// The settings have no such metric. Nothing was sent to a server.
    #[error("metric {} is not in [metrics]", .0.0)]
    NoMetric(Metric),
    /// The settings have no board with that name and that kind of period. Nothing was sent to a server.
    #[error("no [[board]] is named {board} and has period \"{period}\"")]
    NoBoard {
        /// The requested name.
        board: String,
        /// The requested kind of period.
        period: PeriodKind,
    },
    /// The settings have no such board, the board has no such column, or its time zone is unknown on this machine.
    /// Nothing was sent to a server.
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
    /// Redis refused an addition to a board, or is unreachable.
    #[error("board {board}")]
    NotAdded {
        /// The board's name.
        board: String,
        /// The reason why Redis refused the addition or failed to answer.
        #[source]
        source: CacheError,
    },
    /// Redis refused the call, or failed to answer. If Redis failed to answer, the call may have run.
    #[error(transparent)]
    Redis(#[from] CacheError),
    /// A script returned an unexpected answer. The server has another script under this script's name, or is not Redis.
    #[error("{0}")]
    Answer(&'static str),
    /// MySQL refused the query, timed out, or is unreachable.
    #[error(transparent)]
    MySql(#[from] StoreError),
    /// RabbitMQ refused the message, did not confirm it in time, or is unreachable. RabbitMQ may still have received
    /// the message.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// Fails unless the argument is valid.
pub(crate) fn require(is_valid: bool, problem: impl FnOnce() -> String) -> Result<(), ClientError> {
    if is_valid { Ok(()) } else { Err(ClientError::Invalid(problem())) }
}

/// The reason why a like was not counted, or not published.
#[derive(Debug, thiserror::Error)]
pub enum LikeError {
    /// Redis did not count the like, or Redis' answer was lost. Nothing was published.
    #[error("count the like")]
    NotCounted(#[source] ClientError),
    /// The client published the event twice, and the broker did not confirm it. The broker may have the event
    /// nevertheless. Publish the same event again with [`Client::publish_event`](crate::Client::publish_event), not a
    /// new event.
    #[error("publish the like")]
    NotConfirmed {
        /// The event that was sent.
        event: LikeEvent,
        /// The reason why the broker did not confirm the event.
        #[source]
        source: BrokerError,
    },
    /// The like was counted in Redis. The client published the event twice, but the broker did not confirm it.
    #[error("publish the like")]
    NotPublished {
        /// The counted like.
        counted: Counted,
        /// Whether the client has taken the like back in Redis.
        taken_back: TakenBack,
        /// The reason why the broker did not confirm the event.
        #[source]
        source: BrokerError,
    },
}

/// The reason why a change of a number was not counted, or not published.
#[derive(Debug, thiserror::Error)]
pub enum CountError {
    /// Nothing was published. There are three possible reasons: tallyd does not accept such a change, Redis failed to
    /// make the change, or Redis' answer was lost. If the answer was lost, the change may count in Redis until a
    /// reconcile corrects the number.
    #[error("count a number")]
    NotCounted(#[source] ClientError),
    /// The client published the event twice, and the broker did not confirm it. The broker may have the event
    /// nevertheless. Retry with [`Client::republish`](crate::Client::republish), which sends the same event. Do not
    /// send a new event.
    #[error("publish a count")]
    NotPublished {
        /// The change.
        changed: Box<Changed>,
        /// Whether the change still counts in Redis. The value is also [`TakenBack::Yes`] if the daemon counts the
        /// number. If the event sets the number to a value, the client never takes the change back.
        taken_back: TakenBack,
        /// The reason why the broker did not confirm the event.
        #[source]
        source: BrokerError,
    },
}
