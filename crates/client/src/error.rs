//! Why a call failed, and what it did before.

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
    /// The settings have no board of that name with that length of period. Nothing was sent to a server.
    #[error("no [[board]] is named {board} and has period \"{period}\"")]
    NoBoard {
        /// The requested name.
        board: String,
        /// The requested length of period.
        period: PeriodKind,
    },
    /// The settings have no such board, or it has no such column, or its time zone is unknown on this machine. Nothing was sent to a server.
    #[error(transparent)]
    Gain(#[from] GainError),
    /// The text names no period. Nothing was sent to a server.
    #[error(transparent)]
    Period(#[from] PeriodError),
    /// The period is archived, and neighbours of a member can only be read in Redis.
    #[error("{0}: it is archived, and a member's neighbours can only be read in Redis")]
    Archived(BoardPeriod),
    /// The archive of the period was deleted, because the board's `archive_keep` is over.
    #[error("{0}: its archive is deleted, archive_keep is over")]
    Pruned(BoardPeriod),
    /// Redis lost the period while it was archived, and MySQL has no verified copy of it.
    #[error("{0}: Redis lost its frozen zset before it was archived")]
    Lost(BoardPeriod),
    /// Redis refused an addition to a board, or could not be reached.
    #[error("board {board}")]
    NotAdded {
        /// The board's name.
        board: String,
        /// Why Redis did not add it, or failed to answer.
        #[source]
        source: CacheError,
    },
    /// Redis refused the call, or could not be reached: then the call may have run.
    #[error(transparent)]
    Redis(#[from] CacheError),
    /// A script returned an impossible answer: the server has another script under its name, or is not Redis.
    #[error("{0}")]
    Answer(&'static str),
    /// MySQL refused the query, timed out, or is unreachable.
    #[error(transparent)]
    MySql(#[from] StoreError),
    /// RabbitMQ refused the message, did not confirm it in time, or is unreachable. It may still have the message.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// Fails unless the argument is valid.
pub(crate) fn require(is_valid: bool, problem: impl FnOnce() -> String) -> Result<(), ClientError> {
    if is_valid { Ok(()) } else { Err(ClientError::Invalid(problem())) }
}

/// Why a like was not counted, or not published.
#[derive(Debug, thiserror::Error)]
pub enum LikeError {
    /// Redis did not count it, or its answer was lost. Nothing was published.
    #[error("count the like")]
    NotCounted(#[source] ClientError),
    /// The broker did not confirm the event, twice. It may have it nevertheless. Publish the same event again with
    /// [`Client::publish_event`](crate::Client::publish_event), and not a new one.
    #[error("publish the like")]
    NotConfirmed {
        /// The event that was sent.
        event: LikeEvent,
        /// Why the broker did not confirm it.
        #[source]
        source: BrokerError,
    },
    /// It counted in Redis, but the broker did not confirm the event, twice.
    #[error("publish the like")]
    NotPublished {
        /// The counted like.
        counted: Counted,
        /// Whether it still counts.
        taken_back: TakenBack,
        /// Why the broker did not confirm it.
        #[source]
        source: BrokerError,
    },
}

/// Why a change of a number was not counted, or not published.
#[derive(Debug, thiserror::Error)]
pub enum CountError {
    /// Nothing was published. Either tallyd does not accept such a change, or Redis failed to make it, or its answer
    /// was lost. In the last case it may count in Redis, until a reconcile corrects it.
    #[error("count a number")]
    NotCounted(#[source] ClientError),
    /// The broker did not confirm the event, twice. It may have it nevertheless. Retry with
    /// [`Client::republish`](crate::Client::republish), which sends the same event, and not with a new one.
    #[error("publish a count")]
    NotPublished {
        /// The change.
        changed: Box<Changed>,
        /// Whether it still counts in Redis. [`TakenBack::Yes`] also if the daemon would have counted it. A set is
        /// never taken back.
        taken_back: TakenBack,
        /// Why the broker did not confirm it.
        #[source]
        source: BrokerError,
    },
}
