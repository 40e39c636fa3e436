//! A Redis master, two replicas and three sentinels, which all stop when this value is dropped.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use redis::Value;
use redis::aio::MultiplexedConnection;
use tallyd_base::config::Config;

use super::common::ports::free_port;
use super::common::{World, eventually, signal};
use crate::common::scripts::ApiServer;

/// The name that the sentinels use for the master.
const NAME: &str = "tally";

/// The password for the sentinels.
const PASSWORD: &str = "choose-for-sentinels";

/// The number of Redis servers, which is also the number of sentinels.
const SERVERS: usize = 3;

pub struct Group {
    folder: tempfile::TempDir,
    servers: Vec<Server>,
    sentinels: Vec<Server>,
}

struct Server {
    port: u16,
    child: Child,
}

impl Server {
    /// Starts a Redis server that saves nothing to disk.
    fn redis(port: u16, folder: &Path, master: Option<u16>) -> Self {
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"]);
        command.arg(folder).args(["--masteruser", "replica", "--masterauth", "choose-a-fourth"]);
        // The master and its replicas ping each other often, so that a failover is quick.
        command.args(["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]);
        if let Some(master) = master {
            command.args(["--replicaof", "127.0.0.1", &master.to_string()]);
        }
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        Self { port, child }
    }

    fn sentinel(folder: &Path, name: &str, master: u16, more: &str) -> Self {
        let port = free_port();
        let file = folder.join(format!("sentinel-{port}.conf"));
        // The sentinels use the account from the documentation.
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nlogfile sentinel-{port}.log\nsentinel monitor {name} 127.0.0.1 {master} 2\n\
             sentinel down-after-milliseconds {name} 1500\nsentinel failover-timeout {name} 6000\n\
             sentinel auth-user {name} sentinel\nsentinel auth-pass {name} choose-a-third\n{more}",
            folder.display()
        );
        fs::write(&file, text).unwrap();
        let child = Command::new("redis-server").arg(&file).arg("--sentinel").stdout(Stdio::null()).spawn().unwrap();
        Self { port, child }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    async fn connect(&self) -> Option<MultiplexedConnection> {
        let client = redis::Client::open(format!("redis://{}", self.address())).unwrap();
        client.get_multiplexed_async_connection().await.ok()
    }

    fn signal(&self, name: &str) {
        signal(&self.child, name);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Group {
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut group = Self { folder, servers: Vec::new(), sentinels: Vec::new() };
        for place in 0..SERVERS {
            let master = group.servers.first().map(|master| master.port);
            group.servers.push(Server::redis(free_port(), group.folder.path(), master));
            group.is_ready(place).await;
        }
        for place in 1..SERVERS {
            eventually("the replica follows", || group.says(place, "master_link_status:up")).await;
        }
        let lock = format!("requirepass {PASSWORD}\nsentinel sentinel-pass {PASSWORD}\n");
        for _ in 0..SERVERS {
            group.sentinels.push(Server::sentinel(group.folder.path(), NAME, group.servers[0].port, &lock));
        }
        for place in 0..SERVERS {
            let known = format!("slaves={},sentinels={SERVERS}", SERVERS - 1);
            eventually("the sentinels know each other and the replicas", || async {
                group.ask_sentinel(place, &["INFO", "sentinel"]).await.is_some_and(|told| told.contains(&known))
            })
            .await;
        }
        let file = group.password_file();
        fs::write(&file, PASSWORD).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o400)).unwrap();
        group
    }

    pub fn password_file(&self) -> String {
        self.folder.path().join("password").to_str().unwrap().to_owned()
    }

    /// Waits until a server answers. Then creates the Redis accounts that docs/operations/security.md describes, but
    /// with access to all keys.
    async fn is_ready(&self, place: usize) {
        eventually("the server answers", || async { self.servers[place].connect().await.is_some() }).await;
        let mut admin = self.servers[place].connect().await.unwrap();
        let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations/security.md");
        for line in fs::read_to_string(manual).unwrap().lines().filter(|line| line.starts_with("ACL SETUSER ")) {
            let words = line.split(' ').skip(1).map(|word| if word.starts_with('~') { "~*" } else { word });
            let words: Vec<&str> = words.collect();
            redis::cmd("ACL").arg(&words).query_async::<()>(&mut admin).await.unwrap();
        }
    }

    pub async fn says(&self, place: usize, line: &str) -> bool {
        let Some(mut server) = self.servers[place].connect().await else { return false };
        let info = redis::cmd("INFO").arg("replication").query_async::<String>(&mut server).await;
        info.is_ok_and(|info| info.lines().any(|found| found.trim() == line))
    }

    /// Connects to the master. Returns `None` while the sentinels do not agree, or if the master does not answer.
    pub async fn connect_master(&self) -> Option<MultiplexedConnection> {
        self.servers[self.master().await?].connect().await
    }

    /// Returns a sentinel's answer as text. Returns `None` if the sentinel does not answer.
    async fn ask_sentinel(&self, place: usize, words: &[&str]) -> Option<String> {
        let mut sentinel = self.sentinel(place).await?;
        let answer = redis::cmd(words[0]).arg(&words[1..]).query_async::<Value>(&mut sentinel).await.ok()?;
        Some(format!("{answer:?}"))
    }

    async fn sentinel(&self, place: usize) -> Option<MultiplexedConnection> {
        let url = format!("redis://:{PASSWORD}@{}", self.sentinels[place].address());
        redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.ok()
    }

    /// Returns the index of the master in `servers`, or `None` while the sentinels do not agree.
    pub async fn master(&self) -> Option<usize> {
        let mut ports = Vec::new();
        for place in 0..SERVERS {
            let mut ask = redis::cmd("SENTINEL");
            ask.arg("GET-MASTER-ADDR-BY-NAME").arg(NAME);
            let (_, port): (String, u16) = ask.query_async(&mut self.sentinel(place).await?).await.ok()?;
            ports.push(port);
        }
        ports.dedup();
        let [port] = ports.as_slice() else { return None };
        self.servers.iter().position(|server| server.port == *port)
    }

    /// Waits until a server other than `old` is the master. Returns its place.
    pub async fn is_promoted_over(&self, old: usize) -> usize {
        eventually("another server is the master", || async {
            match self.master().await {
                Some(place) => place != old && self.says(place, "role:master").await,
                None => false,
            }
        })
        .await;
        self.master().await.unwrap()
    }

    /// Waits until a server is a connected replica of a master.
    pub async fn is_replica(&self, place: usize) {
        eventually("the server is a replica", || async {
            self.says(place, "role:slave").await && self.says(place, "master_link_status:up").await
        })
        .await;
    }

    /// Starts a planned failover.
    pub async fn fail_over(&self) {
        eventually("the sentinels begin a failover", || async {
            self.ask_sentinel(0, &["SENTINEL", "FAILOVER", NAME]).await.is_some()
        })
        .await;
    }

    pub fn signal(&self, place: usize, name: &str) {
        self.servers[place].signal(name);
    }

    pub fn signal_sentinels(&self, name: &str) {
        self.sentinels.iter().for_each(|sentinel| sentinel.signal(name));
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self, place: usize) {
        self.servers[place].child.kill().unwrap();
        self.servers[place].child.wait().unwrap();
    }

    /// Restarts a killed server without data. At first the server is a master.
    pub async fn start_again(&mut self, place: usize) {
        self.servers[place] = Server::redis(self.servers[place].port, self.folder.path(), None);
        self.is_ready(place).await;
    }

    /// Returns how often a server has run this command for clients other than its master.
    pub async fn commands(&self, place: usize, name: &str) -> u64 {
        let mut server = self.servers[place].connect().await.unwrap();
        let info: String = redis::cmd("INFO").arg("commandstats").query_async(&mut server).await.unwrap();
        let line = format!("cmdstat_{name}:calls=");
        let count = info.lines().find_map(|text| text.strip_prefix(&line));
        count.map_or(0, |count| count.split(',').next().unwrap().parse().unwrap())
    }

    /// Changes a setting of a Redis server.
    pub async fn set(&self, place: usize, name: &str, value: &str) {
        let mut server = self.servers[place].connect().await.unwrap();
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg(name).arg(value).query_async::<()>(&mut server).await.unwrap();
    }

    /// Starts a sentinel without a password, which treats a replica as a master with the name "other". Returns a guard
    /// and the sentinel's address. The sentinel stops when the guard is dropped.
    pub fn mistaken(&self, replica: usize) -> (impl Drop + use<>, String) {
        let sentinel = Server::sentinel(self.folder.path(), "other", self.servers[replica].port, "");
        let address = sentinel.address();
        (sentinel, address)
    }

    pub fn server(&self, place: usize) -> String {
        self.servers[place].address()
    }

    pub fn sentinels(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::address).collect()
    }

    /// Returns settings with the addresses of the sentinels. `more` is added.
    pub fn settings(&self, more: &str) -> String {
        let (sentinels, file) = (self.sentinels(), self.password_file());
        format!(
            "[redis]\nurl = \"redis://tallyd:choose-one@{NAME}/0\"\nsentinels = {sentinels:?}\nsentinel_master = \"{NAME}\"\n\
             sentinel_password_file = \"{file}\"\ntimeout_ms = 2000\n{more}"
        )
    }

    /// Makes a client that connects directly to this server and does not ask the sentinels.
    pub fn unaware(&self, world: &World, place: usize) -> ApiServer {
        let mut config: Config = world.api.clone();
        config.redis.url = format!("redis://tallyd_api:choose-another@{}/0", self.server(place)).as_str().into();
        config.redis.sentinels.clear();
        ApiServer::new(&config)
    }

    /// Makes a client that uses the account of API servers.
    pub fn api_server(&self, world: &World) -> ApiServer {
        let mut config: Config = world.api.clone();
        config.redis.url = format!("redis://tallyd_api:choose-another@{NAME}/0").as_str().into();
        ApiServer::new(&config)
    }
}
