//! The errors of MySQL. Each error has a [`Fate`], which decides how the work continues (decision 0009).

use std::io::ErrorKind;
use std::time::Duration;

use sqlx::mysql::MySqlDatabaseError;

use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;
use tallyd_core::model::Micros;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{action}")]
    Sql {
        action: &'static str,
        #[source]
        source: Whole<sqlx::Error>,
    },
    /// The action took longer than `[mysql] transaction_timeout_ms`. The connection was closed, so it is unknown
    /// whether the action succeeded.
    #[error("{action}: no answer within {} ms", .limit.as_millis())]
    Timeout { action: &'static str, limit: Duration },
    /// The server does not support the faster of two statements. The slower statement works.
    #[error("the server does not support the required {0}")]
    Unsupported(&'static str),
    #[error("{0}: a counter would be out of range")]
    OutOfRange(&'static str),
    #[error("log in to MySQL")]
    Login(#[source] Whole<sqlx::Error>),
    #[error(
        "the account of [mysql] url has the plugin {0}, which tallyd does not know: use mysql_native_password or caching_sha2_password"
    )]
    UnknownPlugin(String),
    /// The session's transactions are READ COMMITTED, so MySQL cannot log their statements.
    #[error("binlog_format is STATEMENT, so MySQL refuses every write of tallyd: set binlog_format to ROW or MIXED")]
    StatementLog,
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
    #[error("this machine's clock and MySQL's clock differ by {0} s: correct the wrong clock")]
    ClocksApart(i64),
    /// An event is older than the oldest entry that the ledger of applied events keeps. The value is the time at which
    /// the ledger begins.
    #[error("an event is older than the ledger of applied events")]
    Forgotten(Micros),
    /// Another daemon has taken over the partition, or another run has taken over the job. The transaction wrote
    /// nothing.
    #[error("{0} has been taken over")]
    TakenOver(String),
    /// The server is read-only, so it is perhaps a replica behind a proxy. A reconcile must not compare with a
    /// replica's data, which can be old.
    #[error("{0}: the server is read-only: set [mysql] url to an address that leads only to the primary")]
    ReadOnly(&'static str),
}

impl StoreError {
    pub fn sql(action: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Sql { action, source: Whole(source) }
    }

    /// Returns the class of the error, which decides how the caller continues. Errors without a number are temporary:
    /// a timeout, an I/O error, a closed connection.
    pub fn fate(&self) -> Fate {
        match self {
            Self::TlsFault(_) => Fate::Untrusted,
            Self::OutOfRange(_) => Fate::Item,
            Self::Login(_) => Fate::Refused,
            Self::UnknownPlugin(_) | Self::StatementLog => Fate::Misconfigured,
            Self::Sql { source: Whole(sqlx::Error::Configuration(_)), .. } => Fate::Misconfigured,
            _ => self.number().map_or(Fate::Passing, fate_of),
        }
    }

    /// Asked only about statements that an operator wrote: there a missing table is a mistake, but for the daemon's own
    /// statements it is a temporary error.
    pub fn is_of_statement(&self) -> bool {
        self.number().is_some_and(|number| !is_of_server(number))
    }

    pub fn is_unsupported(&self) -> bool {
        match self {
            Self::Unsupported(_) => true,
            _ => self.number().is_some_and(|number| matches!(number, 1064 | 1235 | 1295)),
        }
    }

    /// Returns true if the statement lost against another transaction: there was a deadlock, or the other transaction
    /// has just inserted the same row. The caller can retry the same transaction immediately.
    pub fn is_contention(&self) -> bool {
        // MySQL's group replication reports 3101. Galera reports 1213, at the COMMIT or at another statement.
        self.number().is_some_and(|number| matches!(number, 1062 | 1213 | 3101))
    }

    /// Returns true if the server accepts no writes. The reason can be that another server is the primary after a
    /// failover, or that this server has lost the connection to its cluster.
    pub fn is_of_no_primary(&self) -> bool {
        if matches!(self, Self::ReadOnly(_)) {
            return true;
        }
        self.number().is_some_and(is_no_primary)
    }

    pub fn is_lock_timeout(&self) -> bool {
        self.number() == Some(1205)
    }

    /// Too much time, memory or locks, or too large a packet. Not if the connection, a competing transaction or a
    /// server that is not the primary caused the error.
    pub fn may_be_too_much(&self) -> bool {
        let excluded = self.is_contention() || self.is_lock_timeout() || self.is_of_no_primary();
        matches!(self, Self::Timeout { .. }) || (self.number().is_some() && !excluded)
    }

    pub(crate) fn is_out_of_time(&self) -> bool {
        // The first number is MariaDB's, the second is MySQL's.
        self.number().is_some_and(|number| matches!(number, 1969 | 3024))
    }

    pub fn code(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "timeout",
            _ if self.is_lock_timeout() => "1205",
            _ if self.number() == Some(1213) => "1213",
            Self::Sql { source: Whole(sqlx::Error::Database(_)), .. } => "other",
            Self::Sql { .. } | Self::Login(_) | Self::TlsFault(_) => "connection",
            _ => "other",
        }
    }

    pub fn io_kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Sql { source: Whole(sqlx::Error::Io(error)), .. } => Some(error.kind()),
            _ => None,
        }
    }

    pub fn number(&self) -> Option<u16> {
        match self {
            Self::Sql { source: Whole(sqlx::Error::Database(error)), .. } => {
                error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
            }
            _ => None,
        }
    }
}

