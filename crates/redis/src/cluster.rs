//! A Redis Cluster: a pipeline is cut into one for each node, the parts run at once, and the answers come back in
//! order.
//!
//! A command is sent again only after a node said that it did not run it: MOVED, ASK, TRYAGAIN. After a lost connection
//! or a timeout it may have run, and a like must not be counted twice. The library's own Cluster connection keeps to that
//! only without retries, and then breaks other guarantees: docs/decisions/0101 names them.
//!
//! A node that is away fails its own commands alone.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::link::Link;
use super::login::Login;
use super::slots::{SlotMap, redirected, slot_of};
use crate::config::Redis;

/// How long a command is sent on and on: whoever counts a like must publish it soon. Most keys have moved by then.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often a command is sent without a pause: to where it should be, to where it is, and once more.
const AT_ONCE: u32 = 3;

/// The first pause; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(5);

/// The nodes of a Cluster.
pub(super) struct Cluster {
    /// How every node is logged in to.
    login: Login,
    timeout: Duration,
    /// Nodes that are asked which others there are.
    seeds: Vec<String>,
    links: Mutex<HashMap<String, Arc<Link>>>,
    /// None where it is unknown, or has proved wrong.
    map: tokio::sync::Mutex<Option<Arc<SlotMap>>>,
}

/// Where a command of a pipeline goes next.
struct Step {
    /// Its place in the pipeline.
    place: usize,
    node: String,
    /// The slot is on its way there: without ASKING the node would refuse it.
    asking: bool,
}

/// What became of a pipeline.
struct Answers {
    /// Each command's.
    results: Vec<RedisResult<Value>>,
    /// Commands that did not run yet.
    open: Vec<Step>,
    /// The map has proved wrong.
    stale: bool,
}

impl Cluster {
    /// The Cluster that `config` names.
    pub(super) fn new(config: &Redis, login: Login) -> RedisResult<Self> {
        let seeds: Vec<String> = [login.address()].into_iter().chain(config.seeds.iter().cloned()).collect();
        let (links, map) = (Mutex::default(), tokio::sync::Mutex::default());
        let cluster = Self { timeout: login.timeout, login, seeds, links, map };
        cluster.seeds.iter().try_for_each(|seed| cluster.link(seed).map(drop))?;
        Ok(cluster)
    }

