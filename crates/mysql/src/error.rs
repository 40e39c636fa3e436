//! What can go wrong with MySQL, and what becomes of the work then.

use std::time::Duration;

use sqlx::mysql::MySqlDatabaseError;

use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;
use tallyd_core::model::Micros;

/// An error of MySQL, or on the way to it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// MySQL said no, or nothing.
    #[error("{action}")]
    Sql {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: Whole<sqlx::Error>,
    },
    /// Longer than `[mysql] transaction_timeout_ms`: the connection was dropped, the outcome is unknown.
    #[error("{action}: no answer within {} ms", .limit.as_millis())]
    Timeout {
        /// What was tried.
        action: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The server can't do what a faster way needs; a slower one is there.
    #[error("the server has no such {0}")]
    Unsupported(&'static str),
    /// What an event asks of a number is more than 64 bits hold.
    #[error("{0}: a number would be out of range")]
    OutOfRange(&'static str),
    /// The server can't be believed to be the one that is meant, or doesn't believe us.
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
    /// By how many seconds this machine's clock is ahead of MySQL's.
    #[error("this machine's clock and MySQL's are {0} s apart: one of them is wrong")]
    ClocksApart(i64),
    /// An event is older than what the ledger remembers, which begins then.
    #[error("an event is older than the ledger of applied events")]
    Forgotten(Micros),
    /// Another daemon has taken the partition over, or another run the job: what this one wanted to write is void.
    #[error("{0} has been taken over")]
    TakenOver(String),
    /// What was to be read for a comparison would come from a replica: a proxy sends reads there.
    #[error("{0}: the server is read-only: let [mysql] url lead to the primary alone")]
    ReadOnly(&'static str),
}

impl StoreError {
    /// The library's error while `action` was tried.
    pub fn sql(action: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Sql { action, source: Whole(source) }
    }

    /// What becomes of the work.
    pub fn fate(&self) -> Fate {
        match self {
            Self::TlsFault(_) => Fate::Untrusted,
            Self::OutOfRange(_) => Fate::Item,
            _ => self.number().map_or(Fate::Passing, fate_of),
        }
    }

    /// The server doesn't know the statement, or what it rests on: a slower one will do.
    pub fn is_unsupported(&self) -> bool {
        match self {
            Self::Unsupported(_) => true,
            _ => self.number().is_some_and(|number| matches!(number, 1064 | 1235 | 1295)),
        }
    }

    /// A rival was first: a deadlock, or a row that someone else has just inserted. The same transaction will do at once.
    pub fn is_contention(&self) -> bool {
        // 3101: MySQL's group replication; Galera says 1213, at the COMMIT as anywhere.
        self.number().is_some_and(|number| matches!(number, 1062 | 1213 | 3101))
    }

    /// The server may not be written to: a failover has made another one the primary, or it has lost the others of its cluster.
    pub fn is_of_no_primary(&self) -> bool {
        if matches!(self, Self::ReadOnly(_)) {
            return true;
        }
        // read_only or super_read_only; MySQL's read-only mode; offline_mode; Galera without a quorum.
        self.number().is_some_and(|number| matches!(number, 1290 | 1836 | 3032 | 1047))
    }

    /// A rival has kept a row for longer than it was waited for. The same transaction will do once that one is over.
    pub fn is_lock_timeout(&self) -> bool {
        self.number() == Some(1205)
    }

    /// The server, or the way to it, may have been asked for too much at once: a statement's time, a packet, memory, locks. Errors of the
    /// connection, of rivals and of a server that is no primary have nothing to do with that.
    pub fn may_be_too_much(&self) -> bool {
        let excluded = self.is_contention() || self.is_lock_timeout() || self.is_of_no_primary();
        matches!(self, Self::Timeout { .. }) || (self.number().is_some() && !excluded)
    }

    /// The server has ended a statement that took longer than it was given.
    pub fn is_out_of_time(&self) -> bool {
        // MariaDB, MySQL
        self.number().is_some_and(|number| matches!(number, 1969 | 3024))
    }

    /// What kind of failure it was, in a word for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "timeout",
            _ if self.is_lock_timeout() => "1205",
            _ if self.number() == Some(1213) => "1213",
            Self::Sql { source: Whole(sqlx::Error::Database(_)), .. } => "other",
            Self::Sql { .. } | Self::TlsFault(_) => "connection",
            _ => "other",
        }
    }

    /// MySQL's number of the error, where it is MySQL's.
    pub fn number(&self) -> Option<u16> {
        match self {
            Self::Sql { source: Whole(sqlx::Error::Database(error)), .. } => {
                error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
            }
            _ => None,
        }
    }
}

/// By MySQL's number. A missing table passes: it can be made while the daemon waits, and setting events aside for it would be wrong.
fn fate_of(number: u16) -> Fate {
    match number {
        1048 // a column is null
        | 1264 | 1292 | 1366 | 1406 | 1690 // out of range, wrong value, too long
        | 1451 | 1452 // foreign key
        | 1644 // SIGNAL of a trigger
        | 3819 | 4025 // CHECK constraint: MySQL, MariaDB
        => Fate::Item,
        1044 | 1049 // no right to the database, no such database
        | 1045 | 1698 // wrong password, no login that way
        | 1142 | 1143 // no right to the table, to the column
        | 1193 | 1227 // no such setting, no right to it
        => Fate::Refused,
        _ => Fate::Passing,
    }
}

/// The result of whatever asks MySQL.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Says what was tried, where an error is born.
pub(super) trait Context<T> {
    fn context(self, action: &'static str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, sqlx::Error> {
    fn context(self, action: &'static str) -> Result<T> {
        self.map_err(StoreError::sql(action))
    }
}
