//! Calls for many keys. A key for which Redis refuses a call, or a node that does not answer, holds up no other call.

use redis::Value;
use tallyd_core::chain::Chain;

use super::{CacheError, Result};

pub(crate) enum CallOutcome {
    Answered(Value),
    /// Redis refuses the call until someone corrects the key.
    Refused(CacheError),
    /// A retry can help. The call may have run, or may still run later.
    Failed,
}

/// Additions that Redis refused. A retry does not help.
#[derive(Debug, Default)]
pub struct Refused {
    pub additions: u64,
    pub error: Option<String>,
}

/// Passes the outcome of each call to `read`, with the position of the call.
///
/// # Errors
/// The first error after which a retry can help, or the first error of `read`. All outcomes were read.
pub(crate) fn read_each(
    answers: Vec<Result<Value>>,
    mut read: impl FnMut(usize, CallOutcome) -> Result<()>,
) -> Result<()> {
    let mut failed = Ok(());
    for (place, answer) in answers.into_iter().enumerate() {
        let (outcome, error) = match answer {
            Ok(answer) => (CallOutcome::Answered(answer), Ok(())),
            Err(error) if error.is_for_ever() => (CallOutcome::Refused(error), Ok(())),
            Err(error) => (CallOutcome::Failed, Err(error)),
        };
        failed = failed.and(error).and(read(place, outcome));
    }
    failed
}

impl Refused {
    pub(crate) fn note(&mut self, additions: u64, error: &str) {
        self.additions += additions;
        self.error.get_or_insert_with(|| error.to_owned());
    }

    pub(crate) fn note_call(&mut self, additions: u64, error: &CacheError) {
        self.note(additions, &Chain(error).to_string());
    }
}

#[cfg(test)]
mod tests {
    use redis::{ErrorKind, RedisError, ServerErrorKind};

    use super::*;
    use crate::error::Context;

    #[test]
    fn every_outcome_is_read_and_the_first_passing_error_is_returned() {
        let error = |kind: ErrorKind, detail: &str| {
            let error = RedisError::from((kind, "as the test wants", detail.to_owned()));
            Err::<Value, _>(error).context("ask")
        };
        let refused =
            error(ErrorKind::Server(ServerErrorKind::ResponseError), "no integer script: 5d, on @user_script:7.");
        let unknown = error(ErrorKind::Server(ServerErrorKind::ResponseError), "unknown command 'EVALSHA'");
        let quota = error(ErrorKind::Server(ServerErrorKind::ResponseError), "max daily request limit exceeded");
        let answers = vec![Ok(Value::Int(1)), refused, unknown, quota, error(ErrorKind::Io, "away"), Ok(Value::Int(2))];
        let mut seen = Vec::new();
        let failed = read_each(answers, |place, outcome| {
            assert_eq!(place, seen.len());
            seen.push(match outcome {
                CallOutcome::Answered(Value::Int(answer)) => answer,
                CallOutcome::Answered(_) => 0,
                CallOutcome::Refused(_) => -1,
                CallOutcome::Failed => -2,
            });
            Ok(())
        });
        assert_eq!(seen, [1, -1, -2, -2, -2, 2]);
        assert!(Chain(&failed.unwrap_err()).to_string().contains("EVALSHA"));
    }
}