    /// Runs a pipeline and gives each command's own result, which is its node's failure where that is away.
    ///
    /// # Errors
    /// No node says who serves which slots.
    pub(super) async fn run(&self, pipeline: &Pipeline) -> RedisResult<Vec<RedisResult<Value>>> {
        let began = Instant::now();
        let map = self.map(began).await?;
        let commands: Vec<&Cmd> = pipeline.cmd_iter().collect();
        let mut answers = Answers { results: Vec::with_capacity(commands.len()), open: Vec::new(), stale: false };
        for (place, command) in commands.iter().enumerate() {
            let slot = slot_of(command);
            answers.results.push(Err(not_served(slot)));
            match map.node(slot) {
                Some(node) => answers.open.push(Step { place, node: node.to_owned(), asking: false }),
                None => answers.stale = true,
            }
        }
        for tries in 1.. {
            self.send(&commands, &mut answers, began).await;
            let (pause, limit) = match tries {
                ..AT_ONCE => (Duration::ZERO, self.timeout),
                tries => (PAUSE * (1 << (tries - AT_ONCE).min(10)), PATIENCE.min(self.timeout)),
            };
            if answers.open.is_empty() || began.elapsed() + pause > limit {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        if answers.stale {
            self.forget(&map);
        }
        Ok(answers.results)
    }

    /// Runs a command that has no key on every master.
    ///
    /// # Errors
    /// One of them is away, or refuses it.
    pub(super) async fn ask_all(&self, command: &Cmd) -> RedisResult<Vec<Value>> {
        let began = Instant::now();
        let map = self.map(began).await?;
        let commands = [command];
        let steps = map.masters().into_iter().map(|node| vec![Step { place: 0, node: node.to_owned(), asking: false }]);
        let asked = steps.map(|steps| self.send_part(&commands, steps, began));
        let answers = join_all(asked).await.into_iter().map(|(_, results)| results?.pop().unwrap_or(Ok(Value::Nil)));
        let answers: RedisResult<Vec<Value>> = answers.collect();
        if answers.is_err() {
            self.forget(&map);
        }
        answers
    }

    /// The nodes that serve slots.
    pub(super) async fn masters(&self) -> RedisResult<Vec<String>> {
        Ok(self.map(Instant::now()).await?.masters().into_iter().map(str::to_owned).collect())
    }

    /// Runs a command that has no key on one node.
    pub(super) async fn ask(&self, node: &str, command: &Cmd) -> RedisResult<Value> {
        let steps = vec![Step { place: 0, node: node.to_owned(), asking: false }];
        let (_, results) = self.send_part(&[command], steps, Instant::now()).await;
        results?.pop().unwrap_or(Ok(Value::Nil))
    }

    /// Sends what is open, all nodes' parts at once.
    async fn send(&self, commands: &[&Cmd], answers: &mut Answers, began: Instant) {
        let mut parts: BTreeMap<String, Vec<Step>> = BTreeMap::new();
        for step in std::mem::take(&mut answers.open) {
            parts.entry(step.node.clone()).or_default().push(step);
        }
        let sent = parts.into_values().map(|steps| self.send_part(commands, steps, began));
        for (steps, results) in join_all(sent).await {
            answers.take(steps, results);
        }
    }

    /// Sends the steps of one node; the result of each.
    async fn send_part(
        &self,
        commands: &[&Cmd],
        steps: Vec<Step>,
        began: Instant,
    ) -> (Vec<Step>, RedisResult<Vec<RedisResult<Value>>>) {
        let mut pipeline = Pipeline::with_capacity(steps.len());
        for step in &steps {
            if step.asking {
                // It holds for the next command on the connection: in one pipeline no other can come between.
                pipeline.cmd("ASKING");
            }
            if let Some(command) = commands.get(step.place) {
                pipeline.add_command((*command).clone());
            }
        }
        let Some(node) = steps.first().map(|step| self.link(&step.node)) else { return (steps, Ok(Vec::new())) };
        let results = match node {
            Ok(link) => link.run(pipeline, self.timeout.saturating_sub(began.elapsed())).await,
            Err(error) => Err(error),
        };
        let results = results.map(|results| {
            let mut results = results.into_iter();
            let result = |step: &Step| results.nth(usize::from(step.asking)).unwrap_or(Ok(Value::Nil));
            steps.iter().map(result).collect()
        });
        (steps, results)
    }

    /// Who serves which slots.
    ///
    /// # Errors
    /// Nobody says it within the time since `began`.
    async fn map(&self, began: Instant) -> RedisResult<Arc<SlotMap>> {
        let known = async {
            let mut shared = self.map.lock().await;
            if let Some(map) = shared.as_ref() {
                return Ok(Arc::clone(map));
            }
            let map = Arc::new(self.ask_for_map().await?);
            let masters = map.masters();
            self.links().retain(|node, _| masters.contains(node.as_str()) || self.seeds.contains(node));
            *shared = Some(Arc::clone(&map));
            Ok(map)
        };
        let late = |_| Err(RedisError::from((ErrorKind::Io, "no node of the Redis Cluster answers in time")));
        tokio::time::timeout_at(began + self.timeout, known).await.unwrap_or_else(late)
    }

    /// Asks all nodes at once: the first answer will do. Where it is old, the nodes that it names know better.
    async fn ask_for_map(&self) -> RedisResult<SlotMap> {
        let known: Vec<(String, Arc<Link>)> =
            self.links().iter().map(|(node, link)| (node.clone(), Arc::clone(link))).collect();
        let mut asked = JoinSet::new();
        for (node, link) in known {
            let timeout = self.timeout;
            asked.spawn(async move {
                let mut slots = Pipeline::new();
                slots.cmd("CLUSTER").arg("SLOTS");
                let answer = link.run(slots, timeout).await?.pop().unwrap_or(Ok(Value::Nil))?;
                SlotMap::read(&answer, host(&node)).ok_or_else(|| {
                    RedisError::from((ErrorKind::UnexpectedReturnType, "it knows no slot that is served", node))
                })
            });
        }
        let mut failed =
            RedisError::from((ErrorKind::ClusterConnectionNotFound, "no node of the Redis Cluster is known"));
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(map)) => return Ok(map),
                // Why the configuration is wrong says more than that another node is away.
                Ok(Err(error)) if failed.kind() != ErrorKind::InvalidClientConfig => failed = error,
                _ => {}
            }
        }
        Err(failed)
    }

    /// Lets the next call ask for the map again, unless another one has done so, or is about to.
    fn forget(&self, map: &Arc<SlotMap>) {
        if let Ok(mut shared) = self.map.try_lock()
            && shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, map))
        {
            *shared = None;
        }
    }

    fn link(&self, node: &str) -> RedisResult<Arc<Link>> {
        let mut links = self.links();
        if let Some(link) = links.get(node) {
            return Ok(Arc::clone(link));
        }
        let link = Arc::new(Link::new(self.login.at(node)?, true)?);
        links.insert(node.to_owned(), Arc::clone(&link));
        Ok(link)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<String, Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Answers {
    /// Keeps what one node answered to `steps`, and what is to be sent elsewhere, or again.
    fn take(&mut self, steps: Vec<Step>, results: RedisResult<Vec<RedisResult<Value>>>) {
        let results = results.unwrap_or_else(|error| {
            self.stale = true;
            steps.iter().map(|_| Err(error.clone())).collect()
        });
        for (step, result) in steps.into_iter().zip(results) {
            let place = step.place;
            if let Err(error) = &result {
                let next = self.next(step, error);
                self.open.extend(next);
            }
            if let Some(known) = self.results.get_mut(place) {
                *known = result;
            }
        }
    }

    /// Where a command goes that a node did not run; nowhere where it may have.
    fn next(&mut self, step: Step, error: &RedisError) -> Option<Step> {
        let ErrorKind::Server(kind) = error.kind() else { return None };
        self.stale |= matches!(kind, ServerErrorKind::Moved | ServerErrorKind::ClusterDown);
        match kind {
            ServerErrorKind::Moved | ServerErrorKind::Ask => {
                let node = redirected(error.redirect_node()?.0, host(&step.node))?;
                Some(Step { node, asking: kind == ServerErrorKind::Ask, ..step })
            }
            // Some of its keys have moved and others not.
            ServerErrorKind::TryAgain => Some(step),
            _ => None,
        }
    }
}

/// The host of a `host:port`.
fn host(node: &str) -> &str {
    node.rsplit_once(':').map_or(node, |(host, _)| host)
}

fn not_served(slot: u16) -> RedisError {
    let slot = format!("slot {slot}");
    RedisError::from((ErrorKind::ClusterConnectionNotFound, "no node of the Redis Cluster serves it", slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_have_run_is_never_sent_again() {
        let server = |kind: ServerErrorKind, detail: &str| {
            RedisError::from((ErrorKind::Server(kind), "as the test wants", detail.to_owned()))
        };
        for (error, expected, stale) in [
            (server(ServerErrorKind::Moved, "7 10.0.0.2:7002"), Some(("10.0.0.2:7002", false)), true),
            (server(ServerErrorKind::Ask, "7 :7002"), Some(("10.0.0.1:7002", true)), false),
            (server(ServerErrorKind::TryAgain, ""), Some(("10.0.0.1:7001", false)), false),
            (server(ServerErrorKind::ClusterDown, ""), None, true),
            (server(ServerErrorKind::NoScript, ""), None, false),
            (server(ServerErrorKind::ResponseError, ""), None, false),
        ] {
            let mut answers = Answers { results: vec![Ok(Value::Nil)], open: Vec::new(), stale: false };
            let step = Step { place: 0, node: "10.0.0.1:7001".to_owned(), asking: false };
            answers.take(vec![step], Ok(vec![Err(error.clone())]));
            let next = answers.open.first().map(|step| (step.node.as_str(), step.asking));
            assert_eq!((next, answers.stale), (expected, stale), "{error}");
            assert_eq!(answers.results, [Err(error)]);
        }
        // A connection that broke, or timed out: all of its node's commands may have run.
        let broken = RedisError::from((ErrorKind::Io, "as the test wants"));
        let mut answers = Answers { results: vec![Ok(Value::Nil); 2], open: Vec::new(), stale: false };
        let step = |place| Step { place, node: "10.0.0.1:7001".to_owned(), asking: false };
        answers.take(vec![step(0), step(1)], Err(broken.clone()));
        assert_eq!((answers.open.len(), answers.stale), (0, true));
        assert_eq!(answers.results, [Err(broken.clone()), Err(broken)]);
    }
}
