//! Builds a status from the configuration, the process's own telemetry, and the observed state of the servers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::troubles::troubles;
use super::{Observed, Partition, ServerStatus, Standing, State, Status, Wait};
use crate::config::Config;
use crate::runtime::waits::{Work, waits};
use crate::telemetry::{PartitionState, Process, Server, Telemetry};
use tallyd_core::model::Micros;
use tallyd_mysql::maps::NotedMap;

/// The longest retries of a batch, in microseconds, with which a partition does not count as failing.
const FAILS_MAX: i64 = 5_000_000;

impl Status {
    pub fn report(config: &Config, owner: &str, telemetry: &Telemetry, seen: &Observed, now: Micros) -> Self {
        let (mut waits, mut listed) = (waits().open(), BTreeSet::new());
        // Several loops can do the same work, for example ask MySQL for due jobs. The oldest failure is enough.
        waits.retain(|wait| listed.insert(wait.what.to_string()));
        let mut status = Self {
            version: crate::version::VERSION.to_owned(),
            owner: owner.to_owned(),
            started_at: telemetry.started_at.0,
            now: now.0,
            state: telemetry.state(),
            ready: false,
            not_ready: Vec::new(),
            troubles: Vec::new(),
            reload_refused: telemetry.refused().map(|(at, wrong)| (at.0, wrong)),
            site_differs: telemetry.site_difference().map(|(since, how)| (since.0, how)),
            rate: telemetry.pulse.last(),
            events_committed: telemetry.consumer.committed.get(),
            memory_bytes: Process::now().resident_bytes,
            observed_at: seen.at.map(|at| at.0),
            servers: seen.servers.clone(),
            partitions: partitions(config, telemetry, seen, &waits, now),
            partitions_in_use: seen.noted_partitions,
            outbox_rows: seen.outbox_rows,
            mysql_went_back_at: telemetry.mysql_went_back_at().map(|at| at.0),
            jobs: seen.jobs.clone(),
            reconciles: seen.reconciles.clone(),
            boards: seen.boards.clone(),
            dead_letters: seen.dead_letters.clone(),
            dead_letters_full: seen.dead_letters_full,
            returned: seen.returned,
            waits,
            orders: telemetry.orders(),
        };
        let reasons = not_ready(&status);
        let (not_ready, troubles) = (reasons.iter().map(ToString::to_string).collect(), troubles(&status, &reasons));
        status.ready = reasons.is_empty();
        status.not_ready = not_ready;
        status.troubles = troubles;
        status
    }
}

fn partitions(config: &Config, telemetry: &Telemetry, seen: &Observed, waits: &[Wait], now: Micros) -> Vec<Partition> {
    let here = telemetry.consumer.partitions();
    // The partitions of this process are unknown until the tasks have started.
    let known = if here.is_empty() { u16::MAX } else { config.amqp.partitions };
    let is_here = |number: u16| here.iter().any(|(it, _)| *it == number);
    let elsewhere = seen.maps.iter().map(NotedMap::partition).filter(|number| known < u16::MAX && !is_here(*number));
    let more = (known..seen.noted_partitions.unwrap_or_default()).chain(elsewhere.collect::<Vec<_>>());
    let more = more.map(|number| (number, None));
    let names: BTreeMap<u16, &String> = (seen.maps.iter().map(|map| (map.partition(), &map.name)))
        .chain(config.maps.iter().map(|map| (map.partition(), &map.name)))
        .collect();
    let of = |(number, it): (u16, Option<Arc<PartitionState>>)| {
        let queue = seen.queues.get(&number);
        let row = seen.owners.iter().find(|row| row.partition == number && row.epoch > 0);
        Partition {
            partition: number,
            map: names.get(&number).map(|name| (*name).clone()),
            queue: match names.get(&number) {
                Some(name) => format!("{}.map.{name}", config.amqp.prefix),
                None => format!("{}.events.{number}", config.amqp.prefix),
            },
            standing: it.as_ref().map_or(Standing::Elsewhere, |it| standing(it, number, waits, now)),
            owner: row.and_then(|row| row.owner.clone()),
            epoch: row.map(|row| row.epoch),
            taken_at: row.map(|row| row.taken_at.0),
            messages: queue.map(|(messages, _)| *messages),
            held: it.as_ref().map_or(0, |it| it.held()),
            consumers: queue.map(|(_, consumers)| *consumers),
            oldest_unacked_s: it.map_or(0.0, |it| it.oldest_s(now)),
        }
    };
    here.into_iter().map(|(number, it)| (number, Some(it))).chain(more).map(of).collect()
}

