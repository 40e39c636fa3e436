//! The nodes of a cluster. New connections use the nodes in turn, and one reachable node is enough. For some time after
//! a failure, a node is tried after all other nodes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapin::uri::AMQPUri;
use tallyd_core::chain::Chain;
use tracing::{info, warn};

use super::{BrokerError, Result};
use crate::config::Amqp;

/// For this duration after a failure, a node is tried after all other nodes. If the node's machine is down, each
/// attempt takes the whole time limit.
const LAST_FOR: Duration = Duration::from_secs(30);

const PORTS: [u16; 2] = [5_672, 5_671];

pub(super) struct Nodes {
    nodes: Vec<Node>,
    next: AtomicUsize,
}

pub(super) struct Node {
    pub name: String,
    pub uri: AMQPUri,
    state: Mutex<NodeState>,
}

#[derive(Default)]
struct NodeState {
    failed: Option<Instant>,
    is_reported: bool,
}

impl Nodes {
    pub(crate) fn new(config: &Amqp) -> Result<Self> {
        let wrong = |error| BrokerError::Config(format!("[amqp] seeds: {error}"));
        let mut urls = vec![config.url.clone()];
        for seed in &config.seeds {
            urls.push(config.url.at(seed).map_err(wrong)?);
        }
        let mut nodes: Vec<Node> = Vec::new();
        for url in urls {
            // The library's error is dropped, because it would quote the address with the password.
            let unread = |_| BrokerError::Config("[amqp] url cannot be parsed".to_owned());
            let mut uri: AMQPUri = url.expose().parse().map_err(unread)?;
            uri.query.heartbeat = Some(config.heartbeat_s);
            let parts = url.parts().map_err(wrong)?;
            let port = PORTS[usize::from(parts.scheme() == "amqps")];
            let name = format!("{}:{}", parts.host_str().unwrap_or_default(), parts.port().unwrap_or(port));
            if nodes.iter().all(|known| known.name != name) {
                nodes.push(Node { name, uri, state: Mutex::default() });
            }
        }
        Ok(Self { nodes, next: AtomicUsize::new(0) })
    }

    pub(crate) fn all(&self) -> &[Node] {
        &self.nodes
    }

    pub(crate) fn in_turn(&self) -> Vec<&Node> {
        let from = self.next.fetch_add(1, Ordering::Relaxed) % self.nodes.len();
        let (before, after) = self.nodes.split_at(from);
        let mut turn: Vec<&Node> = after.iter().chain(before).collect();
        turn.sort_by_key(|node| node.has_failed_lately());
        turn
    }

    pub(crate) fn note(&self, failed: Vec<(&Node, BrokerError)>, reached: Option<&Node>) -> Option<BrokerError> {
        for (node, error) in &failed {
            node.note_failed(error, reached);
        }
        if let Some(reached) = reached {
            reached.note_reached();
        }
        let mut texts: Vec<String> =
            failed.iter().map(|(node, error)| format!("{}: {}", node.name, Chain(error))).collect();
        let (node, error) = failed.into_iter().next_back()?;
        texts.pop();
        texts.push(node.name.clone());
        Some(if self.nodes.len() == 1 { error } else { error.about(texts.join("; ")) })
    }
}

impl Node {
    pub(super) fn avoid(&self) {
        self.with(|state| state.failed = Some(Instant::now()));
    }

    fn has_failed_lately(&self) -> bool {
        self.with(|state| state.failed.is_some_and(|failed| failed.elapsed() < LAST_FOR))
    }

    fn note_failed(&self, error: &BrokerError, reached: Option<&Self>) {
        let reports = self.with(|state| {
            state.failed = Some(Instant::now());
            let reports = reached.is_some() && !state.is_reported;
            state.is_reported |= reports;
            reports
        });
        if let (true, Some(reached)) = (reports, reached) {
            let (node, instead, error) = (&self.name, &reached.name, Chain(error).to_string());
            warn!(
                event = "rabbitmq-node-away",
                node, instead, error, "RabbitMQ's node {node} is unreachable, connected to {instead} instead: {error}"
            );
        }
    }

    fn note_reached(&self) {
        let NodeState { is_reported, .. } = self.with(std::mem::take);
        if is_reported {
            info!(event = "rabbitmq-node-back", node = self.name, "RabbitMQ's node {} answers again", self.name);
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut NodeState) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_connect::address::ServerUrl;

    fn names(turn: &[&Node]) -> Vec<String> {
        turn.iter().map(|node| node.name.clone()).collect()
    }

    #[test]
    fn connections_go_round_and_a_node_that_failed_is_tried_last_until_it_answers() {
        let url = ServerUrl::from("amqp://u:p@a/%2f");
        let seeds = ["b:5673", "a:5672", "c:5672"].map(str::to_owned).to_vec();
        let nodes = Nodes::new(&Amqp { url, seeds, ..Amqp::default() }).unwrap();
        assert_eq!(names(&nodes.in_turn()), ["a:5672", "b:5673", "c:5672"]);
        let turn = nodes.in_turn();
        let gone = || BrokerError::Config("gone".to_owned());
        assert_eq!(names(&turn), ["b:5673", "c:5672", "a:5672"]);
        assert!(nodes.note(vec![(turn[0], gone())], Some(turn[1])).is_some());
        assert_eq!(names(&nodes.in_turn()), ["c:5672", "a:5672", "b:5673"]);
        assert_eq!(names(&nodes.in_turn()), ["a:5672", "c:5672", "b:5673"]);
        assert!(nodes.note(Vec::new(), Some(turn[0])).is_none());
        assert_eq!(names(&nodes.in_turn()), ["b:5673", "c:5672", "a:5672"]);
        let failed = turn.iter().map(|node| (*node, gone())).collect();
        let error = nodes.note(failed, None).unwrap();
        assert_eq!(Chain(&error).to_string(), "b:5673: gone; c:5672: gone; a:5672: gone");
        assert_eq!(nodes.all()[1].uri.authority.port, 5_673);
    }
}
