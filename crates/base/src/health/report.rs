//! Builds a status from the configuration, the process's own telemetry, and the observed state of the servers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::readiness::not_ready;
use super::troubles::troubles;
use super::{Partition, Status};
use crate::config::Config;
use crate::runtime::waits::{Wait, Work, waits};
use crate::telemetry::{ConsumerState, Observed, PartitionState, Process, Telemetry};
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
            seen: seen.clone(),
            partitions: partitions(config, telemetry, seen, &waits, now),
            mysql_went_back_at: telemetry.mysql_went_back_at().map(|at| at.0),
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
    let more = (known..seen.partitions_in_use.unwrap_or_default()).chain(elsewhere.collect::<Vec<_>>());
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
            standing: it.as_ref().map_or(ConsumerState::Elsewhere, |it| consumer_state(it, number, waits, now)),
            owner: row.and_then(|row| row.owner.clone()),
            epoch: row.map(|row| row.epoch),
            taken_at: row.map(|row| row.taken_at.0),
            messages: queue.map(|(messages, _)| *messages),
            held: it.as_ref().map_or(0, |it| it.unacked_messages()),
            consumers: queue.map(|(_, consumers)| *consumers),
            oldest_unacked_s: it.map_or(0.0, |it| it.oldest_s(now)),
        }
    };
    here.into_iter().map(|(number, it)| (number, Some(it))).chain(more).map(of).collect()
}

/// If the retries of a batch last too long, the partition fails. Retries after a conflict with another transaction take
/// less time.
fn consumer_state(state: &PartitionState, number: u16, waits: &[Wait], now: Micros) -> ConsumerState {
    let fails = |wait: &Wait| {
        matches!(&wait.what, Work::Writing(partition) if partition.number == number) && now.0 - wait.since > FAILS_MAX
    };
    match state.state() {
        ConsumerState::Listening | ConsumerState::Writing if waits.iter().any(fails) => ConsumerState::Failing,
        standing => standing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_core::partition::PartitionName;

    #[test]
    fn a_partition_that_commits_nothing_for_seconds_does_not_write() {
        let (state, name) = (PartitionState::default(), |number| PartitionName { number, map: None });
        let at = |what, now| {
            let wait = Wait { what, since: 7, ..Wait::default() };
            consumer_state(&state, 0, &[wait], Micros(7 + now))
        };
        state.set_state(ConsumerState::Writing);
        assert_eq!(at(Work::Writing(name(0)), FAILS_MAX), ConsumerState::Writing);
        assert_eq!(at(Work::Writing(name(0)), FAILS_MAX + 1), ConsumerState::Failing);
        assert_eq!(at(Work::Writing(name(1)), FAILS_MAX + 1), ConsumerState::Writing);
        state.set_state(ConsumerState::Paused);
        assert_eq!(at(Work::Writing(name(0)), FAILS_MAX + 1), ConsumerState::Paused);
    }
}
