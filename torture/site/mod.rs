//! The servers of a run, the proxies to these servers, and the daemons.

mod clock;
mod daemon;
mod lines;
mod log;
mod settings;
mod settle;
mod stack;

use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use sqlx::MySqlPool;
use sqlx::mysql::MySqlPoolOptions;
use tallyd_base::config::Config;
use tallyd_core::rules::Writes;
use tallyd_testkit::gateway::{Gateway, gateway_command};
use tokio::process::Command;

use crate::history::Recorder;
use crate::proxy::Proxy;

pub use clock::Clock;
pub use daemon::{Daemon, Surprise};
pub use lines::Lines;
use log::Disturbance;
pub use settings::PARTITIONS;
use settings::{Addresses, Who, of_gateway, text};
pub use settle::CONNECTIONS;
pub use stack::{Server, Stack, redis_at};

/// An error within this time after a fault can still be a result of the fault. After many crashes, daemons consume
/// messages one by one, and a reconcile can time out while it waits for its fence (its marker in the queues).
const ERRORS_AFTER: Duration = Duration::from_secs(60);

/// One-shot commands read this configuration file.
const OPERATOR: &str = "operator.toml";

/// The options of a site.
#[derive(Clone, Debug)]
pub struct Options {
    pub daemons: usize,
    /// The writer of the like counters in Redis: the daemons or the API servers.
    pub likes_by: Writes,
    /// The folder for configurations and logs.
    pub folder: PathBuf,
    /// Path of tallyd.
    pub tallyd: PathBuf,
}

impl Default for Options {
    /// Uses the tallyd program that was built together with this program.
    fn default() -> Self {
        let folder = PathBuf::from("target/torture");
        Self { daemons: 3, likes_by: Writes::default(), folder, tallyd: tallyd_testkit::program() }
    }
}

/// The servers, proxies and daemons that a fault can harm.
pub struct Site {
    /// The prefix of the site's keys, queues and database.
    pub name: String,
    likes_by: Writes,
    pub stack: Stack,
    /// The proxies of the users.
    pub lines: Lines,
    pub daemons: Vec<Arc<Daemon>>,
    /// The gateway of the users. Its connections go through their proxies.
    gateway: OnceLock<Arc<Gateway>>,
    folder: PathBuf,
    tallyd: PathBuf,
    config: Config,
    direct_config: Config,
    admin_config: Config,
    pool: MySqlPool,
    disturbances: Mutex<Vec<Disturbance>>,
    /// Records the calls of all users, and of faults that act as users.
    pub recorder: Arc<Recorder>,
    /// The time of the last restore of MySQL, or 0 if there was no restore. Data that MySQL got before the restore may
    /// be lost.
    pub lost_at: AtomicI64,
}

impl Site {
    /// Starts servers, tables and daemons.
    ///
    /// # Errors
    /// Fails if a server or a daemon doesn't start.
    pub async fn start(options: &Options) -> Result<Arc<Self>> {
        // The name must have the prefix that all tests use. The broker's accounts have rights only for names with this
        // prefix.
        let (name, likes_by) = (format!("t_torture_{}", std::process::id()), options.likes_by);
        let stack = Stack::from_environment(&name)?;
        stack.start(&Server::STACK).await?;
        std::fs::create_dir_all(&options.folder)?;
        let folder = std::fs::canonicalize(&options.folder)?;
        let tallyd =
            std::fs::canonicalize(&options.tallyd).with_context(|| format!("find {}", options.tallyd.display()))?;
        stack.prepare(&name).await?;
        let lines = Lines::before(&stack.addresses).await;
        let configuration = |file: &str, addresses: &Addresses, who| {
            let path = folder.join(file);
            std::fs::write(&path, text(&name, likes_by, &addresses.of(who, &stack.accounts), ""))?;
            anyhow::Ok(tallyd_base::config::load(&path)?)
        };
        let config = configuration("users.toml", &lines.addresses, Who::ApiServer)?;
        let direct_config = configuration("watchers.toml", &stack.addresses, Who::ApiServer)?;
        let admin_config = configuration("admin.toml", &stack.addresses, Who::Admin)?;
        configuration(OPERATOR, &stack.addresses, Who::Daemon)?;
        // Runs as root, because other accounts have no access to this table.
        let pool = MySqlPoolOptions::new()
            .max_connections(8)
            .acquire_timeout(Duration::from_secs(20))
            .connect_lazy(&stack.addresses.mysql)?;
        let mut site = Self {
            name,
            likes_by,
            stack,
            lines,
            daemons: Vec::new(),
            gateway: OnceLock::new(),
            folder,
            tallyd,
            config,
            direct_config,
            admin_config,
            pool,
            disturbances: Mutex::default(),
            recorder: Arc::default(),
            lost_at: AtomicI64::new(0),
        };
        let migration = site.stack.accounts.of_migration(&site.stack.addresses.mysql);
        let migrated = site.command(&["migrate"]).env("TALLYD__MYSQL__URL", migration).output().await?;
        if !migrated.status.success() {
            bail!("tallyd migrate: {}", String::from_utf8_lossy(&migrated.stderr));
        }
        for number in 0..options.daemons {
            let daemon = site.daemon(number).await?;
            site.daemons.push(daemon);
        }
        for daemon in &site.daemons {
            daemon.start().await;
        }
        site.settle(Duration::from_secs(60)).await.context("daemons that were just started")?;
        let file = site.folder.join("gateway.toml");
        std::fs::write(&file, of_gateway(&site.name, &site.lines.addresses.of(Who::ApiServer, &site.stack.accounts)))?;
        let gateway = Gateway::spawned(gateway_command(&file), site.folder.join("gateway.log")).await;
        let _ = site.gateway.set(Arc::new(gateway));
        Ok(Arc::new(site))
    }