/// If the retries of a batch last too long, the partition fails. Retries after a conflict with another transaction take
/// less time.
fn standing(state: &PartitionState, number: u16, waits: &[Wait], now: Micros) -> Standing {
    let fails = |wait: &Wait| {
        matches!(&wait.what, Work::Writing(partition) if partition.number == number) && now.0 - wait.since > FAILS_MAX
    };
    match state.standing() {
        Standing::Listening | Standing::Writing if waits.iter().any(fails) => Standing::Failing,
        standing => standing,
    }
}

pub(super) enum NotReady<'a> {
    Starting,
    Draining,
    NotObserved,
    Away(&'a ServerStatus),
    Stands(&'a Partition, Option<&'a Wait>),
}

/// Returns the reasons why the daemon is not ready. If Redis is unreachable, the daemon is still ready, because the
/// daemon also writes events without Redis.
pub(super) fn not_ready(status: &Status) -> Vec<NotReady<'_>> {
    let mut found = match status.state {
        State::Starting => vec![NotReady::Starting],
        State::Draining => vec![NotReady::Draining],
        State::Running => Vec::new(),
    };
    if status.servers.is_empty() {
        found.push(NotReady::NotObserved);
    }
    found.extend(
        status.servers.iter().filter(|server| !server.up && server.server != Server::Redis).map(NotReady::Away),
    );
    if status.state != State::Running {
        return found;
    }
    for partition in status.partitions.iter().filter(|partition| !partition.standing.is_well()) {
        let wait = status.waits.iter().find(|wait| wait.what.partition() == Some(partition.partition));
        found.push(NotReady::Stands(partition, wait));
    }
    found
}

impl fmt::Display for NotReady<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("the daemon is starting: it reads the meaning of its codes from MySQL"),
            Self::Draining => f.write_str("the daemon is stopping: it writes the open batches"),
            Self::NotObserved => f.write_str("the servers have not been checked yet"),
            Self::Away(server) => write!(f, "{} is unreachable: {}", server.server.name(), server.why()),
            Self::Stands(partition, wait) => {
                write!(f, "{} is {}", partition.name(), partition.standing)?;
                match wait {
                    Some(wait) => write!(f, ": {} failed: {}", wait.what, wait.reason),
                    None => Ok(()),
                }
            }
        }
    }
}

impl ServerStatus {
    pub fn why(&self) -> &str {
        self.reason.as_deref().unwrap_or("the reason is unknown")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use tallyd_core::partition::PartitionName;

    #[test]
    fn what_keeps_events_from_being_written_is_told_with_its_reason() {
        let mut status: Status = serde_json::from_value(json!({
            "state": "running",
            "partitions": [{ "standing": "failing" }, { "partition": 1, "standing": "connecting" }],
            "servers": [
                { "server": "mysql", "up": true, "since": 0, "look_s": 0.0 },
                { "server": "redis", "up": false, "reason": "gone", "since": 0, "look_s": 0.0 },
                { "server": "rabbitmq", "up": false, "reason": "refused", "since": 0, "look_s": 0.0 },
            ],
        }))
        .unwrap();
        let name = |number| PartitionName { number, map: None };
        let wait = |what, reason: &str| Wait { what, reason: reason.to_owned(), ..Wait::default() };
        status.waits = vec![wait(Work::Consuming(name(1)), "refused"), wait(Work::Writing(name(0)), "read-only")];
        let words = |status: &Status| not_ready(status).iter().map(ToString::to_string).collect::<Vec<_>>();
        let expected = [
            "rabbitmq is unreachable: refused",
            "partition 0 is failing: writing partition 0 failed: read-only",
            "partition 1 is connecting: consuming partition 1 failed: refused",
        ];
        assert_eq!(words(&status), expected);
        status.servers.truncate(2);
        status.state = State::Draining;
        assert_eq!(words(&status).len(), 1);
        status.state = State::Running;
        status.partitions.clear();
        status.waits.clear();
        assert_eq!(words(&status), Vec::<String>::new());
    }

    #[test]
    fn a_partition_that_commits_nothing_for_seconds_does_not_write() {
        let (state, name) = (PartitionState::default(), |number| PartitionName { number, map: None });
        let at = |what, now| {
            let wait = Wait { what, since: 7, ..Wait::default() };
            standing(&state, 0, &[wait], Micros(7 + now))
        };
        state.stands(Standing::Writing);
        assert_eq!(at(Work::Writing(name(0)), FAILS_MAX), Standing::Writing);
        assert_eq!(at(Work::Writing(name(0)), FAILS_MAX + 1), Standing::Failing);
        assert_eq!(at(Work::Writing(name(1)), FAILS_MAX + 1), Standing::Writing);
        state.stands(Standing::Paused);
        assert_eq!(at(Work::Writing(name(0)), FAILS_MAX + 1), Standing::Paused);
    }
}
