//! The trace of a call. Its messages carry it in the header `traceparent`.

use tallyd_core::traceparent;

tokio::task_local! {
    static TRACEPARENT: Option<String>;
}

/// Runs calls of a [`Client`](crate::Client) that belong to a trace. Each message that they publish has the header
/// `traceparent` (W3C Trace Context). An invalid value is left out.
///
/// ```no_run
/// # use tallyd_core::model::{Target, UserId};
/// # async fn f(client: tallyd_client::Client, request: &str, target: Target, user: UserId) -> Result<(), tallyd_client::LikeError> {
/// tallyd_client::traced(Some(request), client.like(target, user, &[])).await?;
/// # Ok(())
/// # }
/// ```
pub async fn traced<T>(traceparent: Option<&str>, calls: impl Future<Output = T>) -> T {
    let valid = traceparent.and_then(traceparent::parse).map(str::to_owned);
    TRACEPARENT.scope(valid, calls).await
}

/// The trace of the calls that run now.
pub(crate) fn current() -> Option<String> {
    TRACEPARENT.try_with(Clone::clone).ok().flatten()
}
