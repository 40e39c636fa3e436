//! Before a command makes changes that no reconcile can undo, checks the state and asks the user.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Context, Result};
use clap::Args;

use super::{EXIT_DONE, EXIT_FAILED};
use crate::jobs::JobError;
use crate::partitions::InUse;
use crate::servers::Servers;
use tallyd_core::control::{Command, Task};
use tallyd_mysql::Store;
use tallyd_rabbitmq::Depth;

#[derive(Debug, Args)]
pub(super) struct Consent {
    /// Change nothing. Print the planned steps.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Don't ask for confirmation on a terminal.
    #[arg(long)]
    yes: bool,
}

impl Consent {
    /// Prints the plan, and asks on a terminal. Returns an exit code if the command must end here.
    pub(super) fn ends(&self, plan: &[String]) -> Result<Option<u8>> {
        if self.dry_run {
            writeln!(std::io::stdout(), "{}", plan.join("\n")).context("print")?;
            return Ok(Some(EXIT_DONE));
        }
        writeln!(std::io::stderr(), "{}", plan.join("\n")).context("print")?;
        if confirmed("continue? [y/N] ", self.yes)? {
            return Ok(None);
        }
        writeln!(std::io::stderr(), "tallyd: nothing was changed").context("print")?;
        Ok(Some(EXIT_FAILED))
    }
}

/// Asks on a terminal, unless `yes` was given.
pub(super) fn confirmed(question: &str, yes: bool) -> Result<bool> {
    if yes || !std::io::stdin().is_terminal() { Ok(true) } else { asked(question, false) }
}

/// Asks on the terminal. `usual` is the result for an empty line. The end of input counts as "no".
pub(super) fn asked(question: &str, usual: bool) -> Result<bool> {
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
pub(super) async fn not_paused(store: &Store) -> Result<()> {
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
pub(super) async fn all_stopped(servers: &Servers) -> Result<()> {
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
