//! Publishes changes of numbers other than likes.

use super::{Change, Changed, Client, Event, PublishError, Result, now};
use tallyd_core::model::{Metric, Target};

impl Client {
    /// Adds `delta` (-2^31 to 2^31) to a number of the target. The call publishes the event, and `at` is the time of
    /// this machine's clock. This clock must not be ahead by more than `[consumer] future_max`.
    ///
    /// tallyd adds `delta` once for each `event_id` (1 to 64 characters). Do not repeat this call after
    /// [`PublishError::NotConfirmed`]: pass the error's event to [`Client::publish`].
    ///
    /// # Errors
    ///
    /// [`PublishError`] says whether the event may have arrived.
    /// [`ClientError::CountedByApi`](super::ClientError::CountedByApi) if the number's rule says `writer = "api"`.
    pub async fn add(
        &self,
        target: Target,
        metric: Metric,
        delta: i64,
        event_id: &str,
    ) -> Result<Changed, PublishError> {
        self.change(target, metric, Change::Add { delta, event_id: event_id.to_owned() }).await
    }

    /// Sets a number of the target to `value` (-[`NUMBER_MAX`](super::NUMBER_MAX) to the same above zero), like
    /// [`Client::add`]. The number's rule must say `settable`, and also `below_zero` if the value is below zero. The
    /// `set` with the newest `at` wins.
    ///
    /// # Errors
    ///
    /// As [`Client::add`].
    pub async fn set(&self, target: Target, metric: Metric, value: i64) -> Result<Changed, PublishError> {
        self.change(target, metric, Change::Set(value)).await
    }

    /// Sets a number of the target to zero, like [`Client::set`].
    ///
    /// # Errors
    ///
    /// As [`Client::add`].
    pub async fn reset(&self, target: Target, metric: Metric) -> Result<Changed, PublishError> {
        self.change(target, metric, Change::Reset).await
    }

    async fn change(&self, target: Target, metric: Metric, change: Change) -> Result<Changed, PublishError> {
        let changed = Changed { target, metric, change, at: now() };
        let event = Event::Change(changed.clone());
        let message = self.checked(&event, None, true).await.map_err(PublishError::NotSent)?;
        match self.groups.publish(message).await {
            Ok(()) => Ok(changed),
            Err(source) => Err(PublishError::NotConfirmed { event: Box::new(event), source }),
        }
    }
}
