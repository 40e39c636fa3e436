//! An operator's orders to running daemons, for example to pause a task or to throttle reconciles. Pure.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::Micros;

/// The longest time for which an operator's order is valid. Without a maximum, an order would never end if the operator
/// forgot it.
pub const LASTS_MAX: Duration = Duration::from_secs(7 * 86_400);

pub const REASON_MAX: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    Consumer,
    Outbox,
    Reconcile,
    Archive,
}

impl Task {
    pub const ALL: [Self; 4] = [Self::Consumer, Self::Outbox, Self::Reconcile, Self::Archive];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Consumer => "consumer",
            Self::Outbox => "outbox",
            Self::Reconcile => "reconcile",
            Self::Archive => "archive",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|task| task.name() == name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    Pause,
    Throttle { targets_per_second: u32 },
}

impl Command {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Throttle { .. } => "throttle",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub task: Task,
    pub command: Command,
    /// The time when the order was given, by MySQL's clock.
    pub since: Micros,
    /// The task follows the operator's command until this time of MySQL's clock.
    pub until: Micros,
    pub by: String,
    pub reason: String,
}

impl Order {
    pub fn undo(&self) -> String {
        match self.command {
            Command::Pause => format!("tallyd resume {}", self.task),
            Command::Throttle { .. } => format!("tallyd admin throttle {} --off", self.task),
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
    fn each_task_and_command_has_the_name_that_operators_write() {
        for (task, name) in Task::ALL.into_iter().zip(["consumer", "outbox", "reconcile", "archive"]) {
            assert_eq!((task.name(), Task::named(name)), (name, Some(task)));
        }
        assert_eq!(Task::named("all"), None);
        let throttle = Command::Throttle { targets_per_second: 50 };
        assert_eq!([Command::Pause, throttle].map(Command::name), ["pause", "throttle"]);
        assert_eq!(LASTS_MAX.as_secs(), 604_800, "a week");
    }

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
