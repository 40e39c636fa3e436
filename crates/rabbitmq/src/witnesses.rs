//! Counts a queue's messages at the nodes that a session does not use. An isolated node can answer with numbers from before
//! its isolation, so only what all other nodes say proves that the session's own node is isolated.

use std::collections::BTreeMap;

use tokio::sync::Mutex;

use super::nodes::Node;
use super::{Broker, Link};

/// One link to each node that was asked. All sessions share these links.
pub(super) type Witnesses = Mutex<BTreeMap<String, Link>>;

impl Broker {
    /// Asks all nodes but `but`. Returns the smallest of their counts, or `None` if none of them knows.
    pub async fn count_elsewhere(&self, but: &str, queue: &str) -> Option<u32> {
        let mut links = self.witnesses.lock().await;
        let mut least = None;
        for node in self.nodes.all().iter().filter(|node| node.name != but) {
            let counted = self.count_at(&mut links, node, queue).await;
            least = [least, counted].into_iter().flatten().min();
        }
        least
    }

    async fn count_at(&self, links: &mut BTreeMap<String, Link>, node: &Node, queue: &str) -> Option<u32> {
        if !links.contains_key(&node.name) {
            let link = self.connect_to(node, "check of idle queues").await.ok()?;
            links.insert(node.name.clone(), link);
        }
        let depth = links.get(&node.name)?.depth(queue).await;
        if depth.is_err() {
            links.remove(&node.name);
        }
        depth.ok()?.messages()
    }

    /// Lets new connections try this node after all others for some time.
    pub fn avoid(&self, node: &str) {
        self.nodes.all().iter().filter(|known| known.name == node).for_each(Node::avoid);
    }
}
