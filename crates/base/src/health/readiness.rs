//! Decides whether the daemon is ready: whether it writes events.

use std::fmt;

use super::{Partition, Status};
use crate::runtime::waits::Wait;
use crate::telemetry::{DaemonState, Server, ServerStatus};

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
        DaemonState::Starting => vec![NotReady::Starting],
        DaemonState::Draining => vec![NotReady::Draining],
        DaemonState::Running => Vec::new(),
    };
    if status.seen.servers.is_empty() {
        found.push(NotReady::NotObserved);
    }
    found.extend(
        status.seen.servers.iter().filter(|server| !server.up && server.server != Server::Redis).map(NotReady::Away),
    );
    if status.state != DaemonState::Running {
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
    use crate::runtime::waits::Work;
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
        status.seen.servers.truncate(2);
        status.state = DaemonState::Draining;
        assert_eq!(words(&status).len(), 1);
        status.state = DaemonState::Running;
        status.partitions.clear();
        status.waits.clear();
        assert_eq!(words(&status), Vec::<String>::new());
    }
}
