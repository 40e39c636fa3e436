//! Asks MySQL with a time limit, and stops asking for a while after a failure. So calls that need MySQL don't wait for
//! each other during an outage.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;

use super::{ClientError, Result};
use tallyd_core::chain::Chain;
use tallyd_mysql::StoreError;

const ASK_MAX: Duration = Duration::from_secs(5);

const AWAY_FOR: Duration = Duration::from_secs(5);

struct Pause {
    until: Instant,
    /// The failure. Calls during the pause fail with this error.
    failure: Arc<StoreError>,
}

/// The pause in which the client does not ask MySQL, because MySQL failed to answer.
#[derive(Default)]
pub(crate) struct Breaker(Mutex<Option<Pause>>);

impl Breaker {
    /// Asks MySQL. If MySQL fails, asks once more, because perhaps only a connection had broken. After a pause only one
    /// call asks, and the other calls still fail immediately.
    ///
    /// # Errors
    /// [`ClientError::MySql`] if MySQL fails to answer in time, or failed recently.
    pub(crate) async fn ask<T, Q>(&self, question: impl Fn() -> Q) -> Result<T>
    where
        Q: Future<Output = tallyd_mysql::Result<T>>,
    {
        let was_away = self.enter()?;
        let twice = async {
            let first = question().await;
            if first.is_err() { question().await } else { first }
        };
        let failed = match tokio::time::timeout(ASK_MAX, twice).await {
            Ok(Ok(answer)) => {
                *self.pause() = None;
                return Ok(answer);
            }
            Ok(Err(error)) => error,
            Err(_) => StoreError::Timeout { action: "ask MySQL", limit: ASK_MAX },
        };
        let failure = Arc::new(failed);
        *self.pause() = Some(Pause { until: Instant::now() + AWAY_FOR, failure: Arc::clone(&failure) });
        if !was_away {
            let error = Chain(&*failure).to_string();
            warn!(
                event = "mysql-unasked",
                error, "MySQL failed: numbers and likes that only it has stay unknown: {error}"
            );
        }
        Err(ClientError::MySql(failure))
    }

    fn enter(&self) -> Result<bool> {
        let mut pause = self.pause();
        let Some(Pause { until, failure }) = &mut *pause else { return Ok(false) };
        if *until > Instant::now() {
            return Err(ClientError::MySql(Arc::clone(failure)));
        }
        *until = Instant::now() + AWAY_FOR;
        Ok(true)
    }

    fn pause(&self) -> MutexGuard<'_, Option<Pause>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;

    fn paused_until_now() -> Pause {
        Pause { until: Instant::now(), failure: Arc::new(StoreError::OutOfRange("fail")) }
    }

    #[tokio::test]
    async fn after_a_pause_one_call_asks_and_all_others_fail() {
        let breaker = Breaker(Mutex::new(Some(paused_until_now())));
        let mut first = Box::pin(breaker.ask(std::future::pending::<tallyd_mysql::Result<u8>>));
        assert!(tokio::time::timeout(Duration::ZERO, &mut first).await.is_err(), "the first call asks");
        assert!(matches!(breaker.ask(async || Ok(7)).await, Err(ClientError::MySql(_))));
        drop(first);
        *breaker.0.lock().unwrap() = Some(paused_until_now());
        assert!(matches!(breaker.ask(async || Ok(7)).await, Ok(7)));
        assert!(breaker.0.lock().unwrap().is_none());
    }

    #[tokio::test]
    async fn one_broken_connection_is_no_failure_of_mysql() {
        let (breaker, asked) = (Breaker::default(), AtomicU8::new(0));
        let broken = async || match asked.fetch_add(1, Ordering::Relaxed) {
            0 => Err(StoreError::OutOfRange("fail once")),
            number => Ok(number),
        };
        assert!(matches!(breaker.ask(broken).await, Ok(1)));
        let failed = breaker.ask(async || Err::<u8, _>(StoreError::OutOfRange("fail twice"))).await;
        let failure = failed.unwrap_err().to_string();
        assert!(failure.contains("fail twice"), "{failure}");
        assert_eq!(breaker.ask(async || Ok(7)).await.unwrap_err().to_string(), failure, "the pause names the cause");
    }
}
