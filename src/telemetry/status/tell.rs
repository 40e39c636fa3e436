//! What is told: the configuration, what the process knows of itself, and what was seen of the servers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::trouble::troubles;
use super::{Partition, Server, State, Status, Wait};
use crate::config::Config;
use crate::model::Micros;
use crate::telemetry::observer::Observed;
use crate::telemetry::{PartitionVitals, Process, Standing, Telemetry};

/// What fails while a batch can't be written ([`crate::consumer`]).
const WRITING: &str = "writing partition ";

/// How a partition stands that this daemon's configuration doesn't have.
pub(super) const ELSEWHERE: &str = "elsewhere";

/// Microseconds that a batch is tried again before events are said not to be written: rivals are over sooner.
const FAILS_MAX: i64 = 5_000_000;

impl Status {
    /// How this daemon stands.
    pub fn tell(config: &Config, owner: &str, vitals: &Telemetry, seen: &Observed, now: Micros) -> Self {
        let state = match () {
            () if vitals.draining.load(Ordering::Relaxed) => State::Draining,
            () if vitals.working.load(Ordering::Relaxed) => State::Running,
            () => State::Starting,
        };
        let waits: Vec<Wait> = vitals.waits.open().into_iter().map(wait).collect();
        let partitions = partitions(config, vitals, seen, now);
        let not_ready = not_ready(state, &partitions, &seen.servers, &waits, now);
        let mut told = Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            owner: owner.to_owned(),
            started_at: vitals.started_at.0,
            now: now.0,
            state,
            ready: not_ready.is_empty(),
            not_ready,
            troubles: Vec::new(),
            reload_refused: vitals.refused().map(|(at, wrong)| (at.0, wrong)),
            rate: vitals.pulse.last(),
            events_committed: vitals.committed.get(),
            memory_bytes: Process::now().resident_bytes,
            observed_at: seen.at.map(|at| at.0),
            servers: seen.servers.clone(),
            partitions,
            partitions_in_use: seen.noted_partitions,
            outbox_rows: seen.outbox_rows,
            mysql_went_back_at: vitals.mysql_went_back_at().map(|at| at.0),
            jobs: seen.jobs.clone(),
            reconciles: seen.reconciles.clone(),
            boards: seen.boards.clone(),
            dead_letters: seen.dead_letters.clone(),
            dead_letters_full: seen.dead_letters_full,
            returned: seen.returned,
            waits,
        };
        told.troubles = troubles(&told);
        told
    }
}

fn partitions(config: &Config, vitals: &Telemetry, seen: &Observed, now: Micros) -> Vec<Partition> {
    let here = vitals.partitions();
    // Before the tasks have started nobody knows which are listened to here.
    let known = if here.is_empty() { u16::MAX } else { config.amqp.partitions };
    let more = (known..seen.noted_partitions.unwrap_or_default()).map(|number| (number, None));
    let of = |(number, it): (u16, Option<Arc<PartitionVitals>>)| {
        let queue = seen.queues.get(&number);
        let row = seen.owners.iter().find(|row| row.partition == number && row.epoch > 0);
        Partition {
            partition: number,
            queue: format!("{}.events.{number}", config.amqp.prefix),
            standing: it.as_ref().map_or(ELSEWHERE, |it| it.standing().name()).to_owned(),
            owner: row.and_then(|row| row.owner.clone()),
            epoch: row.map(|row| row.epoch),
            taken_at: row.map(|row| row.taken_at.0),
            messages: queue.map(|(messages, _)| *messages),
            consumers: queue.map(|(_, consumers)| *consumers),
            oldest_unacked_s: it.map_or(0.0, |it| it.oldest_s(now)),
        }
    };
    here.into_iter().map(|(number, it)| (number, Some(it))).chain(more).map(of).collect()
}

/// Why events may not be written now. Redis is not among it: without it they are.
fn not_ready(state: State, partitions: &[Partition], servers: &[Server], waits: &[Wait], now: Micros) -> Vec<String> {
    let mut found = match state {
        State::Starting => vec!["it starts: MySQL is asked what its codes mean".to_owned()],
        State::Draining => vec!["it was told to stop, and writes what is open".to_owned()],
        State::Running => Vec::new(),
    };
    if servers.is_empty() {
        found.push("the servers were not looked at yet".to_owned());
    }
    for server in servers.iter().filter(|server| !server.up && server.server != "redis") {
        found.push(format!("{} is away: {}", server.server, server.reason.as_deref().unwrap_or("no reason is known")));
    }
    if state != State::Running {
        return found;
    }
    let fails = |wait: &&Wait| wait.what.starts_with(WRITING) && now.0 - wait.since > FAILS_MAX;
    found.extend(waits.iter().filter(fails).map(|wait| format!("{} fails: {}", wait.what, wait.reason)));
    // What is elsewhere is other daemons' work.
    let stands = [Standing::Listening.name(), Standing::Writing.name(), ELSEWHERE];
    for partition in partitions.iter().filter(|partition| !stands.contains(&partition.standing.as_str())) {
        let end = format!("partition {}", partition.partition);
        let wait = waits.iter().find(|wait| wait.what.ends_with(&end));
        let why = wait.map_or_else(String::new, |wait| format!(": {} failed: {}", wait.what, wait.reason));
        found.push(format!("partition {} is {}{why}", partition.partition, partition.standing));
    }
    found
}

fn wait(wait: crate::telemetry::Wait) -> Wait {
    let crate::telemetry::Wait { what, reason, since, tries } = wait;
    Wait { what, reason, since: since.0, tries }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_events_from_being_written_is_told_with_its_reason() {
        let partition =
            |partition, standing: &str| Partition { partition, standing: standing.to_owned(), ..Partition::default() };
        let server = |name: &str, reason: Option<&str>| Server {
            server: name.to_owned(),
            up: reason.is_none(),
            reason: reason.map(str::to_owned),
            ..Server::default()
        };
        let partitions = [partition(0, "writing"), partition(1, "connecting")];
        let wait = Wait { what: "consuming partition 1".to_owned(), reason: "refused".to_owned(), ..Wait::default() };
        let servers = [server("mysql", None), server("redis", Some("gone")), server("rabbitmq", Some("refused"))];
        let writing =
            Wait { what: "writing partition 0".to_owned(), reason: "read-only".to_owned(), ..Wait::default() };
        let waits = [wait, writing];
        let found = not_ready(State::Running, &partitions, &servers, &waits, Micros(FAILS_MAX + 1));
        let expected = [
            "rabbitmq is away: refused",
            "writing partition 0 fails: read-only",
            "partition 1 is connecting: consuming partition 1 failed: refused",
        ];
        assert_eq!(found, expected);
        assert_eq!(not_ready(State::Running, &partitions[..1], &servers[..2], &[], Micros(0)), Vec::<String>::new());
        assert_eq!(not_ready(State::Draining, &partitions, &servers[..2], &[], Micros(0)).len(), 1);
    }
}
