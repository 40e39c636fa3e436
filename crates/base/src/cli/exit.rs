//! Exit codes of the commands.

use std::error::Error;

use crate::boards::NotShown;
use crate::config::ConfigError;
use crate::jobs::JobError;
use tallyd_connect::fate::Fate;
use tallyd_mysql::StoreError;
use tallyd_mysql::migrate::MigrateError;
use tallyd_rabbitmq::BrokerError;
use tallyd_redis::CacheError;

pub const EXIT_DONE: u8 = 0;
pub const EXIT_FAILED: u8 = 1;
pub const EXIT_DRIFT: u8 = 2;
pub const EXIT_USAGE: u8 = 64;
/// A lock is held or a server is unreachable (EX_TEMPFAIL): the same call can succeed later.
pub const EXIT_TRY_LATER: u8 = 75;
/// The configuration or the schema is invalid (EX_CONFIG): a restart doesn't help (decision 0056).
pub const EXIT_CONFIG: u8 = 78;

/// The command line is well formed, but it names something that doesn't exist.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// A server is unreachable or busy: the same call can succeed later.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TryLater(pub String);

/// The code of an error, if this module does not know the error.
pub type Own = fn(&(dyn Error + 'static)) -> Option<u8>;

/// `own` knows the errors of the caller.
pub fn exit_code(error: &anyhow::Error, own: Own) -> u8 {
    error.chain().find_map(|cause| code_of(cause, own)).unwrap_or(EXIT_FAILED)
}

fn code_of(cause: &(dyn Error + 'static), own: Own) -> Option<u8> {
    match cause.downcast_ref() {
        Some(JobError::NotNow(_) | JobError::Paused(_)) => return Some(EXIT_TRY_LATER),
        Some(JobError::TooFewPartitions { .. }) => return Some(EXIT_CONFIG),
        Some(JobError::Other(error)) => return error.chain().find_map(|cause| code_of(cause, own)),
        Some(JobError::Refused(_) | JobError::LimitExceeded(_)) => return None,
        None => {}
    }
    match cause.downcast_ref() {
        Some(MigrateError::TooNew | MigrateError::Denied(_)) => return Some(EXIT_CONFIG),
        Some(MigrateError::Locked | MigrateError::TableBusy(_)) => return Some(EXIT_TRY_LATER),
        Some(MigrateError::Store(error)) => return code_of(error, own),
        _ => {}
    }
    if cause.is::<ConfigError>() {
        Some(EXIT_CONFIG)
    } else if cause.is::<Usage>() || cause.is::<NotShown>() {
        Some(EXIT_USAGE)
    } else if cause.is::<TryLater>() {
        Some(EXIT_TRY_LATER)
    } else if let Some(code) = own(cause) {
        Some(code)
    } else {
        match fate_of(cause)? {
            Fate::Refused if cause.downcast_ref().is_some_and(BrokerError::is_missing) => Some(EXIT_TRY_LATER),
            Fate::Misconfigured | Fate::Refused => Some(EXIT_CONFIG),
            Fate::Passing | Fate::Untrusted => Some(EXIT_TRY_LATER),
            // The error concerns one key in Redis. After an operator has deleted this key, the same command succeeds.
            // Deleting the key is safe, because MySQL is the source of truth.
            Fate::Item if cause.is::<CacheError>() => Some(EXIT_TRY_LATER),
            Fate::Item => None,
        }
    }
}

pub fn fate_of(cause: &(dyn Error + 'static)) -> Option<Fate> {
    let store = cause.downcast_ref().map(StoreError::fate);
    let cache = || cause.downcast_ref().map(CacheError::fate);
    let broker = || cause.downcast_ref().map(BrokerError::fate);
    store.or_else(cache).or_else(broker)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_failure_has_the_code_of_its_kind() {
        let code = |error: anyhow::Error| exit_code(&error.context("outside"), |_| None);
        assert_eq!(code(ConfigError(vec![]).into()), EXIT_CONFIG);
        assert_eq!(code(Usage(String::new()).into()), EXIT_USAGE);
        assert_eq!(code(JobError::NotNow(String::new()).into()), EXIT_TRY_LATER);
        assert_eq!(code(JobError::Refused(String::new()).into()), EXIT_FAILED);
        let taken_over = anyhow::Error::from(StoreError::TakenOver(String::new())).context("archive it");
        assert_eq!(code(JobError::from(taken_over).into()), EXIT_TRY_LATER);
        let config = anyhow::Error::from(ConfigError(vec![]));
        assert_eq!(code(JobError::from(config).into()), EXIT_CONFIG);
        assert_eq!(code(StoreError::TakenOver(String::new()).into()), EXIT_TRY_LATER);
        let silent = BrokerError::NoAnswer { action: "publish", limit: Duration::ZERO };
        assert_eq!(code(silent.into()), EXIT_TRY_LATER);
        assert_eq!(code(BrokerError::Nacked.into()), EXIT_FAILED);
        assert_eq!(code(anyhow::anyhow!("other")), EXIT_FAILED);
    }
}
