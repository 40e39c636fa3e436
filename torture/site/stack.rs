//! Starts, kills and freezes the servers of `dev/up` for this run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection, MySqlPool};
use tallyd_core::rules::Writes;
use tokio::process::Command;

use super::clock::Clock;
use super::settings::{Addresses, Who, text};
use crate::accounts::Accounts;

/// Time limit for a connection from the test to MySQL.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// The part of the site that a fault affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Server {
    Daemon,
    Mysql,
    Redis,
    Rabbitmq,
}

impl Server {
    /// The servers of the stack.
    pub const STACK: [Self; 3] = [Self::Mysql, Self::Redis, Self::Rabbitmq];

    /// Returns the server's name for `dev/up`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Mysql => "mysql",
            Self::Redis => "redis",
            Self::Rabbitmq => "rabbitmq",
        }
    }
}

pub struct Stack {
    folder: PathBuf,
    /// The first port of the stack. The stack does not use the ports from `port_base + 10` upwards, so the daemons and
    /// a replica use these ports.
    pub port_base: u16,
    /// The administrator's URL, with the run's database.
    pub addresses: Addresses,
    /// MySQL's URL without the database's name at its end.
    mysql: String,
    /// The accounts of the daemons and the API servers.
    pub accounts: Accounts,
}

fn variable(name: &str) -> String {
    format!("TALLYD_STACK_{name}")
}

impl Stack {
    /// `name` is unique on each server.
    ///
    /// # Errors
    /// Fails if the environment lacks the output of `dev/up --print-env`.
    pub fn from_environment(name: &str) -> Result<Self> {
        let of = |name: &str| {
            let name = variable(name);
            std::env::var(&name).with_context(|| format!("{name} is not set: run dev/torture"))
        };
        let folder = PathBuf::from(of("DIR")?);
        let port_base = std::fs::read_to_string(folder.join("port-base"))?.trim().parse()?;
        let mysql = of("MYSQL_URL")?;
        let servers = Addresses { mysql: mysql.clone(), redis: of("REDIS_URL")?, amqp: of("AMQP_URL")? };
        let addresses = servers.with_database(name);
        Ok(Self { folder, port_base, addresses, mysql, accounts: Accounts::new(name, 0) })
    }