    /// Returns the writer of the like counters in Redis.
    pub fn likes_by(&self) -> Writes {
        self.likes_by
    }

    /// Returns the gateway through which users like, if the daemons count likes.
    pub fn gateway(&self) -> Option<Arc<Gateway>> {
        self.gateway.get().filter(|_| self.likes_by == Writes::Daemon).cloned()
    }

    /// Returns the configuration of an API server whose connections go through the users' proxies.
    pub fn config(&self) -> Config {
        self.config.clone()
    }

    /// Returns the configuration of an API server that bypasses all proxies.
    pub fn direct_config(&self) -> Config {
        self.direct_config.clone()
    }

    /// Returns the administrator's configuration, which bypasses all proxies.
    pub fn admin_config(&self) -> Config {
        self.admin_config.clone()
    }

    /// Returns the administrator's connections to MySQL, which bypass all proxies.
    pub fn pool(&self) -> &MySqlPool {
        &self.pool
    }

    /// Runs a command of tallyd to its end. The command bypasses all proxies and uses the daemons' accounts.
    pub async fn tallyd(&self, arguments: &[&str]) -> Result<Output> {
        Ok(self.command(arguments).output().await?)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.tallyd);
        command.arg("--config").arg(self.folder.join(OPERATOR)).env_remove("NOTIFY_SOCKET");
        command.args(arguments).kill_on_drop(true);
        command
    }

    /// Returns the proxies of a server: first the users' proxy, then the daemons' proxies.
    pub fn all_lines(&self, server: Server) -> Vec<&Proxy> {
        let daemons = self.daemons.iter().map(|daemon| &daemon.lines);
        [&self.lines].into_iter().chain(daemons).map(|lines| lines.to(server)).collect()
    }

    /// Returns the process ids of the running daemons.
    pub fn pids(&self) -> Vec<u32> {
        self.daemons.iter().filter_map(|daemon| daemon.pid()).collect()
    }

    /// Changes a daemon's configuration file, for its next start or reload.
    pub fn configure(&self, daemon: &Daemon, change: impl FnOnce(String) -> String) -> Result<()> {
        let addresses = daemon.lines.addresses.of(Who::Daemon, &self.stack.accounts);
        let text = text(&self.name, self.likes_by, &addresses, &self.admin(daemon.number));
        Ok(std::fs::write(&daemon.config, change(text))?)
    }

    /// Returns the address of the daemon's admin port.
    pub fn admin(&self, daemon: usize) -> String {
        format!("127.0.0.1:{}", usize::from(self.stack.port_base) + 10 + daemon)
    }

    /// Records that a server or connection is broken until [`Site::mend`].
    pub fn disturb(&self, what: &'static str) {
        let disturbance = Disturbance { what, from: SystemTime::now(), until: None };
        self.disturbances.lock().unwrap().push(disturbance);
    }

    /// Records that the server or connection works again.
    pub fn mend(&self, what: &'static str) {
        let mut disturbances = self.disturbances.lock().unwrap();
        let open = disturbances.iter_mut().find(|disturbance| disturbance.what == what && disturbance.until.is_none());
        if let Some(disturbance) = open {
            disturbance.until = Some(SystemTime::now());
        }
    }

    /// Returns the daemons' exits, panics and errors that no fault explains.
    pub fn surprises(&self) -> Vec<Surprise> {
        let disturbances = self.disturbances.lock().unwrap().clone();
        let of = |daemon: &Arc<Daemon>| {
            let mut all = daemon.surprises();
            all.extend(log::surprises(daemon.number, &daemon.log_from(0), &disturbances, ERRORS_AFTER));
            all
        };
        self.daemons.iter().flat_map(of).collect()
    }

    /// Stops the daemons cleanly. The servers keep running.
    pub async fn end(&self) -> Result<()> {
        for daemon in &self.daemons {
            daemon.stop().await?;
        }
        Ok(())
    }

    async fn daemon(&self, number: usize) -> Result<Arc<Daemon>> {
        let file = |ending: &str| self.folder.join(format!("daemon-{number}.{ending}"));
        let lines = Lines::before(&self.stack.addresses).await;
        let (config, log) = (file("toml"), file("log"));
        std::fs::write(&log, "")?;
        let clock = Clock::new(file("clock"));
        clock.step(0)?;
        let daemon = Daemon::new(number, lines, config, log, self.tallyd.clone(), clock);
        self.configure(&daemon, |text| text)?;
        Ok(daemon)
    }
}
