//! `tallyd admin map`: tests a map on sample events, and removes a map.

use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde::de::IgnoredAny;

use super::rules::MAP_REMOVE;
use super::{EXIT_DONE, EXIT_DRIFT, Format, Usage, print};
use crate::letter::text::{instant, printable};
use tallyd_base::cli::consent::Consent;
use tallyd_base::config::{Config, ConfigError, Map};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::fence::Fences;
use tallyd_base::runtime::clock;
use tallyd_base::servers::Servers;
use tallyd_core::event::{Message, Refusal, Terms};
use tallyd_core::fence::Depth;
use tallyd_core::mapping::{self, Envelope};
use tallyd_core::model::{Micros, Target};
use tallyd_core::partition::Partitions;
use tallyd_mysql::maps::NotedMap;
use tallyd_rabbitmq::Link;

/// The name under which `map remove` sends fences. No job has this name, so no run passes them.
const JOB: &str = "map";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct MapArgs {
    /// Map the events in this file, one JSON event per line or one JSON value, and print the results. Exit with 2 if
    /// some events do not fit the map.
    #[arg(long, value_name = "FILE")]
    sample: Option<PathBuf>,
    /// Give the message of each event these headers, a JSON object. Properties have the names property:type,
    /// property:timestamp and property:routing_key.
    #[arg(long, value_name = "JSON", requires = "sample")]
    headers: Option<String>,
    /// Use the map of this name [default: the only one].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(subcommand)]
    command: Option<MapCommand>,
}

#[derive(Debug, Subcommand)]
enum MapCommand {
    /// Consume the queue of a map again that stopped because nearly all its first events were refused.
    Resume {
        /// Resume the map of this name.
        name: String,
    },
    /// Remove a map that no configuration contains: unbind and delete its queue, and forget the map.
    Remove {
        /// Remove the map of this name.
        name: String,
        /// Also delete messages that wait in the map's queue.
        #[arg(long)]
        with_messages: bool,
        #[command(flatten)]
        consent: Consent,
    },
}

pub(super) async fn run(config: &Config, args: &MapArgs) -> Result<u8> {
    match (&args.command, &args.sample) {
        (Some(MapCommand::Remove { name, with_messages, consent }), _) => {
            remove(config, name, *with_messages, consent).await
        }
        (Some(MapCommand::Resume { name }), _) => resume(config, name).await,
        (None, Some(path)) => {
            let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
            let map = chosen(config, args.name.as_deref())?;
            // The events of a sample can be old, although the daemon would refuse such events.
            let terms = Terms { applied_event_keep: Duration::MAX, ..Terms::from(config) };
            let report = Report::of((map, &envelope(args.headers.as_deref())?), &text, &terms, clock::now());
            print(&report, args.format)?;
            Ok(if report.refused > 0 { EXIT_DRIFT } else { EXIT_DONE })
        }
        (None, None) => Err(Usage(
            "use `--sample FILE` to test a map, `resume NAME` to resume one, or `remove NAME` to remove one".to_owned(),
        )
        .into()),
    }
}

fn chosen<'a>(config: &'a Config, name: Option<&str>) -> Result<&'a Map, Usage> {
    let known: Vec<&str> = config.maps.iter().map(|map| map.name.as_str()).collect();
    let found = match (name, config.maps.as_slice()) {
        (_, []) => return Err(Usage("the configuration has no [[map]]".to_owned())),
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), maps) => maps.iter().find(|map| map.name == name),
    };
    found.ok_or_else(|| Usage(format!("name one of the maps with --name: {}", known.join(", "))))
}

fn envelope(headers: Option<&str>) -> Result<Envelope, Usage> {
    let read =
        |json| serde_json::from_str(json).map_err(|error| Usage(format!("--headers is not a JSON object: {error}")));
    headers.map_or_else(|| Ok(Envelope::default()), |json| read(json).map(Envelope))
}

#[derive(Serialize)]
struct Report {
    map: String,
    taken: usize,
    refused: usize,
    events: Vec<Sample>,
}

#[derive(Serialize)]
struct Sample {
    line: usize,
    event: Option<String>,
    reason: Option<&'static str>,
    error: Option<String>,
}

impl Report {
    fn of((map, envelope): (&Map, &Envelope), text: &[u8], terms: &Terms, now: Micros) -> Self {
        let mut report = Self { map: map.name.clone(), taken: 0, refused: 0, events: Vec::new() };
        let is_one = serde_json::from_slice::<IgnoredAny>(text).is_ok();
        let bodies: Vec<&[u8]> = if is_one { vec![text] } else { text.split(|byte| *byte == b'\n').collect() };
        for (line, body) in (1..).zip(bodies).filter(|(_, body)| !body.trim_ascii().is_empty()) {
            mapping::decode_all(body, (map, envelope), terms, now, |verdict, _| report.add(line, verdict, terms));
        }
        report
    }

    fn add(&mut self, line: usize, verdict: Result<Message, Refusal>, terms: &Terms) {
        let (event, refusal) = match verdict {
            Ok(message) => (Some(words(&message, terms)), None),
            Err(refusal) => (None, Some(refusal)),
        };
        self.taken += usize::from(event.is_some());
        self.refused += usize::from(event.is_none());
        let reason = refusal.as_ref().map(|refusal| refusal.reason.code());
        self.events.push(Sample { line, event, reason, error: refusal.map(|refusal| refusal.error) });
    }
}

