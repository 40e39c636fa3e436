//! A RabbitMQ cluster of three nodes. All nodes stop when the test ends.
//!
//! The nodes have their own epmd, ports and cookie. The scripts run from the folder `TALLYD_STACK_RABBIT_BIN`, because
//! the wrappers in /usr/sbin switch the user and drop the environment.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use super::common::ports::free_port;
use super::common::{World, eventually, eventually_each, stderr, stdout, without_disk};

/// The default folder of RabbitMQ's scripts. An environment variable can set another folder.
const RABBIT_BIN: &str = "/usr/lib/rabbitmq/bin";

/// The pause between two looks that start an Erlang machine, which takes seconds of CPU time.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The number of nodes.
pub const NODES: usize = 3;

pub struct Cluster {
    nodes: Vec<Node>,
    /// The Erlang port mapper epmd, from which each node gets the ports of the other nodes.
    epmd: Child,
    epmd_port: u16,
    folder: tempfile::TempDir,
}

struct Node {
    port: u16,
    dist_port: u16,
    /// The process of the node, or `None` while the node is stopped. The process leads a process group.
    child: Option<Child>,
}

/// Defines how a node ends.
#[derive(Clone, Copy)]
pub enum End {
    /// SIGKILL.
    Killed,
    /// SIGTERM, for a clean stop.
    InOrder,
}