    /// Creates a database and accounts, and configures Redis to lose no data when it is killed.
    pub async fn prepare(&self, name: &str) -> Result<()> {
        self.mysql().await?.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await?;
        let admin = MySqlPool::connect(&self.addresses.mysql).await?;
        self.accounts.make_in_mysql(&admin).await;
        admin.close().await;
        self.accounts.make_in_redis(&text(name, Writes::default(), &self.addresses, "").parse()?);
        Accounts::make_in_rabbitmq();
        let mut redis = self.redis().await?;
        for (setting, value) in [("appendfsync", "always"), ("appendonly", "yes")] {
            let () = redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).query_async(&mut redis).await?;
        }
        Ok(())
    }

    /// Sends SIGKILL, and waits until the server has ended.
    pub async fn kill(&self, server: Server) -> Result<()> {
        self.script("dev/down", &["--kill", server.name()]).await.map(drop)
    }

    /// Sends SIGTERM, and waits until the server has ended.
    pub async fn stop(&self, server: Server) -> Result<()> {
        self.script("dev/down", &[server.name()]).await.map(drop)
    }

    /// Returns the path of the script that starts servers.
    pub fn up(&self) -> PathBuf {
        script("dev/up")
    }

    /// Starts all servers that are not running, and waits until they answer.
    pub async fn start(&self, servers: &[Server]) -> Result<()> {
        let names: Vec<&str> = servers.iter().map(|server| server.name()).collect();
        self.script("dev/up", &names).await.map(drop)
    }

    pub async fn signal(&self, server: Server, name: &str) -> Result<()> {
        signal(self.pid(server)?, name).await
    }

    pub fn pid(&self, server: Server) -> Result<u32> {
        let file = self.folder(server).join("pid");
        let pid = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        Ok(pid.trim().parse()?)
    }

    /// Returns the server's host and port.
    pub fn host_port(&self, server: Server) -> String {
        let url = match server {
            Server::Mysql => &self.addresses.mysql,
            Server::Redis => &self.addresses.redis,
            Server::Rabbitmq => &self.addresses.amqp,
            Server::Daemon => unreachable!("daemons are not part of the stack"),
        };
        let url = url::Url::parse(url).unwrap();
        format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())
    }

    /// Returns the folder with the server's data and logs.
    pub fn folder(&self, server: Server) -> PathBuf {
        self.folder.join(server.name())
    }

    /// Returns the clock of a server.
    pub fn clock(&self, server: Server) -> Clock {
        Clock::new(self.folder(server).join("clock"))
    }

    /// Returns the server's time in seconds since 1970.
    pub async fn clock_of(&self, server: Server) -> Result<i64> {
        if server == Server::Redis {
            let (seconds, _): (i64, i64) = redis::cmd("TIME").query_async(&mut self.redis().await?).await?;
            return Ok(seconds);
        }
        Ok(sqlx::query_scalar("SELECT CAST(UNIX_TIMESTAMP() AS SIGNED)").fetch_one(&mut self.mysql().await?).await?)
    }

    /// Returns the output of a command.
    pub async fn rabbitmqctl(&self, arguments: &[&str]) -> Result<String> {
        let output = self.script("dev/rabbitmqctl", arguments).await?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Connects as root, without selecting a database.
    pub async fn mysql(&self) -> Result<MySqlConnection> {
        let url = format!("{}mysql", self.mysql);
        Ok(tokio::time::timeout(CONNECT_MAX, MySqlConnection::connect(&url)).await??)
    }

    /// Connects with a daemon's account and rights.
    pub async fn rival(&self) -> Result<MySqlConnection> {
        let url = self.addresses.of(Who::Daemon, &self.accounts).mysql;
        Ok(tokio::time::timeout(CONNECT_MAX, MySqlConnection::connect(&url)).await??)
    }

    /// Locks the rows of `partition_owner` until the given time. Each batch writes to these rows before it writes other
    /// rows.
    pub async fn lock_partitions(&self, until: tokio::time::Instant) -> Result<()> {
        let mut connection = self.rival().await?;
        connection.execute("START TRANSACTION").await?;
        let locked = connection.execute("SELECT * FROM partition_owner WHERE `partition` < 256 FOR UPDATE").await;
        match locked {
            // Another fault stops a daemon inside its transaction, which holds the rows for as long.
            Err(error) if tallyd_testkit::is_number(&error, 1205) => return Ok(()),
            locked => locked.map(|_| ())?,
        }
        tokio::time::sleep_until(until).await;
        connection.execute("ROLLBACK").await?;
        Ok(())
    }

    pub async fn redis(&self) -> Result<redis::aio::MultiplexedConnection> {
        redis_at(&self.addresses.redis).await
    }

    /// Fails if Redis has rejected a command because of missing rights since its last start.
    pub async fn nobody_was_refused(&self) -> Result<()> {
        let mut log: Vec<HashMap<String, redis::Value>> =
            redis::cmd("ACL").arg("LOG").query_async(&mut self.redis().await?).await?;
        let of = |entry: &HashMap<String, redis::Value>, name: &str| -> Option<String> {
            redis::FromRedisValue::from_redis_value(entry.get(name)?.clone()).ok()
        };
        // Clients try these commands when they connect, and continue if Redis rejects them.
        log.retain(|entry| !["info", "client|setinfo"].map(Some).contains(&of(entry, "object").as_deref()));
        let refused: Vec<String> = log
            .iter()
            .map(|entry| ["username", "context", "reason", "object"].map(|name| of(entry, name).unwrap_or_default()))
            .map(|said| said.join(" "))
            .collect();
        if !refused.is_empty() {
            bail!("Redis rejected commands, because an account lacks a right: {}", refused.join("; "));
        }
        Ok(())
    }

    async fn script(&self, name: &str, arguments: &[&str]) -> Result<Output> {
        let output = Command::new(script(name))
            .env("TALLYD_STACK_REDIS_APPENDONLY", "yes")
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .await?;
        if !output.status.success() {
            bail!("{name} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(output)
    }
}

fn script(name: &str) -> PathBuf {
    tallyd_testkit::root().join(name)
}

/// Opens a connection whose calls have a long time limit.
pub async fn redis_at(url: &str) -> Result<redis::aio::MultiplexedConnection> {
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(5)))
        .set_response_timeout(Some(Duration::from_secs(10)));
    Ok(redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await?)
}

pub async fn signal(pid: u32, name: &str) -> Result<()> {
    let output = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).output().await?;
    if !output.status.success() {
        bail!("kill -{name} {pid}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
