//! The words for the state of a daemon, of its partitions and of runs.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DaemonState {
    #[default]
    Starting,
    Running,
    Draining,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConsumerState {
    #[default]
    Connecting,
    /// The daemon consumes the queue but gets no messages. The broker delivers the messages to another daemon, or the
    /// queue is empty.
    Listening,
    Writing,
    /// The daemon has messages of the partition, and has failed to commit them for some seconds.
    Failing,
    Paused,
    Stopped,
    /// This daemon's configuration does not contain the partition.
    Elsewhere,
}

impl ConsumerState {
    pub fn is_well(self) -> bool {
        matches!(self, Self::Listening | Self::Writing | Self::Paused | Self::Elsewhere)
    }
}

impl fmt::Display for ConsumerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportedOutcome {
    Done,
    Stopped,
    Braked,
    Refused,
    #[default]
    #[serde(other)]
    Failed,
}

impl ReportedOutcome {
    pub fn of(word: &str) -> Self {
        serde_json::from_value(word.into()).unwrap_or_default()
    }

    pub fn is_well(self) -> bool {
        matches!(self, Self::Done | Self::Stopped)
    }
}

impl fmt::Display for ReportedOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_read_as_they_are_written_and_one_of_another_version_is_no_success() {
        for (outcome, word) in
            [(ReportedOutcome::Done, "done"), (ReportedOutcome::Braked, "braked"), (ReportedOutcome::Failed, "failed")]
        {
            assert_eq!((ReportedOutcome::of(word), outcome.to_string()), (outcome, word.to_owned()));
        }
        assert_eq!(ReportedOutcome::of("of-another-version"), ReportedOutcome::Failed);
        assert_eq!(serde_json::from_str::<ReportedOutcome>("\"of-another-version\"").unwrap(), ReportedOutcome::Failed);
    }
}
