//! Publishes likes.

use std::time::Duration;

use tokio::time::timeout;

use super::gateway::HINT_MAX;
use super::{Client, Event, PublishError, Result, now};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Target, UserId};

/// The result of a click.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clicked {
    /// The event of the click is published. The daemon counts the click if the click changes what the user likes.
    Published(LikeEvent),
    /// The user clicks too often: nothing was published.
    Limited {
        /// How long the user must wait.
        wait: Duration,
    },
}

impl Client {
    /// Makes the user like the target: publishes the event, with the time of this machine's clock. A double click, a
    /// retry after a failure, and clicks on two devices count once.
    ///
    /// # Errors
    ///
    /// [`PublishError`] says whether the event may have arrived. The caller can make the same call again.
    /// [`ClientError::CountedByApi`](super::ClientError::CountedByApi) if the rule of likes says `writer = "api"`.
    pub async fn like(&self, target: Target, user: UserId) -> Result<Clicked, PublishError> {
        self.click(LikeEvent { target, user, at: now(), liked: true }).await
    }

    /// Removes the user's like of the target. Apart from this, the call works like [`Client::like`].
    ///
    /// # Errors
    ///
    /// As [`Client::like`].
    pub async fn unlike(&self, target: Target, user: UserId) -> Result<Clicked, PublishError> {
        self.click(LikeEvent { target, user, at: now(), liked: false }).await
    }

    async fn click(&self, like: LikeEvent) -> Result<Clicked, PublishError> {
        let event = Event::Like(like);
        let message = self.checked(&event, None, true).await.map_err(PublishError::NotSent)?;
        // While Redis is unreachable, the number of a user's clicks is not limited.
        let limited = timeout(HINT_MAX, self.limits_of(&[like])).await.ok().and_then(Result::ok);
        if let Some(wait) = limited.and_then(|mut waits| waits.pop().flatten()) {
            return Ok(Clicked::Limited { wait });
        }
        match self.groups.publish(message).await {
            Ok(()) => Ok(Clicked::Published(like)),
            Err(source) => Err(PublishError::NotConfirmed { event: Box::new(event), source }),
        }
    }
}
