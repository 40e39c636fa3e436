//! How a command ends: its exit code.

use crate::admin::ask::NoDaemon;
use crate::boards::NotShown;
use crate::broker::NoAnswer;
use crate::cache::CacheError;
use crate::config::ConfigError;
use crate::dead_letters::NoLetter;
use crate::jobs::archive::ScopeError;
use crate::jobs::fence::{NotNow, TooFew};
use crate::runtime::tls::TlsFault;
use crate::store::migrate::MigrateError;
use crate::store::{Fate, StoreError};

/// Done.
pub const EXIT_DONE: u8 = 0;
/// Failed.
pub const EXIT_FAILED: u8 = 1;
/// A dry run found drift.
pub const EXIT_DRIFT: u8 = 2;
/// The command line is wrong (EX_USAGE).
pub const EXIT_USAGE: u8 = 64;
/// A lock is held or a server is away (EX_TEMPFAIL): the same call may do later.
pub const EXIT_TRY_LATER: u8 = 75;
/// The configuration or the schema is wrong (EX_CONFIG): no restart will help.
pub const EXIT_CONFIG: u8 = 78;

/// The command line is well formed, but what it names isn't there.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The exit code that says what kind of failure it was.
pub(super) fn exit_code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<ConfigError>()
            || cause.is::<TooFew>()
            || matches!(cause.downcast_ref::<MigrateError>(), Some(MigrateError::TooNew))
            || cause.downcast_ref::<CacheError>().is_some_and(CacheError::is_of_the_configuration)
        {
            return EXIT_CONFIG;
        }
        if cause.is::<Usage>() || cause.is::<ScopeError>() || cause.is::<NotShown>() || cause.is::<NoLetter>() {
            return EXIT_USAGE;
        }
        let passes = cause.downcast_ref::<StoreError>().is_some_and(|error| error.fate() == Fate::Passing)
            || matches!(
                cause.downcast_ref::<MigrateError>(),
                Some(MigrateError::Locked | MigrateError::TableBusy(_) | MigrateError::Store(_))
            )
            || cause.is::<NoAnswer>()
            || cause.is::<TlsFault>()
            || cause.is::<NoDaemon>()
            || cause.is::<CacheError>()
            || cause.is::<NotNow>()
            || cause.is::<lapin::Error>();
        if passes {
            return EXIT_TRY_LATER;
        }
    }
    EXIT_FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_the_code_of_its_kind() {
        let code = |error: anyhow::Error| exit_code(&error.context("outside"));
        assert_eq!(code(ConfigError(vec![]).into()), EXIT_CONFIG);
        assert_eq!(code(Usage(String::new()).into()), EXIT_USAGE);
        assert_eq!(code(NotNow(String::new()).into()), EXIT_TRY_LATER);
        assert_eq!(code(StoreError::TakenOver(String::new()).into()), EXIT_TRY_LATER);
        assert_eq!(code(anyhow::anyhow!("other")), EXIT_FAILED);
    }
}
