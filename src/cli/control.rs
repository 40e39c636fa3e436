//! `tallyd pause`, `resume` and `throttle`: send orders to all daemons of the site, over a control socket.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::http::StatusCode;
use clap::{ArgGroup, Args, Subcommand, ValueEnum};

use super::{Usage, parse_time};
use crate::admin::ask::{self, Answer};
use crate::admin::control::{Done, ORDERS, Wanted};
use tallyd_base::cli::{EXIT_DONE, TryLater};
use tallyd_base::config;
use tallyd_core::control::{Command, LASTS_MAX, Task};

#[derive(Debug, Subcommand)]
pub(super) enum ControlCommand {
    /// Pause a task in all daemons until the pause ends.
    Pause {
        /// The task.
        #[arg(value_enum)]
        task: TaskArg,
        #[command(flatten)]
        lasts: Lasts,
    },
    /// End the pause of a task.
    Resume {
        /// The task.
        #[arg(value_enum)]
        task: TaskArg,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum RareControl {
    /// Throttle reconciles, including a reconcile that is running.
    #[command(group(ArgGroup::new("how").required(true)))]
    Throttle {
        /// The task.
        #[arg(value_enum)]
        task: ThrottledArg,
        /// Compare at most this many targets each second.
        #[arg(long, value_name = "N", group = "how", value_parser = clap::value_parser!(u32).range(1..))]
        targets_per_second: Option<u32>,
        /// End the throttle.
        #[arg(long, group = "how", conflicts_with_all = ["lasts", "reason"])]
        off: bool,
        #[command(flatten)]
        lasts: Lasts,
    },
}

#[derive(Debug, Args)]
pub(super) struct Lasts {
    /// End automatically after this time: 90s, 30m, 2h, at most 7d.
    #[arg(id = "lasts", long = "for", value_name = "TIME", default_value = "1h", value_parser = parse_lasts)]
    time: Duration,
    /// Give a reason, which the status shows.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum TaskArg {
    /// Write messages from the broker to MySQL.
    Consumer,
    /// Add counts to Redis after the consumer has written them to MySQL.
    Outbox,
    /// Compare Redis with MySQL.
    Reconcile,
    /// Archive boards and take snapshots of them.
    Archive,
}

impl From<TaskArg> for Task {
    fn from(task: TaskArg) -> Self {
        match task {
            TaskArg::Consumer => Self::Consumer,
            TaskArg::Outbox => Self::Outbox,
            TaskArg::Reconcile => Self::Reconcile,
            TaskArg::Archive => Self::Archive,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ThrottledArg {
    /// Compare Redis with MySQL.
    Reconcile,
}

fn parse_lasts(text: &str) -> Result<Duration, String> {
    let time = parse_time(text)?;
    if time < Duration::from_secs(1) || time > LASTS_MAX {
        return Err("write a time from 1s to 7d".to_owned());
    }
    Ok(time)
}

/// An operator's order: the task, the command, and how long it lasts. `None` ends the command.
pub(super) type Ordered = (Task, Command, Option<Lasts>);

impl From<ControlCommand> for Ordered {
    fn from(command: ControlCommand) -> Self {
        match command {
            ControlCommand::Pause { task, lasts } => (task.into(), Command::Pause, Some(lasts)),
            ControlCommand::Resume { task } => (task.into(), Command::Pause, None),
        }
    }
}

impl From<RareControl> for Ordered {
    fn from(command: RareControl) -> Self {
        let RareControl::Throttle { task: ThrottledArg::Reconcile, targets_per_second, lasts, .. } = command;
        let command = Command::Throttle { targets_per_second: targets_per_second.unwrap_or_default() };
        (Task::Reconcile, command, targets_per_second.map(|_| lasts))
    }
}

pub(super) async fn run(config: &Path, (task, command, lasts): Ordered) -> Result<u8> {
    let (lasts_s, reason) = lasts.map_or_else(Default::default, |it| (Some(it.time.as_secs()), it.reason));
    let done = order(config, &Wanted { task, command, lasts_s, by: user(), reason }).await?;
    writeln!(std::io::stdout(), "{}", sentence(task, command, &done)).context("print")?;
    Ok(EXIT_DONE)
}

/// Returns the user's name. The socket adds the uid, because the client must not choose the uid.
fn user() -> String {
    let named = ["SUDO_USER", "USER", "LOGNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    named.into_iter().find(|name| !name.is_empty()).unwrap_or_else(|| "somebody".to_owned())
}

async fn order(config: &Path, wanted: &Wanted) -> Result<Done> {
    let Some(socket) = config::load_admin(config)?.control()? else {
        let problem = "[admin] control is empty, so the daemon has no control socket: set it, and restart the daemon";
        return Err(Usage(problem.to_owned()).into());
    };
    let Answer { status, body } = ask::post(&socket, ORDERS, serde_json::to_string(wanted)?).await?;
    match status {
        StatusCode::OK => serde_json::from_str(&body).context("read the daemon's answer"),
        StatusCode::SERVICE_UNAVAILABLE => Err(TryLater(format!("nothing was changed: {}", reason(&body))).into()),
        _ => Err(anyhow!("the daemon rejects the order: {}", reason(&body))),
    }
}

fn reason(body: &str) -> String {
    let error = serde_json::from_str::<serde_json::Value>(body).ok();
    let error = error.as_ref().and_then(|error| error["error"].as_str()).unwrap_or("no reason is known");
    error.replace(char::is_control, " ")
}

fn sentence(task: Task, command: Command, Done { before, now }: &Done) -> String {
    let (is, was) = match command {
        Command::Pause => ("paused", "resumes"),
        Command::Throttle { .. } => ("throttled", "is no longer throttled"),
    };
    match (now, before) {
        (Some(order), _) => format!("{order}\n`{}` ends it", order.undo()),
        (None, Some(_)) => format!("{task} {was}"),
        (None, None) => format!("{task} was not {is}"),
    }
}