impl Cluster {
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let epmd_port = free_port();
        let epmd = Command::new("epmd")
            .args(["-port", &epmd_port.to_string(), "-address", "127.0.0.1"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let nodes = (0..NODES).map(|_| Node { port: free_port(), dist_port: free_port(), child: None }).collect();
        let mut cluster = Self { nodes, epmd, epmd_port, folder };
        let cookie = cluster.folder.path().join(".erlang.cookie");
        fs::write(&cookie, "OFTHETEST").unwrap();
        fs::set_permissions(&cookie, Permissions::from_mode(0o400)).unwrap();
        for place in 0..NODES {
            cluster.write_settings(place);
            cluster.start_node(place);
        }
        for place in 0..NODES {
            cluster.is_ready(place).await;
        }
        // Each node first joins the cluster and then accepts clients. Some nodes join later than others, so the test
        // waits for all nodes.
        eventually_each(LOOK_EVERY, "the nodes have joined", || async {
            cluster.asked(0, "length(rabbit_nodes:all_running()).") == Some(NODES.to_string())
        })
        .await;
        cluster
    }

    fn name(place: usize) -> String {
        format!("n{place}@localhost")
    }

    fn node_folder(&self, place: usize) -> PathBuf {
        self.folder.path().join(format!("n{place}"))
    }

    fn write_settings(&self, place: usize) {
        let folder = self.node_folder(place);
        fs::create_dir_all(&folder).unwrap();
        let nodes: String = (0..NODES)
            .map(|place| format!("cluster_formation.classic_config.nodes.{} = {}\n", place + 1, Self::name(place)))
            .collect();
        let text = format!(
            "listeners.tcp.1 = 127.0.0.1:{}\ndisk_free_limit.absolute = 50MB\ndefault_user = tally\ndefault_pass = tally\n\
             default_permissions.configure = .*\ndefault_permissions.read = .*\ndefault_permissions.write = .*\n\
             cluster_formation.peer_discovery_backend = classic_config\n{nodes}cluster_partition_handling = pause_minority\n\
             log.file.level = info\n",
            self.nodes[place].port
        );
        fs::write(folder.join("rabbitmq.conf"), text).unwrap();
        fs::write(folder.join("rabbitmq-env.conf"), "").unwrap();
        fs::write(folder.join("advanced.config"), "[].").unwrap();
        fs::write(folder.join("enabled_plugins"), "[rabbitmq_consistent_hash_exchange].").unwrap();
    }

    /// Returns a command that runs a script of RabbitMQ for one node.
    fn script(&self, place: usize, script: &str) -> Command {
        let bin = std::env::var("TALLYD_STACK_RABBIT_BIN").unwrap_or_else(|_| RABBIT_BIN.to_owned());
        let folder = self.node_folder(place);
        let mut command = Command::new(Path::new(&bin).join(script));
        command
            .env_clear()
            .envs(without_disk())
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("LC_ALL", "C.UTF-8")
            .env("HOME", self.folder.path())
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODENAME", Self::name(place))
            .env("RABBITMQ_DIST_PORT", self.nodes[place].dist_port.to_string())
            .env("ERL_CRASH_DUMP_SECONDS", "0")
            .env("RABBITMQ_CONF_ENV_FILE", folder.join("rabbitmq-env.conf"))
            .env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq.conf"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", folder.join("advanced.config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("enabled_plugins"))
            .env("RABBITMQ_MNESIA_BASE", folder.join("data"))
            .env("RABBITMQ_LOG_BASE", &folder)
            .env("RABBITMQ_LOGS", folder.join("server.log"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", folder.join("generated"))
            .env("RABBITMQ_CTL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}")
            .stdin(Stdio::null());
        command
    }

    fn start_node(&mut self, place: usize) {
        let log = File::create(self.node_folder(place).join("stdout.log")).unwrap();
        // With this tick time, the other nodes detect a frozen node within seconds instead of a minute. A single
        // scheduler without busy waiting saves CPU time.
        let arguments = "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none +A 4 -start_epmd false -kernel net_ticktime 6 \
                         -kernel inet_dist_use_interface {127,0,0,1}";
        let child = self
            .script(place, "rabbitmq-server")
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", arguments)
            // With this variable, the script replaces itself with the server, so that the child is the server's
            // process.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        self.nodes[place].child = Some(child);
    }

    /// Waits until a node accepts clients.
    pub async fn is_ready(&self, place: usize) {
        eventually("the node accepts clients", || async { self.lets_in(place).await }).await;
    }

    /// Waits until a node sees no other node. Without Khepri, such a node pauses, and this function also waits for the
    /// pause. With Khepri (RabbitMQ 4.2 and later), such a node still accepts clients, but confirms nothing.
    pub async fn is_alone(&self, place: usize) {
        let is_alone = || async { self.asked(place, "nodes().").as_deref() == Some("[]") };
        eventually_each(LOOK_EVERY, "the node sees no other node", is_alone).await;
        if self.eval(place, "(catch rabbit_khepri:is_enabled()) =:= true.") != "true" {
            eventually("the node pauses", || async { !self.lets_in(place).await }).await;
        }
    }

    async fn lets_in(&self, place: usize) -> bool {
        let amqp = tallyd_base::config::Amqp {
            url: self.url(place).as_str().into(),
            timeout_ms: 2_000,
            ..tallyd_base::config::Amqp::default()
        };
        tallyd_rabbitmq::Broker::new(&amqp).unwrap().connect("test").await.is_ok()
    }

    /// Ends a node.
    pub fn stop(&mut self, place: usize, end: End) {
        self.signal(
            place,
            match end {
                End::Killed => "KILL",
                End::InOrder => "TERM",
            },
        );
        self.nodes[place].child.take().unwrap().wait().unwrap();
    }

    /// Restarts a node that has ended, and waits until it accepts clients.
    pub async fn start_again(&mut self, place: usize) {
        self.start_node(place);
        self.is_ready(place).await;
    }

    /// Waits until every queue would work without this node. Operators do the same before each step of a rolling
    /// restart.
    pub async fn awaits_quorum(&self, place: usize) {
        eventually_each(LOOK_EVERY, "every queue works without the node", || async {
            let mut wait = self.script(place, "rabbitmq-upgrade");
            // A node can already accept clients before this command succeeds.
            wait.args(["-n", &Self::name(place), "await_online_quorum_plus_one"]).output().unwrap().status.success()
        })
        .await;
    }

    /// Sends a signal to all processes of a node.
    pub fn signal(&self, place: usize, name: &str) {
        let group = format!("-{}", self.nodes[place].child.as_ref().unwrap().id());
        let sent = Command::new("kill").args([&format!("-{name}"), "--", &group]).status().unwrap();
        assert!(sent.success(), "kill -{name}");
    }

    /// Evaluates an Erlang expression on a node, and returns the value.
    pub fn eval(&self, place: usize, expression: &str) -> String {
        let output = self.ctl(place, &["eval", expression]);
        assert!(output.status.success(), "{expression}: {}{}", stdout(&output), stderr(&output));
        stdout(&output).trim().to_owned()
    }

    /// Does the same as [`Self::eval`]. Returns `None` if the node does not answer, because it starts or is cut off.
    fn asked(&self, place: usize, expression: &str) -> Option<String> {
        let output = self.ctl(place, &["eval", expression]);
        output.status.success().then(|| stdout(&output).trim().to_owned())
    }

    fn ctl(&self, place: usize, arguments: &[&str]) -> Output {
        self.script(place, "rabbitmqctl").arg("-q").args(["-n", &Self::name(place)]).args(arguments).output().unwrap()
    }

    /// Makes a node the leader of all queues of the test environment.
    pub async fn lead(&self, place: usize, world: &World) {
        let names: Vec<String> = (0..world.broker.partitions())
            .map(|partition| format!("<<\"{}\">>", world.broker.queue(partition)))
            .collect();
        let to = Self::name(place);
        let expression = format!(
            "Led = fun(Name) -> {{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, Name)), amqqueue:get_pid(Q) end, \
             [ra:transfer_leadership(Led(Name), {{element(1, Led(Name)), '{to}'}}) || Name <- [{names}]], \
             timer:sleep(300), [element(2, Led(Name)) || Name <- [{names}]].",
            names = names.join(", ")
        );
        let all = format!("[{}]", vec![to; names.len()].join(","));
        let leads = || async { self.asked(place, &expression).is_some_and(|led| led.replace('\'', "") == all) };
        eventually_each(LOOK_EVERY, "the node leads all queues", leads).await;
    }

    /// Closes all connections between a node and the other nodes, and rejects new connections until
    /// [`Self::reconnect`].
    pub fn cut_off(&self, place: usize) {
        // The node uses a wrong cookie for the other nodes, so the nodes reject each other's connections.
        self.eval_for_others(
            place,
            "[erlang:set_cookie(O, cut) || O <- Others], [erlang:disconnect_node(O) || O <- Others]",
        );
    }

    /// Accepts connections between a node and the other nodes again.
    pub fn reconnect(&self, place: usize) {
        self.eval_for_others(place, "[erlang:set_cookie(O, erlang:get_cookie()) || O <- Others]");
    }

    /// Evaluates an Erlang expression on a node. In the expression, `Others` is the list of the other nodes.
    fn eval_for_others(&self, place: usize, expression: &str) {
        let others: Vec<String> =
            (0..NODES).filter(|other| *other != place).map(|other| format!("'{}'", Self::name(other))).collect();
        assert_eq!(self.eval(place, &format!("Others = [{}], {expression}, ok.", others.join(", "))), "ok");
    }

    /// Makes a node accept clients also while it sees no other node. RabbitMQ's default is the same.
    pub fn ignores_partitions(&self, place: usize) {
        let ignore = "application:set_env(rabbit, cluster_partition_handling, ignore).";
        assert_eq!(self.eval(place, ignore), "ok");
    }

    pub fn url(&self, place: usize) -> String {
        format!("amqp://tally:tally@127.0.0.1:{}/%2f", self.nodes[place].port)
    }

    /// Returns settings with the addresses of these nodes. `more` is added to `[amqp]`.
    pub fn settings(&self, more: &str) -> String {
        let seeds: Vec<String> = self.nodes[1..].iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("[amqp]\nurl = \"{}\"\nseeds = {seeds:?}\nheartbeat_s = 2\ntimeout_ms = 4000\n{more}", self.url(0))
    }

    fn log(&self, place: usize) -> String {
        fs::read_to_string(self.node_folder(place).join("server.log")).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for place in 0..NODES {
            if let Some(mut child) = self.nodes[place].child.take() {
                let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status();
                let _ = child.wait();
            }
            if std::thread::panicking() {
                let log = self.log(place);
                let from = log.len().saturating_sub(4_000);
                eprintln!("--- the log of n{place} ---\n{}", log.get(from..).unwrap_or_default());
            }
        }
        let _ = self.epmd.kill();
        let _ = self.epmd.wait();
    }
}
