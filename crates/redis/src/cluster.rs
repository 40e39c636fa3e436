//! Runs commands on a Redis Cluster: a pipeline is split into one per node, which run at the same time.
//!
//! A command is sent again only after a node has replied that it did not run (MOVED, ASK, TRYAGAIN). After a lost
//! connection or a timeout the command may have run, and a like must not be counted twice. The library's own Cluster
//! connection can repeat such a command, or breaks four other guarantees (decision 0039).
//!
//! If a node is unreachable, only the commands for this node fail.

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

/// Short, because an API server counts a like in Redis first, and must publish it soon afterwards. Most moves of keys
/// end within this time.
const PATIENCE: Duration = Duration::from_secs(1);

/// Attempts before the first pause: the usual node, the node that a redirection names, and a third one.
const AT_ONCE: u32 = 3;

const PAUSE: Duration = Duration::from_millis(5);

pub(super) struct Cluster {
    login: Login,
    timeout: Duration,
    seeds: Vec<String>,
    links: Mutex<HashMap<String, Arc<Link>>>,
    /// Maps slots to nodes. `None` if the map is unknown or turned out to be wrong.
    map: tokio::sync::Mutex<Option<Arc<SlotMap>>>,
}

struct Step {
    place: usize,
    node: String,
    /// Whether the slot is moving to this node. While a slot is moving, the node accepts a command only after ASKING.
    asking: bool,
}

struct Answers {
    results: Vec<RedisResult<Value>>,
    open: Vec<Step>,
    stale: bool,
}

impl Cluster {
    pub(super) fn new(config: &Redis, login: Login) -> RedisResult<Self> {
        let seeds: Vec<String> = [login.address()].into_iter().chain(config.seeds.iter().cloned()).collect();
        let (links, map) = (Mutex::default(), tokio::sync::Mutex::default());
        let cluster = Self { timeout: login.timeout, login, seeds, links, map };
        cluster.seeds.iter().try_for_each(|seed| cluster.link(seed).map(drop))?;
        Ok(cluster)
    }

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

    pub(super) async fn masters(&self) -> RedisResult<Vec<String>> {
        Ok(self.map(Instant::now()).await?.masters().into_iter().map(str::to_owned).collect())
    }

    pub(super) async fn ask(&self, node: &str, command: &Cmd) -> RedisResult<Value> {
        let steps = vec![Step { place: 0, node: node.to_owned(), asking: false }];
        let (_, results) = self.send_part(&[command], steps, Instant::now()).await;
        results?.pop().unwrap_or(Ok(Value::Nil))
    }

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

    async fn send_part(
        &self,
        commands: &[&Cmd],
        steps: Vec<Step>,
        began: Instant,
    ) -> (Vec<Step>, RedisResult<Vec<RedisResult<Value>>>) {
        let mut pipeline = Pipeline::with_capacity(steps.len());
        for step in &steps {
            if step.asking {
                // ASKING affects only the next command on the connection. Both commands are in the same pipeline, so no
                // other command can come between them.
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

    /// Asks all nodes at the same time and uses the first answer. If the map of slots in this answer is outdated, the
    /// nodes will redirect commands.
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
                    RedisError::from((ErrorKind::UnexpectedReturnType, "the answer contains no slot with a node", node))
                })
            });
        }
        let mut failed =
            RedisError::from((ErrorKind::ClusterConnectionNotFound, "no node of the Redis Cluster is known"));
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(map)) => return Ok(map),
                // An error about a wrong configuration is kept, because it explains more than the error of an
                // unreachable node.
                Ok(Err(error)) if failed.kind() != ErrorKind::InvalidClientConfig => failed = error,
                _ => {}
            }
        }
        Err(failed)
    }

    /// Deletes the map of slots, so that the next call asks for a new map. If another call has replaced the map or is
    /// replacing it now, the map stays.
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
    fn take(&mut self, steps: Vec<Step>, results: RedisResult<Vec<RedisResult<Value>>>) {
        let results = results.unwrap_or_else(|error| {
            self.stale = true;
            let error = of_connection(error);
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

    /// Returns the next destination of a command that a node did not run. Returns `None` if the command may have run.
    fn next(&mut self, step: Step, error: &RedisError) -> Option<Step> {
        let ErrorKind::Server(kind) = error.kind() else { return None };
        self.stale |= matches!(kind, ServerErrorKind::Moved | ServerErrorKind::ClusterDown);
        match kind {
            ServerErrorKind::Moved | ServerErrorKind::Ask => {
                let node = redirected(error.redirect_node()?.0, host(&step.node))?;
                Some(Step { node, asking: kind == ServerErrorKind::Ask, ..step })
            }
            // Only some of the command's keys have moved to the other node, so the command is tried again later.
            ServerErrorKind::TryAgain => Some(step),
            _ => None,
        }
    }
}

fn host(node: &str) -> &str {
    node.rsplit_once(':').map_or(node, |(host, _)| host)
}

/// A node with too many clients refuses a connection with the code of an error of a command, but the commands can
/// succeed later.
fn of_connection(error: RedisError) -> RedisError {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ResponseError) => {
            RedisError::from((ErrorKind::Io, "the node refuses the connection", error.to_string()))
        }
        _ => error,
    }
}

fn not_served(slot: u16) -> RedisError {
    let slot = format!("slot {slot}");
    RedisError::from((ErrorKind::ClusterConnectionNotFound, "no node of the Redis Cluster serves this slot", slot))
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
        // The connection broke or timed out, so all commands for its node may have run.
        let broken = RedisError::from((ErrorKind::Io, "as the test wants"));
        let mut answers = Answers { results: vec![Ok(Value::Nil); 2], open: Vec::new(), stale: false };
        let step = |place| Step { place, node: "10.0.0.1:7001".to_owned(), asking: false };
        answers.take(vec![step(0), step(1)], Err(broken.clone()));
        assert_eq!((answers.open.len(), answers.stale), (0, true));
        assert_eq!(answers.results, [Err(broken.clone()), Err(broken)]);
        // The node refused the connection. No command is blamed for that.
        answers.take(vec![step(0)], Err(server(ServerErrorKind::ResponseError, "max number of clients reached")));
        assert_eq!(answers.results[0].as_ref().unwrap_err().kind(), ErrorKind::Io);
    }
}
