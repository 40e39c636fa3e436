//! The servers of `dev/up`, which are this run's own: started, killed and frozen.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};
use tokio::process::Command;

use super::settings::{Addresses, of_its_own};

/// How long a server may take to answer a fault.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// What a fault is done to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Server {
    Daemon,
    Mysql,
    Redis,
    Rabbitmq,
}

impl Server {
    /// Those that are servers of the stack.
    pub const STACK: [Self; 3] = [Self::Mysql, Self::Redis, Self::Rabbitmq];

    /// As in `dev/up`.
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
    /// The first of its ports; those from 10 on are free for others of the run.
    pub port_base: u16,
    /// Of accounts that may do all; MySQL's up to the database's name.
    pub addresses: Addresses,
}

impl Stack {
    /// # Errors
    /// The environment lacks what `dev/up --print-env` prints.
    pub fn from_environment() -> Result<Self> {
        let of = |name: &str| {
            let name = format!("TALLYD_STACK_{name}");
            std::env::var(&name).with_context(|| format!("{name} is not set: run dev/torture"))
        };
        let folder = PathBuf::from(of("DIR")?);
        let port_base = std::fs::read_to_string(folder.join("port-base"))?.trim().parse()?;
        let addresses = Addresses { mysql: of("MYSQL_URL")?, redis: of("REDIS_URL")?, amqp: of("AMQP_URL")? };
        Ok(Self { folder, port_base, addresses })
    }

    /// A database with an account for it that has no other rights, and a Redis that has lost nothing when it is killed.
    ///
    /// # Errors
    /// A server refuses it.
    pub async fn prepare(&self, name: &str) -> Result<()> {
        let mut mysql = self.mysql().await?;
        for sql in [
            format!("CREATE DATABASE {name}"),
            format!("CREATE USER '{name}'@'%' IDENTIFIED BY '{name}'"),
            format!("GRANT ALL ON {name}.* TO '{name}'@'%'"),
        ] {
            mysql.execute(AssertSqlSafe(sql)).await?;
        }
        let mut redis = self.redis().await?;
        for (setting, value) in [("appendfsync", "always"), ("appendonly", "yes")] {
            let () = redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).query_async(&mut redis).await?;
        }
        Ok(())
    }

    /// SIGKILL, and waits for its end.
    ///
    /// # Errors
    /// It could not be done.
    pub async fn kill(&self, server: Server) -> Result<()> {
        self.script("dev/down", &["--kill", server.name()]).await.map(drop)
    }

    /// SIGTERM, and waits for its end.
    ///
    /// # Errors
    /// It could not be done.
    pub async fn stop(&self, server: Server) -> Result<()> {
        self.script("dev/down", &[server.name()]).await.map(drop)
    }

    /// The script that starts servers.
    pub fn up(&self) -> PathBuf {
        script("dev/up")
    }

    /// Starts what doesn't run, and waits until it answers.
    ///
    /// # Errors
    /// It doesn't start.
    pub async fn start(&self, servers: &[Server]) -> Result<()> {
        let names: Vec<&str> = servers.iter().map(|server| server.name()).collect();
        self.script("dev/up", &names).await.map(drop)
    }

    /// # Errors
    /// There is no such process.
    pub async fn signal(&self, server: Server, name: &str) -> Result<()> {
        signal(self.pid(server)?, name).await
    }

    /// # Errors
    /// It was never started.
    pub fn pid(&self, server: Server) -> Result<u32> {
        let file = self.folder(server).join("pid");
        let pid = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        Ok(pid.trim().parse()?)
    }

    /// Where it listens.
    pub fn host_port(&self, server: Server) -> String {
        let url = match server {
            Server::Mysql => &self.addresses.mysql,
            Server::Redis => &self.addresses.redis,
            Server::Rabbitmq => &self.addresses.amqp,
            Server::Daemon => unreachable!("daemons are not of the stack"),
        };
        let url = url::Url::parse(url).unwrap();
        format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())
    }

    /// With its data and logs.
    pub fn folder(&self, server: Server) -> PathBuf {
        self.folder.join(server.name())
    }

    /// What it prints.
    ///
    /// # Errors
    /// It fails.
    pub async fn rabbitmqctl(&self, arguments: &[&str]) -> Result<String> {
        let output = self.script("dev/rabbitmqctl", arguments).await?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// As root, past the database.
    ///
    /// # Errors
    /// It doesn't answer.
    pub async fn mysql(&self) -> Result<MySqlConnection> {
        let url = format!("{}mysql", self.addresses.mysql);
        Ok(tokio::time::timeout(CONNECT_MAX, MySqlConnection::connect(&url)).await??)
    }

    /// As the run's account, which is refused what others are refused.
    ///
    /// # Errors
    /// It doesn't answer, or takes no more connections.
    pub async fn rival(&self, name: &str) -> Result<MySqlConnection> {
        let url = of_its_own(&self.addresses, name).mysql;
        Ok(tokio::time::timeout(CONNECT_MAX, MySqlConnection::connect(&url)).await??)
    }

    /// Holds the rows that each batch writes first, until then.
    ///
    /// # Errors
    /// MySQL doesn't answer.
    pub async fn lock_partitions(&self, name: &str, until: tokio::time::Instant) -> Result<()> {
        let mut connection = self.rival(name).await?;
        connection.execute("START TRANSACTION").await?;
        connection.execute("SELECT * FROM partition_owner WHERE `partition` < 256 FOR UPDATE").await?;
        tokio::time::sleep_until(until).await;
        connection.execute("ROLLBACK").await?;
        Ok(())
    }

    /// # Errors
    /// It doesn't answer.
    pub async fn redis(&self) -> Result<redis::aio::MultiplexedConnection> {
        redis_at(&self.addresses.redis).await
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
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// A connection whose calls may take a while.
///
/// # Errors
/// Nobody answers there.
pub async fn redis_at(url: &str) -> Result<redis::aio::MultiplexedConnection> {
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(5)))
        .set_response_timeout(Some(Duration::from_secs(10)));
    Ok(redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await?)
}

/// # Errors
/// There is no such process.
pub async fn signal(pid: u32, name: &str) -> Result<()> {
    let output = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).output().await?;
    if !output.status.success() {
        bail!("kill -{name} {pid}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
