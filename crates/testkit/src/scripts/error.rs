//! Why a change was not counted or not published.

use tallyd_client::{ClientError, Event, PublishError};
use tallyd_core::event::LikeEvent;

use super::{Changed, Counted, TakenBack};

#[derive(Debug, thiserror::Error)]
pub enum LikeError {
    /// Redis did not count the like, or Redis' answer was lost. Nothing was published.
    #[error("count the like")]
    NotCounted(#[source] ClientError),
    /// The daemon counts these likes, and the broker did not confirm the event. The broker may have the event
    /// nevertheless: publish the same event again.
    #[error("publish the like")]
    NotConfirmed {
        event: LikeEvent,
        #[source]
        source: PublishError,
    },
    /// The like was counted in Redis, but the broker did not confirm its event.
    #[error("publish the like")]
    NotPublished {
        counted: Counted,
        taken_back: TakenBack,
        #[source]
        source: ClientError,
    },
}

impl From<PublishError> for LikeError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::NotSent(error) => Self::NotCounted(error),
            PublishError::NotConfirmed { ref event, .. } => match **event {
                Event::Like(event) => Self::NotConfirmed { event, source: error },
                Event::Change(_) => unreachable!("a click is a like or an unlike"),
            },
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CountError {
    /// Nothing was published. There are three possible reasons: tallyd does not accept such a change, Redis failed to
    /// make the change, or Redis' answer was lost. If the answer was lost, the change may count in Redis until a
    /// reconcile corrects the number.
    #[error("count a number")]
    NotCounted(#[source] ClientError),
    /// The broker did not confirm the event. Retry with [`ApiServer::republish`](super::ApiServer::republish), which
    /// sends the same event.
    #[error("publish a count")]
    NotPublished {
        changed: Box<Changed>,
        /// Whether the change still counts in Redis. The value is also [`TakenBack::Yes`] if the daemon counts the
        /// number. A number that was set is never taken back.
        taken_back: TakenBack,
        #[source]
        source: ClientError,
    },
}
