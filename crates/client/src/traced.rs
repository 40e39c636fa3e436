//! Keeps the `traceparent` of a call, which the events that it publishes have.

use tallyd_core::traceparent;

tokio::task_local! {
    static TRACEPARENT: Option<String>;
}

/// Runs calls of a [`Client`](crate::Client) as a part of a trace. Each event that these calls publish has this
/// `traceparent` (W3C Trace Context), as the header of its message or as a field of its own in a list. An invalid
/// `traceparent` is ignored.
///
/// ```no_run
/// # use tallyd_core::model::{Target, UserId};
/// # async fn f(client: tallyd_client::Client, request: &str, target: Target, user: UserId) -> Result<(), tallyd_client::PublishError> {
/// tallyd_client::traced(Some(request), client.like(target, user)).await?;
/// # Ok(())
/// # }
/// ```
pub async fn traced<T>(traceparent: Option<&str>, calls: impl Future<Output = T>) -> T {
    let valid = traceparent.and_then(traceparent::parse).map(str::to_owned);
    TRACEPARENT.scope(valid, calls).await
}

pub(crate) fn current() -> Option<String> {
    TRACEPARENT.try_with(Clone::clone).ok().flatten()
}
