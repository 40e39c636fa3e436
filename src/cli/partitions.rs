//! `tallyd partitions`: lowers the number of partitions. To raise the number, start a daemon with a higher `[amqp]
//! partitions`.

use std::io::Write;

use anyhow::{Context, Result};
use clap::Subcommand;

use super::consent::{Consent, all_stopped};
use super::{EXIT_DONE, Usage};
use crate::config::{Config, ConfigError};
use crate::jobs::JobError;
use crate::servers::Servers;

#[derive(Debug, Subcommand)]
pub(super) enum PartitionsCommand {
    /// Lower the number of partitions to [amqp] partitions. First pause the producers and stop all daemons.
    Lower {
        /// Keep this number of partitions.
        #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
        to: u16,
        #[command(flatten)]
        consent: Consent,
    },
}

pub(super) async fn run(config: &Config, command: &PartitionsCommand) -> Result<u8> {
    let PartitionsCommand::Lower { to, consent } = command;
    let configured = config.amqp.partitions;
    if configured != *to {
        let text = format!("[amqp] partitions is {configured}: first set it to {to} on every host");
        return Err(ConfigError(vec![text]).into());
    }
    let servers = Servers::checked(config).await?;
    let noted = servers.store.noted_partitions().await?.map_or(*to, |noted| noted.partitions);
    if noted < *to {
        let text = format!(
            "{noted} partitions are in use: this command only lowers the number. To raise it, start a daemon with [amqp] partitions = {to}"
        );
        return Err(Usage(text).into());
    }
    if noted == *to {
        writeln!(std::io::stdout(), "{to} partitions are in use").context("print")?;
        return Ok(EXIT_DONE);
    }
    lower(config, &servers, (noted, *to), consent).await
}

async fn lower(config: &Config, servers: &Servers, (from, to): (u16, u16), consent: &Consent) -> Result<u8> {
    let Servers { store, broker, .. } = servers;
    all_stopped(servers).await?;
    let link = broker.connect("operator").await?;
    let depths = broker.depths(&link, &broker.numbered(from)).await?;
    let spare = depths.into_iter().skip(usize::from(to));
    let there: Vec<(String, u32)> = spare.filter_map(|(queue, depth)| Some((queue, depth?.messages))).collect();
    are_empty(&there.iter().filter(|(_, messages)| *messages > 0).map(|(queue, _)| queue.clone()).collect::<Vec<_>>())?;
    let declares = config.amqp.declare;
    if let Some((queue, _)) = there.first().filter(|_| !declares) {
        let text =
            format!("[amqp] declare is false, and the queue {queue} exists: delete it and its binding, then try again");
        return Err(JobError::NotNow(text).into());
    }
    let mut plan: Vec<String> =
        there.iter().map(|(queue, _)| format!("delete the queue {queue}, which is empty")).collect();
    if to == 1 && declares {
        plan.push(format!("bind the queue {} only to the exchange {}", broker.queue(0), broker.exchange()));
    }
    plan.push(format!("note in MySQL that {to} partitions are in use, not {from}"));
    if let Some(code) = consent.ends(&plan)? {
        return Ok(code);
    }
    // The user may have answered hours after the question, so the state is checked again.
    all_stopped(servers).await?;
    if declares {
        are_empty(&broker.lower_partitions(&link, from, to).await?)?;
    }
    // If a daemon has started meanwhile, it has declared the deleted queues again.
    all_stopped(servers).await?;
    if !store.lower_partitions(from, to).await? {
        return Err(JobError::NotNow("the number of partitions was changed meanwhile: try again".to_owned()).into());
    }
    writeln!(std::io::stdout(), "{to} partitions are in use: start the daemons, then the producers")
        .context("print")?;
    Ok(EXIT_DONE)
}

fn are_empty(queues: &[String]) -> Result<(), JobError> {
    if queues.is_empty() {
        return Ok(());
    }
    let advice = "pause the producers, run daemons with the old number until the queues are empty, stop the daemons, then try again";
    Err(JobError::NotNow(format!(
        "these queues are not empty, or a daemon consumes them: {}: {advice}",
        queues.join(", ")
    )))
}