/// Returns the class of MySQL's error number. A missing table counts as a temporary error: a person can create the
/// table while the daemon waits, so the daemon must not dead-letter the events.
fn fate_of(number: u16) -> Fate {
    match number {
        1048 // a column is null
        | 1264 | 1292 | 1366 | 1406 | 1690 | 3854 // out of range, wrong value, too long, not convertible
        | 1451 | 1452 // foreign key
        | 1644 // SIGNAL of a trigger
        | 3819 | 4025 // CHECK constraint: MySQL, MariaDB
        => Fate::Item,
        number if is_login(number) => Fate::Refused,
        1044 | 1049 // no right to the database, no such database
        | 1142 | 1143 | 1370 // no right to the table, to the column, to the routine
        | 1193 | 1227 // no such setting, no right to it
        => Fate::Refused,
        1665 => Fate::Misconfigured, // a binary log of statements
        _ => Fate::Passing,
    }
}

/// Wrong or expired password, no login that way, a locked account; this machine is blocked, or not allowed.
fn is_login(number: u16) -> bool {
    matches!(number, 1045 | 1698 | 1820 | 1862 | 3118 | 4151 | 1129 | 1130)
}

fn is_no_primary(number: u16) -> bool {
    matches!(
        number,
        1290 // read_only or super_read_only is on
        | 1836 // MySQL is in read-only mode
        | 3032 // offline_mode is on
        | 1047 // Galera has no quorum
    )
}

fn is_of_server(number: u16) -> bool {
    is_no_primary(number)
        || is_login(number)
        || matches!(
            number,
            1040 | 1203 | 1226 // too many connections
            | 1021 | 1037 | 1038 | 1041 // the disk or the memory is full
            | 1053 | 1077..=1079 // the server stops
            | 1152..=1161 | 2006 | 2013 | 4031 // the connection broke
            | 1180 | 1205 | 1213 | 3101 // a competing transaction, or a commit that Galera refused
            | 1317 | 1927 | 3169 // the statement or the connection was killed
            | 1969 | 3024 // the statement ran out of time
        )
}

pub type Result<T> = std::result::Result<T, StoreError>;

pub trait Context<T> {
    fn context(self, action: &'static str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, sqlx::Error> {
    fn context(self, action: &'static str) -> Result<T> {
        self.map_err(StoreError::sql(action))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_not_able_is_no_mistake_in_a_statement() {
        for of_server in [1040, 1047, 1180, 1205, 1213, 1290, 1836, 1927, 2013, 3024, 3032, 3101, 3169] {
            assert!(is_of_server(of_server), "{of_server}");
            assert_eq!(fate_of(of_server), Fate::Passing, "{of_server}");
        }
        assert!(is_of_server(1045) && fate_of(1045) == Fate::Refused, "no statement has a wrong password");
        for of_statement in [1054, 1062, 1064, 1142, 1146, 1366] {
            assert!(!is_of_server(of_statement), "{of_statement}");
        }
    }

    #[tokio::test]
    async fn an_error_without_a_number_is_temporary_unless_it_is_about_the_login() {
        let fate = |error| StoreError::sql("ask")(error).fate();
        assert_eq!(fate(sqlx::Error::Io(ErrorKind::UnexpectedEof.into())), Fate::Passing);
        assert_eq!(fate(sqlx::Error::PoolTimedOut), Fate::Passing);
        assert_eq!(fate(sqlx::Error::Protocol("unexpected packet".to_owned())), Fate::Passing);
        assert_eq!(fate(sqlx::Error::Configuration("ssl-mode".into())), Fate::Misconfigured);
        let store = crate::Store::new(&crate::config::Mysql { url: "mysql://u@h/t".into(), ..Default::default() }, 1);
        let unknown = sqlx::Error::Protocol("unknown authentication plugin: client_ed25519".to_owned());
        assert_eq!(store.unwrap().explain(unknown).fate(), Fate::Misconfigured);
    }
}
