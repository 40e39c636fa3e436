//! The rule for commands that delete, prune or take over: each has a dry run, asks on a terminal, needs `--yes`
//! elsewhere, and says the way back. Where it applies, each has a safety limit, and checks that what must be stopped is
//! stopped.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Context, Result};
use clap::Args;

use super::{EXIT_DONE, EXIT_FAILED, EXIT_USAGE};
use crate::jobs::JobError;
use crate::partitions::InUse;
use crate::servers::Servers;
use tallyd_core::control::{Command, Task};
use tallyd_core::fence::Depth;
use tallyd_mysql::Store;

/// A command of the rule. docs/operations/commands.md has the same table.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The command's words without `tallyd`, and the options with which the rule applies.
    pub command: &'static str,
    pub takes: &'static str,
    /// The limit of what it takes, with the option that lifts the limit, and what must be stopped.
    pub checks: &'static str,
    pub back: &'static str,
}

impl Rule {
    pub const fn new(command: &'static str, takes: &'static str, checks: &'static str, back: &'static str) -> Self {
        Self { command, takes, checks, back }
    }
}

/// There is no way back.
pub const NONE: &str = "none";

pub const REPAIR_LIMITS: &str = "[safety limits](../reconciling.md#safety-limits), without `--force`";

pub const ALL_STOPPED: &str = "all daemons are stopped";

impl Rule {
    pub fn ends(&self, plan: &[String], yes: bool) -> Result<Option<u8>> {
        let mut out = std::io::stderr();
        writeln!(out, "{}\nway back: {}", plan.join("\n"), self.back).context("print")?;
        let (code, why) = if yes {
            return Ok(None);
        } else if !std::io::stdin().is_terminal() {
            (EXIT_USAGE, ": without a terminal, add --yes")
        } else if asked("continue? [y/N] ", false)? {
            return Ok(None);
        } else {
            (EXIT_FAILED, "")
        };
        writeln!(out, "tallyd: nothing was changed{why}").context("print")?;
        Ok(Some(code))
    }

    pub fn ends_unlisted(&self, yes: bool) -> Result<Option<u8>> {
        self.ends(&[format!("tallyd {} removes {}: --dry-run lists them", self.command, self.takes)], yes)
    }
}

#[derive(Debug, Args)]
pub struct Consent {
    /// Change nothing. Print the planned steps.
    #[arg(long)]
    pub dry_run: bool,
    /// Don't ask for confirmation. Needed without a terminal.
    #[arg(long)]
    pub yes: bool,
}

impl Consent {
    /// Does the same as [`Rule::ends`], or prints the plan if this is a dry run.
    pub fn ends(&self, rule: Rule, plan: &[String]) -> Result<Option<u8>> {
        if self.dry_run {
            writeln!(std::io::stdout(), "{}", plan.join("\n")).context("print")?;
            return Ok(Some(EXIT_DONE));
        }
        rule.ends(plan, self.yes)
    }
}

/// Asks on the terminal. `usual` is the result for an empty line. The end of input counts as "no".
pub fn asked(question: &str, usual: bool) -> Result<bool> {
    let mut out = std::io::stderr();
    write!(out, "{question}").and_then(|()| out.flush()).context("ask")?;
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer).context("read the answer")?;
    Ok(match answer.trim().to_lowercase().as_str() {
        "" => usual && read > 0,
        answer => matches!(answer, "y" | "yes"),
    })
}

/// Checks that consumers are not paused. While consumers are paused, the queues do not show whether daemons are
/// running.
///
/// # Errors
/// [`JobError::NotNow`] if the consumers are paused. Also fails if MySQL fails.
pub async fn not_paused(store: &Store) -> Result<()> {
    let mut orders = store.orders().await?.into_iter().map(|(order, _)| order);
    match orders.find(|order| order.task == Task::Consumer && order.command == Command::Pause) {
        Some(order) => Err(JobError::NotNow(format!("{order}: run `{}`, then try again", order.undo())).into()),
        None => Ok(()),
    }
}

/// Checks that no daemon and no job is running.
///
/// # Errors
/// [`JobError::NotNow`] if a daemon or a job is running. Also fails if a server fails.
pub async fn all_stopped(servers: &Servers) -> Result<()> {
    let Servers { store, broker, .. } = servers;
    not_paused(store).await?;
    let InUse { partitions, .. } = InUse::read(store, broker).await?;
    let link = broker.connect("operator").await?;
    let depths = broker.depths(&link, &partitions).await?;
    // If the depth is unknown, a daemon perhaps consumes the queue. The check of MySQL's sessions below finds it.
    let is_consumed = |depth: &Depth| depth.consumers().is_some_and(|consumers| consumers > 0);
    let mut consumed = depths.into_iter().filter(|(_, depth)| depth.as_ref().is_some_and(is_consumed));
    if let Some((queue, _)) = consumed.next() {
        return Err(JobError::NotNow(format!("a daemon consumes {queue}: stop all daemons, then try again")).into());
    }
    if let Some(running) = store.running_jobs().await?.first() {
        let text =
            format!("{} runs {} {}: wait until it ends, then try again", running.owner, running.job, running.mode);
        return Err(JobError::NotNow(text).into());
    }
    // A daemon that waits for a server consumes no queue, but can be found here, because it still reads orders from
    // MySQL.
    if !store.is_used_alone().await? {
        let text = "a daemon or a command uses MySQL with this account: stop all daemons, then try again";
        return Err(JobError::NotNow(text.to_owned()).into());
    }
    Ok(())
}