fn words(message: &Message, terms: &Terms) -> String {
    let target = |target: &Target| {
        let kind = terms.kinds.iter().find(|(_, code)| **code == target.kind.0).map_or("?", |(name, _)| name);
        format!("{kind}:{}", target.id)
    };
    let metric = |code: u8| terms.metrics.iter().find(|(_, it)| **it == code).map_or("?", |(name, _)| name);
    match message {
        Message::Like(event) => {
            let what = if event.liked { "like" } else { "unlike" };
            format!("{what} {} by user {} at {}", target(&event.target), event.user, instant(event.at))
        }
        Message::Count(event) => {
            let metric = metric(event.metric.0);
            format!("count {metric} of {} by {:+} at {}", target(&event.target), event.delta, instant(event.at))
        }
        Message::Set(event) => {
            let metric = metric(event.metric.0);
            format!("set {metric} of {} to {} at {}", target(&event.target), event.value, instant(event.at))
        }
        Message::Fence(_) => "a fence".to_owned(),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Sample { line, event, reason, error } in &self.events {
            match event {
                Some(event) => writeln!(f, "line {line}: {event}")?,
                None => {
                    let (reason, error) = (reason.unwrap_or_default(), error.as_deref().unwrap_or_default());
                    writeln!(f, "line {line}: rejected, {reason}: {}", printable(error))?;
                }
            }
        }
        write!(f, "{} of {} events fit the map {}", self.taken, self.events.len(), self.map)
    }
}

async fn resume(config: &Config, name: &str) -> Result<u8> {
    let store = Servers::checked(config).await?.store;
    let state = match store.resume_map(name).await? {
        None => return Err(unknown(name, &store.noted_maps().await?).into()),
        Some(true) => "is resumed: the daemons consume its queue again within a minute",
        Some(false) => "is not stopped",
    };
    writeln!(std::io::stdout(), "the map {name} {state}").context("print")?;
    Ok(EXIT_DONE)
}

fn unknown(name: &str, maps: &[NotedMap]) -> Usage {
    let known: Vec<&str> = maps.iter().map(|map| map.name.as_str()).collect();
    let known = if known.is_empty() { "no maps are in use".to_owned() } else { known.join(", ") };
    Usage(format!("no map named {name} is in use: {known}"))
}

async fn remove(config: &Config, name: &str, with_messages: bool, consent: &Consent) -> Result<u8> {
    if config.maps.iter().any(|map| map.name == name) {
        let text =
            format!("[[map]] {name} is in the configuration: first remove it on every host and restart the daemons");
        return Err(ConfigError(vec![text]).into());
    }
    let servers = Servers::checked(config).await?;
    let Servers { store, broker, .. } = &servers;
    let maps = store.noted_maps().await?;
    let Some(map) = maps.iter().find(|map| map.name == name) else {
        return Err(unknown(name, &maps).into());
    };
    let link = broker.connect("operator").await?;
    let there = unused(&servers, &link, map, with_messages).await?;
    if there.is_some() && !config.amqp.declare {
        let text = format!("[amqp] declare is false, and the queue {} exists: delete it, then try again", map.queue);
        return Err(JobError::NotNow(text).into());
    }
    let mut plan = Vec::new();
    if let Some(messages) = &there {
        plan.extend(map.bindings.iter().map(|(exchange, key)| format!("unbind {} from {exchange} ({key})", map.queue)));
        plan.push(format!("delete the queue {}, which has {messages} messages", map.queue));
    }
    plan.push(format!("note in MySQL that the map {name} is no longer in use"));
    if let Some(code) = consent.ends(MAP_REMOVE, &plan)? {
        return Ok(code);
    }
    if there.is_some() {
        for (exchange, key) in &map.bindings {
            broker.unbind_map(&link, &map.queue, exchange, key).await?;
        }
        let publisher = broker.connect_publisher("operator").await?;
        let fences = Fences { job: JOB, store, broker, publisher, fence_max: config.reconcile.fence_max.0 };
        // The messages are counted again, because more can have arrived before the queue was unbound.
        is_empty(map, fences.events_in((map.partition(), &map.queue)).await?, with_messages)?;
        store.forget_fences(map.partition(), None).await?;
        broker.delete_queue(&link, &map.queue).await?;
    }
    store.forget_map(name).await?;
    writeln!(std::io::stdout(), "the map {name} is removed").context("print")?;
    Ok(EXIT_DONE)
}

async fn unused(servers: &Servers, link: &Link, map: &NotedMap, with_messages: bool) -> Result<Option<String>> {
    let Servers { store, broker, .. } = servers;
    let (partition, queue) = (map.partition(), &map.queue);
    let fences = store.fences(JOB).await?.left(partition).count();
    let only: Partitions = [(partition, queue.clone())].into_iter().collect();
    let Some(depth) = broker.depths(link, &only).await?.pop().and_then(|(_, depth)| depth) else { return Ok(None) };
    let Depth::Known { messages, consumers } = depth else { return Ok(Some("no known".to_owned())) };
    if consumers > 0 {
        let text = format!("a daemon consumes {queue}: restart the daemons without the map, then try again");
        return Err(JobError::NotNow(text).into());
    }
    let events = (messages as usize).saturating_sub(fences);
    is_empty(map, events, with_messages)?;
    Ok(Some(events.to_string()))
}

fn is_empty(map: &NotedMap, events: usize, with_messages: bool) -> Result<(), JobError> {
    if events == 0 || with_messages {
        return Ok(());
    }
    Err(JobError::NotNow(format!(
        "{} has {events} messages: pause the producers and run a daemon with the map until the queue is empty, or add --with-messages, which \
         deletes them",
        map.queue
    )))
}
