//! Asks MySQL with a time limit, and stops asking for a while after a failure. So calls that need MySQL don't wait for
//! each other during an outage.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;

use super::{ClientError, Result};
use tallyd_core::chain::Chain;

/// The timeout of a query to MySQL.
const ASK_MAX: Duration = Duration::from_secs(5);

/// How long the client does not ask MySQL after MySQL failed to answer.
const AWAY_FOR: Duration = Duration::from_secs(5);

/// The instant until which the client does not ask MySQL, because MySQL failed to answer.
#[derive(Default)]
pub(crate) struct Breaker(Mutex<Option<Instant>>);

impl Breaker {
    /// Asks MySQL. If MySQL fails, asks once more, because perhaps only a connection had broken. After a pause only one
    /// call asks, and the other calls still fail immediately.
    ///
    /// # Errors
    /// [`ClientError::MySql`], or [`ClientError::MySqlRests`] if MySQL fails to answer in time, or failed recently.
    pub(crate) async fn ask<T, Q>(&self, question: impl Fn() -> Q) -> Result<T>
    where
        Q: Future<Output = tallyd_mysql::Result<T>>,
    {
        let former = self.enter()?;
        let until = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let twice = async {
            let first = question().await;
            if first.is_err() { question().await } else { first }
        };
        let failed = match tokio::time::timeout(ASK_MAX, twice).await {
            Ok(Ok(answer)) => {
                *until() = None;
                return Ok(answer);
            }
            Ok(Err(error)) => ClientError::MySql(error),
            Err(_) => ClientError::MySqlRests,
        };
        *until() = Some(Instant::now() + AWAY_FOR);
        if former.is_none() {
            let error = Chain(&failed).to_string();
            warn!(
                event = "mysql-unasked",
                error, "MySQL failed: numbers and likes that only it has stay unknown: {error}"
            );
        }
        Err(failed)
    }

    /// Returns the end of the last pause. Fails during a pause.
    fn enter(&self) -> Result<Option<Instant>> {
        let mut until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let former = *until;
        if former.is_some_and(|until| until > Instant::now()) {
            return Err(ClientError::MySqlRests);
        }
        *until = former.map(|_| Instant::now() + AWAY_FOR);
        Ok(former)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;
    use tallyd_mysql::StoreError;

    #[tokio::test]
    async fn after_a_pause_one_call_asks_and_all_others_fail() {
        let breaker = Breaker(Mutex::new(Some(Instant::now())));
        let mut first = Box::pin(breaker.ask(std::future::pending::<tallyd_mysql::Result<u8>>));
        assert!(tokio::time::timeout(Duration::ZERO, &mut first).await.is_err(), "the first call asks");
        assert!(matches!(breaker.ask(async || Ok(7)).await, Err(ClientError::MySqlRests)));
        drop(first);
        *breaker.0.lock().unwrap() = Some(Instant::now());
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
        assert!(matches!(failed, Err(ClientError::MySql(_))));
        assert!(matches!(breaker.ask(async || Ok(7)).await, Err(ClientError::MySqlRests)));
    }
}
