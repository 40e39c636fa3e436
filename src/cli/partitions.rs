//! `tallyd admin partitions`: lowers the number of partitions. To raise the number, start a daemon with a higher `[amqp]
//! partitions`.

use std::io::Write;

use anyhow::{Context, Result};
use clap::Subcommand;

use super::rules::PARTITIONS_LOWER;
use super::{EXIT_DONE, Usage};
use tallyd_base::cli::consent::{Consent, all_stopped};
use tallyd_base::config::{Config, ConfigError};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::fence::Fences;
use tallyd_base::servers::Servers;
use tallyd_core::fence::Depth;
use tallyd_rabbitmq::Link;

/// The name under which this command sends fences. No job has this name, so no run passes them.
const JOB: &str = "partitions";

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
    let there = spare(servers, &link, (from, to)).await?;
    let declares = config.amqp.declare;
    if let Some((_, queue)) = there.first().filter(|_| !declares) {
        let text =
            format!("[amqp] declare is false, and the queue {queue} exists: delete it and its binding, then try again");
        return Err(JobError::NotNow(text).into());
    }
    let mut plan: Vec<String> =
        there.iter().map(|(_, queue)| format!("delete the queue {queue}, if it is empty")).collect();
    if to == 1 && declares {
        plan.push(format!("bind the queue {} only to the exchange {}", broker.queue(0), broker.exchange()));
    }
    plan.push(format!("note in MySQL that {to} partitions are in use, not {from}"));
    if let Some(code) = consent.ends(PARTITIONS_LOWER, &plan)? {
        return Ok(code);
    }
    // The user may have answered hours after the question, so the state is checked again.
    all_stopped(servers).await?;
    if declares {
        let there = spare(servers, &link, (from, to)).await?;
        let queues: Vec<String> = there.iter().map(|(_, queue)| queue.clone()).collect();
        broker.unbind_spare(&link, to, &queues).await?;
        delete_empty(config, servers, &there).await?;
        if to == 1 {
            broker.delete_spread(&link).await?;
        }
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

/// Returns those queues of the partitions `to..from` that exist.
///
/// # Errors
/// Fails with [`JobError::NotNow`] if one of these queues has events.
async fn spare(servers: &Servers, link: &Link, (from, to): (u16, u16)) -> Result<Vec<(u16, String)>> {
    let Servers { store, broker, .. } = servers;
    let fences = store.fences(JOB).await?;
    let depths = broker.depths(link, &broker.numbered(from)).await?;
    let spare = (0..).zip(depths).skip(usize::from(to));
    let there: Vec<(u16, String, Depth)> =
        spare.filter_map(|(partition, (queue, depth))| Some((partition, queue, depth?))).collect();
    let has_events = |(partition, _, depth): &&(u16, String, Depth)| {
        depth.messages().is_some_and(|messages| messages as usize > fences.left(*partition).count())
    };
    are_empty(&there.iter().filter(has_events).map(|(_, queue, _)| queue.clone()).collect::<Vec<_>>())?;
    Ok(there.into_iter().map(|(partition, queue, _)| (partition, queue)).collect())
}

/// Deletes the queues that have no events and no consumers. The queues are unbound already.
///
/// # Errors
/// Fails with [`JobError::NotNow`] if some queues stay.
async fn delete_empty(config: &Config, servers: &Servers, queues: &[(u16, String)]) -> Result<()> {
    let Servers { store, broker, .. } = servers;
    let publisher = broker.connect_publisher("operator").await?;
    let fences = Fences { job: JOB, store, broker, publisher, fence_max: config.reconcile.fence_max.0 };
    let link = broker.connect("operator").await?;
    let mut kept = Vec::new();
    for (partition, queue) in queues {
        if fences.events_in((*partition, queue)).await? > 0 {
            kept.push(queue.clone());
            continue;
        }
        store.forget_fences(*partition, None).await?;
        broker.delete_queue(&link, queue).await?;
    }
    Ok(are_empty(&kept)?)
}

fn are_empty(queues: &[String]) -> Result<(), JobError> {
    if queues.is_empty() {
        return Ok(());
    }
    let advice = "pause the producers, run daemons with the old number until the queues are empty, stop the daemons, then try again";
    Err(JobError::NotNow(format!("these queues are not empty: {}: {advice}", queues.join(", "))))
}
