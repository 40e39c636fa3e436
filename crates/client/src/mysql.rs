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
    /// Asks MySQL.
    ///
    /// # Errors
    /// [`ClientError::MySql`], or [`ClientError::MySqlRests`] if MySQL fails to answer in time, or failed recently.
    pub(crate) async fn ask<T>(&self, question: impl Future<Output = tallyd_mysql::Result<T>>) -> Result<T> {
        let until = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let former = *until();
        if former.is_some_and(|until| until > Instant::now()) {
            return Err(ClientError::MySqlRests);
        }
        let failed = match tokio::time::timeout(ASK_MAX, question).await {
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
}
