//! Why a run failed, by what that means for the next one.

use tallyd_core::repair_limits::LimitExceeded;
use tallyd_mysql::StoreError;
use tallyd_mysql::jobs::Outcome;

/// Why a run failed. Callers match it; the runs inside pass it through `anyhow` and [`From`] finds it again.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The run can't be done now, through no fault of the data: the same call can succeed later.
    #[error("{0}")]
    NotNow(String),
    /// The run can't be done before a person has changed something: it is not due before its time comes again.
    #[error("{0}")]
    Refused(String),
    /// The run would repair more than a person has allowed.
    #[error(transparent)]
    LimitExceeded(LimitExceeded),
    /// More partitions are in use than the configuration says: a read after a fence could lack events of the others.
    #[error(
        "[amqp] partitions is {known}, and {noted} partitions are in use since {raised_by} came with so many: set it to {noted} here, \
         too, and restart; lower it only as docs/operations.md says"
    )]
    TooFewPartitions {
        /// Of the configuration.
        known: u16,
        /// In use.
        noted: u16,
        /// The daemon that came with so many.
        raised_by: String,
    },
    /// A server failed, another run took over, or what was asked for isn't there.
    #[error(transparent)]
    Other(anyhow::Error),
}

impl JobError {
    /// What the record of the run says.
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Refused(_) => Outcome::Refused,
            Self::NotNow(_) | Self::LimitExceeded(_) | Self::TooFewPartitions { .. } | Self::Other(_) => {
                Outcome::Failed
            }
        }
    }

    /// The whole sentence, with its causes.
    pub fn text(&self) -> String {
        match self {
            Self::Other(error) => format!("{error:#}"),
            error => error.to_string(),
        }
    }

    /// The error as `anyhow` has it, so that its type can be asked for where it is none of these.
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::Other(error) => error,
            error => error.into(),
        }
    }
}

impl From<anyhow::Error> for JobError {
    fn from(error: anyhow::Error) -> Self {
        // With what was said on the way here.
        let text = format!("{error:#}");
        let error = match error.downcast() {
            Ok(Self::NotNow(_)) => return Self::NotNow(text),
            Ok(Self::Refused(_)) => return Self::Refused(text),
            Ok(error) => return error,
            Err(error) => error,
        };
        match error.downcast() {
            Ok(LimitExceeded(_)) => Self::LimitExceeded(LimitExceeded(text)),
            Err(error) => Self::Other(error),
        }
    }
}

impl From<StoreError> for JobError {
    fn from(error: StoreError) -> Self {
        Self::Other(error.into())
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_is_found_again_with_what_was_said_on_the_way() {
        let refused: anyhow::Result<()> = Err(JobError::Refused("no such table".to_owned()).into());
        let error = JobError::from(refused.context("3 numbers were corrected").unwrap_err());
        assert!(matches!(&error, JobError::Refused(text) if text == "3 numbers were corrected: no such table"));
        assert_eq!(error.outcome(), Outcome::Refused);
        let limit = JobError::from(anyhow::Error::from(LimitExceeded("too much".to_owned())));
        assert!(matches!(limit, JobError::LimitExceeded(_)));
    }

    #[test]
    fn an_error_of_a_server_keeps_its_text_and_its_type() {
        let taken = || anyhow::Error::from(StoreError::TakenOver("the job archive".to_owned())).context("archive it");
        let error = JobError::from(taken());
        assert_eq!(format!("{:#}", anyhow::Error::from(error)), format!("{:#}", taken()));
        assert!(JobError::from(taken()).into_error().is::<StoreError>());
    }
}
