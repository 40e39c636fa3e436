//! An operator's orders to running daemons, for example to pause a task or to throttle reconciles. Pure.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::Micros;

/// The longest time for which an operator's order is valid. Without a maximum, an order would never end if the operator
/// forgot it.
pub const LASTS_MAX: Duration = Duration::from_secs(7 * 86_400);

/// The maximum length of a reason, in characters.
pub const REASON_MAX: usize = 200;

/// A task that can be paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Receives messages from the broker and writes their events to MySQL.
    Consumer,
    /// Adds to Redis the changes that the consumer has written to MySQL.
    Outbox,
    /// Compares Redis with MySQL.
    Reconcile,
    /// Archives boards and takes snapshots of them.
    Archive,
}

impl Task {
    pub const ALL: [Self; 4] = [Self::Consumer, Self::Outbox, Self::Reconcile, Self::Archive];

    /// The task's name in MySQL, in metrics and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Consumer => "consumer",
            Self::Outbox => "outbox",
            Self::Reconcile => "reconcile",
            Self::Archive => "archive",
        }
    }

    /// Finds the task `name`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|task| task.name() == name)
    }
}

/// An operator's command to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Stop until the order ends.
    Pause,
    /// Compare at most this many targets each second.
    Throttle {
        /// The maximum number of rows of `counter` to compare each second.
        targets_per_second: u32,
    },
}

impl Command {
    /// The command's name in MySQL.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Throttle { .. } => "throttle",
        }
    }
}

/// A command for one task, valid until a given time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub task: Task,
    pub command: Command,
    /// The time when the order was given, by MySQL's clock.
    pub since: Micros,
    /// The task follows the operator's command until this time of MySQL's clock.
    pub until: Micros,
    /// The user and host that gave the order.
    pub by: String,
    /// The operator's reason, or an empty text.
    pub reason: String,
}

impl Order {
    /// Returns the command that an operator runs to cancel this order.
    pub fn undo(&self) -> String {
        match self.command {
            Command::Pause => format!("tallyd resume {}", self.task),
            Command::Throttle { .. } => format!("tallyd throttle {} --off", self.task),
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// For example `consumer is paused until 2026-11-25 10:40:08 UTC by anna on db1: MySQL is moved`.
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { task, command, until, by, reason, .. } = self;
        match command {
            Command::Pause => write!(f, "{task} is paused")?,
            Command::Throttle { targets_per_second } => {
                write!(f, "{task} is throttled to {targets_per_second} targets a second")?;
            }
        }
        let until = Timestamp::from_microsecond(until.0).unwrap_or(Timestamp::MAX);
        write!(f, " until {} by {by}", until.strftime("%F %T UTC"))?;
        if reason.is_empty() { Ok(()) } else { write!(f, ": {reason}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_says_what_is_ordered_until_when_by_whom() {
        let pause = Order {
            task: Task::Consumer,
            command: Command::Pause,
            since: Micros(0),
            until: Micros(1_795_603_208_900_000),
            by: "anna on db1".to_owned(),
            reason: String::new(),
        };
        assert_eq!(pause.to_string(), "consumer is paused until 2026-11-25 10:40:08 UTC by anna on db1");
        assert_eq!(pause.undo(), "tallyd resume consumer");
        let command = Command::Throttle { targets_per_second: 50 };
        let throttle = Order { task: Task::Reconcile, command, reason: "MySQL is busy".to_owned(), ..pause };
        let expected =
            "reconcile is throttled to 50 targets a second until 2026-11-25 10:40:08 UTC by anna on db1: MySQL is busy";
        assert_eq!(throttle.to_string(), expected);
        let json = serde_json::to_value(&throttle).unwrap();
        assert_eq!(json["command"]["throttle"]["targets_per_second"], 50);
        assert_eq!(serde_json::from_value::<Order>(json).unwrap(), throttle);
    }
}
