//! Optional requests to Redis: the click limit of a user, and counters that MySQL also has. If Redis does not answer, a
//! client's request must neither fail nor wait.

use std::future::Future;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use tallyd_base::runtime::lock::locked;
use tallyd_client::ClientError;
use tallyd_client::gateway::HINT_MAX;
use tallyd_core::chain::Chain;

const REST: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Hints {
    /// The gateway sends Redis no request before this time. `None` while Redis answers.
    rests: Mutex<Option<Instant>>,
}

impl Hints {
    /// Returns Redis' answer. Returns `None` if Redis does not answer in time, or did not answer a recent request.
    pub(super) async fn ask<T>(&self, question: impl Future<Output = Result<T, ClientError>>) -> Option<T> {
        let former = *locked(&self.rests);
        if former.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        let problem = match tokio::time::timeout(HINT_MAX, question).await {
            Ok(Ok(answer)) => {
                if locked(&self.rests).take().is_some() {
                    info!(event = "gateway-redis-back", "Redis answers again");
                }
                return Some(answer);
            }
            Ok(Err(error)) => Chain(&error).to_string(),
            Err(_) => format!("no answer within {} ms", HINT_MAX.as_millis()),
        };
        let rests = locked(&self.rests).replace(Instant::now() + REST);
        if rests.is_none() {
            warn!(
                event = "gateway-redis-away",
                error = problem,
                "Redis does not answer: the gateway does not limit clicks, and reads counters from MySQL: {problem}"
            );
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn redis_is_left_alone_for_a_while_after_a_failure() {
        let hints = Hints::default();
        assert_eq!(hints.ask(async { Ok(7) }).await, Some(7));
        assert_eq!(hints.ask(async { Err::<u8, _>(ClientError::Answer("no")) }).await, None);
        assert_eq!(hints.ask(async { Ok(7) }).await, None, "Redis is not asked during the delay");
        *locked(&hints.rests) = Some(Instant::now());
        assert_eq!(hints.ask(async { Ok(7) }).await, Some(7));
        assert!(locked(&hints.rests).is_none());
    }

    #[tokio::test]
    async fn a_redis_that_says_nothing_is_not_waited_for() {
        let hints = Hints::default();
        let silent = hints.ask(std::future::pending::<Result<u8, ClientError>>());
        assert_eq!(tokio::time::timeout(HINT_MAX * 20, silent).await, Ok(None));
    }
}
