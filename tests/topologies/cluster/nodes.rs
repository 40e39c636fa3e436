//! A Redis Cluster of three masters. The cluster stops at the end of the test.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value};
use tallyd_base::config::Config;
use tallyd_core::model::Target;
use tallyd_redis::keys::LOADED;

use super::common::ports::free_ports;
use super::common::{DEADLINE, Model, World, eventually, signal, target};
use crate::common::scripts::ApiServer;

const SLOTS: u16 = 16_384;

/// The number of masters.
pub const MASTERS: usize = 3;

pub struct Nodes {
    nodes: Vec<Node>,
}

struct Node {
    port: u16,
    bus: u16,
    folder: tempfile::TempDir,
    child: Child,
    killed: bool,
}

impl Node {
    fn start(port: u16, bus: u16, folder: tempfile::TempDir) -> Self {
        let child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--cluster-enabled", "yes"])
            .args(["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "5000"])
            .args(["--enable-debug-command", "local"])
            .args(["--port", &port.to_string(), "--cluster-port", &bus.to_string()])
            .arg("--dir")
            .arg(folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { port, bus, folder, child, killed: false }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Nodes {
    /// Starts the masters. Each master has a third of the hash slots.
    pub async fn start() -> Self {
        let mut nodes = Self { nodes: Vec::new() };
        for place in 0..MASTERS {
            nodes.add().await;
            let (first, next) = (u32::from(SLOTS) * place as u32 / 3, u32::from(SLOTS) * (place as u32 + 1) / 3);
            nodes.cluster(place, &["SET-CONFIG-EPOCH", &(place + 1).to_string()]).await;
            nodes.cluster(place, &["ADDSLOTSRANGE", &first.to_string(), &(next - 1).to_string()]).await;
            if place > 0 {
                nodes.meet(place).await;
            }
        }
        nodes.is_whole().await;
        nodes
    }

    /// Adds a node, and waits until the other nodes know it. Returns its place.
    pub async fn add(&mut self) -> usize {
        let [port, bus] = free_ports();
        let place = self.nodes.len();
        self.nodes.push(Node::start(port, bus, tempfile::tempdir().unwrap()));
        self.answers(place).await;
        place
    }

    pub async fn meet(&self, place: usize) {
        let Node { port, bus, .. } = &self.nodes[0];
        self.cluster(place, &["MEET", "127.0.0.1", &port.to_string(), &bus.to_string()]).await;
    }

    /// Adds a replica of the master `master`. Returns its place.
    pub async fn add_replica(&mut self, master: usize) -> usize {
        let place = self.add().await;
        self.meet(place).await;
        self.is_whole().await;
        let id = self.id(master).await;
        self.cluster(place, &["REPLICATE", &id]).await;
        eventually("the replica follows", || self.says(place, "replication", "master_link_status:up")).await;
        place
    }

    /// Waits until this replica has become a master, and until every node knows that.
    pub async fn is_promoted(&self, place: usize) {
        eventually("the replica is promoted", || self.says(place, "replication", "role:master")).await;
        self.is_whole().await;
        let port = self.nodes[place].port;
        for place in self.alive() {
            eventually("every node knows the new master", || async {
                format!("{:?}", self.cluster(place, &["SLOTS"]).await).contains(&format!("int({port})"))
            })
            .await;
        }
    }

    async fn says(&self, place: usize, section: &str, line: &str) -> bool {
        let info: String = redis::cmd("INFO").arg(section).query_async(&mut self.connect(place).await).await.unwrap();
        info.lines().any(|found| found.trim() == line)
    }

    fn alive(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|place| !self.nodes[*place].killed)
    }

    /// Waits until every node knows all other nodes, and knows which node has which slot.
    pub async fn is_whole(&self) {
        let known = format!("cluster_known_nodes:{}", self.nodes.len());
        let whole = ["cluster_state:ok", "cluster_slots_ok:16384", &known];
        for place in self.alive() {
            eventually("the Cluster is whole", || async {
                let state: String = redis::from_redis_value(self.cluster(place, &["INFO"]).await).unwrap();
                whole.iter().all(|line| state.contains(line))
            })
            .await;
        }
    }

    /// Waits until the node answers. Then creates the Redis accounts that docs/operations/security.md describes, but
    /// with access to all keys.
    async fn answers(&self, place: usize) {
        let client = redis::Client::open(self.url(place)).unwrap();
        eventually("the node answers", || async { client.get_multiplexed_async_connection().await.is_ok() }).await;
        let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations/security.md");
        for line in std::fs::read_to_string(manual).unwrap().lines().filter(|line| line.starts_with("ACL SETUSER ")) {
            let words = line.split(' ').skip(1).map(|word| if word.starts_with('~') { "~*" } else { word });
            let words: Vec<&str> = words.collect();
            redis::cmd("ACL").arg(&words).query_async::<()>(&mut self.connect(place).await).await.unwrap();
        }
    }

    /// Returns settings with the addresses of these nodes. `more` is added.
    pub fn settings(&self, more: &str) -> String {
        let (url, seed) = (self.url_as(0, "tallyd:choose-one"), self.nodes[1].port);
        let redis = format!("url = \"{url}\"\ncluster = true\nseeds = [\"127.0.0.1:{seed}\"]\n");
        format!("[redis]\n{redis}{more}")
    }

    /// Makes a client that uses the account of API servers.
    pub fn api_server(&self, world: &World) -> ApiServer {
        ApiServer::new(&self.api(world))
    }

    /// Returns the configuration with the account of API servers.
    pub fn api(&self, world: &World) -> Config {
        let mut config = world.api.clone();
        config.redis.url = self.url_as(0, "tallyd_api:choose-another").as_str().into();
        config
    }

    fn url_as(&self, place: usize, account: &str) -> String {
        self.url(place).replace("redis://", &format!("redis://{account}@"))
    }

    pub fn url(&self, place: usize) -> String {
        format!("redis://127.0.0.1:{}", self.nodes[place].port)
    }

    pub async fn connect(&self, place: usize) -> MultiplexedConnection {
        let client = redis::Client::open(self.url(place)).unwrap();
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(DEADLINE));
        client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
    }

    /// Sends a CLUSTER command to one node.
    pub async fn cluster(&self, place: usize, arguments: &[&str]) -> Value {
        redis::cmd("CLUSTER").arg(arguments).query_async(&mut self.connect(place).await).await.unwrap()
    }

    /// Sends a command to the node that has the command's key. Asks one node after another, because the test must not
    /// depend on tallyd's code.
    pub async fn command(&self, command: &Cmd) -> Value {
        for place in self.alive() {
            let answer: RedisResult<Value> = command.query_async(&mut self.connect(place).await).await;
            match answer {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::Moved) => {}
                answer => return answer.unwrap(),
            }
        }
        panic!("no node has the key of {command:?}");
    }

    /// Returns the number of the node that has the slot of this key.
    pub async fn place_of(&self, key: &str) -> usize {
        for place in self.alive() {
            let asked: RedisResult<Value> =
                redis::cmd("EXISTS").arg(key).query_async(&mut self.connect(place).await).await;
            if asked.is_ok() {
                return place;
            }
        }
        panic!("no node has the slot of {key}");
    }

    pub async fn slot_of(&self, key: &str) -> u16 {
        redis::from_redis_value(self.cluster(0, &["KEYSLOT", key]).await).unwrap()
    }

    pub async fn id(&self, place: usize) -> String {
        redis::from_redis_value(self.cluster(place, &["MYID"]).await).unwrap()
    }

    /// Returns how often a node has answered with this error.
    pub async fn errors(&self, place: usize, name: &str) -> u64 {
        let info: String =
            redis::cmd("INFO").arg("errorstats").query_async(&mut self.connect(place).await).await.unwrap();
        let line = format!("errorstat_{name}:count=");
        info.lines().find_map(|text| text.strip_prefix(&line)).map_or(0, |count| count.trim().parse().unwrap())
    }

    /// Changes the nodes' timeout, so that they do not treat a node as dead if it gets no CPU for some seconds.
    pub async fn be_patient(&self) {
        for place in self.alive() {
            let mut command = redis::cmd("CONFIG");
            command.arg("SET").arg("cluster-node-timeout").arg(60_000);
            command.query_async::<()>(&mut self.connect(place).await).await.unwrap();
        }
    }

    /// Makes a node announce another port to the Cluster.
    pub async fn announce(&self, place: usize, port: u16) {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("cluster-announce-port").arg(port);
        command.query_async::<()>(&mut self.connect(place).await).await.unwrap();
        for place in self.alive() {
            eventually("every node knows the new port", || async {
                format!("{:?}", self.cluster(place, &["SLOTS"]).await).contains(&format!("int({port})"))
            })
            .await;
        }
    }

    /// Moves one key.
    pub async fn migrate(&self, from: usize, to: usize, key: &str) {
        let mut command = redis::cmd("MIGRATE");
        command.arg("127.0.0.1").arg(self.nodes[to].port).arg(key).arg(0).arg(5_000);
        let _: Value = command.query_async(&mut self.connect(from).await).await.unwrap();
    }

    pub fn signal(&self, place: usize, name: &str) {
        signal(&self.nodes[place].child, name);
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self, place: usize) {
        self.nodes[place].child.kill().unwrap();
        self.nodes[place].child.wait().unwrap();
        self.nodes[place].killed = true;
    }

    /// Restarts a killed node. The node keeps its id, but has no data.
    pub async fn start_again(&mut self, place: usize) {
        let killed = self.nodes.remove(place);
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(killed.folder.path().join("nodes.conf"), folder.path().join("nodes.conf")).unwrap();
        self.nodes.insert(place, Node::start(killed.port, killed.bus, folder));
        self.answers(place).await;
        self.is_whole().await;
    }

    /// Returns for each running master the keys of the test environment.
    pub async fn keys(&self, world: &World) -> Vec<Vec<String>> {
        let mut keys = Vec::new();
        for place in self.alive() {
            if !self.says(place, "replication", "role:master").await {
                keys.push(Vec::new());
                continue;
            }
            let pattern = format!("{}:*", world.name);
            keys.push(redis::cmd("KEYS").arg(pattern).query_async(&mut self.connect(place).await).await.unwrap());
        }
        keys
    }

    /// Returns for each node the counters of videos that are not zero, and the fields `_` of the videos' buckets.
    pub async fn counters(&self, world: &World) -> Vec<(BTreeMap<Target, i64>, BTreeMap<String, String>)> {
        let mut all = Vec::new();
        for (place, keys) in self.alive().zip(self.keys(world).await) {
            let (mut counters, mut loaded) = (BTreeMap::new(), BTreeMap::new());
            let mut redis = self.connect(place).await;
            for key in keys.into_iter().filter(|key| key.contains(":c:{video:")) {
                let fields: HashMap<String, String> =
                    redis::cmd("HGETALL").arg(&key).query_async(&mut redis).await.unwrap();
                for (field, value) in fields {
                    match field.parse() {
                        Ok(id) => drop(counters.insert(target(id), value.split(',').next().unwrap().parse().unwrap())),
                        Err(_) if field == LOADED => drop(loaded.insert(key.clone(), value)),
                        Err(_) => {}
                    }
                }
            }
            counters.retain(|_, value| *value != 0);
            all.push((counters, loaded));
        }
        all
    }

    /// Checks that all nodes together have each counter of the model once, and no other counters.
    pub async fn assert_equal(&self, world: &World, model: &Model) {
        let mut expected = model.counters();
        expected.retain(|_, count| *count != 0);
        let parts = self.counters(world).await;
        let found: usize = parts.iter().map(|(counters, _)| counters.len()).sum();
        let all: BTreeMap<Target, i64> = parts.into_iter().flat_map(|(counters, _)| counters).collect();
        for (target, count) in &expected {
            assert_eq!(all.get(target), Some(count), "{target:?} in Redis");
        }
        assert_eq!((all.len(), found), (expected.len(), expected.len()), "Redis must have only the model's counters");
    }

    /// Changes a counter in Redis without tallyd.
    pub async fn drift(&self, world: &World, target: Target, by: i64) {
        let key = world.cache.keys.counters("video", world.cache.keys.bucket(target));
        self.command(redis::cmd("HINCRBY").arg(key).arg(target.id.0).arg(by)).await;
    }
}
