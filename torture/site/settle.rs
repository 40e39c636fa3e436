//! Undoes all faults, and waits until nothing is in flight any more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use sqlx::{AssertSqlSafe, Executor};
use tallyd_core::fence::Depth;
use tallyd_rabbitmq::Broker;

use super::{PARTITIONS, Server, Site};

/// Between two checks.
const PAUSE: Duration = Duration::from_millis(200);

/// MySQL's limit of connections, as `dev/up` sets it.
pub const CONNECTIONS: u32 = 300;

/// How long to wait until root gets a free connection.
const ROOM_MAX: Duration = Duration::from_secs(30);

/// The broker reports the number of unacknowledged messages with a delay of some seconds.
const CALM: Duration = Duration::from_secs(6);

impl Site {
    /// Undoes all faults, then waits for four conditions: every server answers, daemons hold all partitions, the queues
    /// are empty, and Redis has all rows of the outbox.
    ///
    /// # Errors
    /// Fails at the deadline. The error names the condition that was still false.
    pub async fn settle(&self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let mut calm_since = None;
        let mut missing = match self.undo_all().await {
            Ok(()) => "nothing was checked".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        while Instant::now() < until {
            match self.missing().await {
                Ok(None) => {
                    let since = *calm_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= CALM {
                        match self.unacknowledged().await? {
                            0 => return Ok(()),
                            messages => {
                                (missing, calm_since) = (format!("{messages} messages are not acknowledged"), None);
                            }
                        }
                    }
                }
                Ok(Some(what)) => (missing, calm_since) = (what, None),
                Err(error) => (missing, calm_since) = (format!("{error:#}"), None),
            }
            tokio::time::sleep(PAUSE).await;
        }
        bail!("not settled after {deadline:?}: {missing}");
    }

    /// Undoes all faults. If a fault is already undone, undoing it again has no effect.
    async fn undo_all(&self) -> Result<()> {
        for server in Server::STACK {
            // If the process has ended, the error is ignored.
            let _ = self.stack.signal(server, "CONT").await;
            self.mend_lines(server);
        }
        for server in [Server::Mysql, Server::Redis] {
            self.stack.clock(server).step(0)?;
        }
        for daemon in &self.daemons {
            let _ = daemon.signal("CONT").await;
            daemon.clock.step(0)?;
        }
        self.stack.start(&Server::STACK).await?;
        self.reset_mysql().await?;
        self.reset_redis().await?;
        for daemon in &self.daemons {
            daemon.start().await;
        }
        Ok(())
    }

    /// Makes all proxies connect to their servers again, and transfer all data.
    pub fn mend_lines(&self, server: Server) {
        let address = self.stack.host_port(server);
        for proxy in self.all_lines(server) {
            proxy.lead(address.clone());
            proxy.clear();
        }
    }

    /// Makes MySQL accept writes and the usual number of connections again.
    ///
    /// # Errors
    /// Fails if MySQL doesn't answer, or if root gets no connection for a long time.
    pub async fn reset_mysql(&self) -> Result<()> {
        let until = Instant::now() + ROOM_MAX;
        let mut mysql = loop {
            match self.stack.mysql().await {
                // Other clients have taken all free connections, so the loop tries again until MySQL accepts a
                // connection.
                Err(_) if Instant::now() < until => tokio::time::sleep(PAUSE).await,
                tried => break tried?,
            }
        };
        mysql.execute("SET GLOBAL read_only = 0").await?;
        mysql.execute(AssertSqlSafe(format!("SET GLOBAL max_connections = {CONNECTIONS}"))).await?;
        Ok(())
    }

    /// Makes Redis a master, and removes Redis' memory limit.
    pub async fn reset_redis(&self) -> Result<()> {
        let mut redis = self.stack.redis().await?;
        let () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(0).query_async(&mut redis).await?;
        let () = redis::cmd("REPLICAOF").arg("NO").arg("ONE").query_async(&mut redis).await?;
        Ok(())
    }

    /// Returns the first reason why the site does not fully work yet. Returns `None` if the site fully works.
    async fn missing(&self) -> Result<Option<String>> {
        let owners: Vec<(u16, Option<String>)> =
            sqlx::query_as("SELECT `partition`, owner FROM partition_owner WHERE `partition` < 256")
                .fetch_all(self.pool())
                .await?;
        let pids = self.pids();
        let lives = |owner: &str| pids.iter().any(|pid| owner.ends_with(&format!(":{pid}")));
        let held = owners.iter().filter(|(_, owner)| owner.as_deref().is_some_and(lives)).count();
        if held != usize::from(PARTITIONS) {
            return Ok(Some(format!("running daemons hold {held} of {PARTITIONS} partitions: {owners:?}")));
        }
        if let Some(missing) = self.on_the_way().await? {
            return Ok(Some(missing));
        }
        let behind = self.outboxes_behind().await?;
        Ok((behind > 0).then(|| format!("the outboxes of {behind} partitions have rows that are not in Redis")))
    }

    /// Returns the number of partitions whose outbox has rows that are not in Redis.
    ///
    /// # Errors
    /// Fails if MySQL doesn't answer.
    pub async fn outboxes_behind(&self) -> Result<usize> {
        self.outboxes_before(&self.outbox_ends().await?).await
    }

    /// Returns the last row of each partition's outbox.
    ///
    /// # Errors
    /// Fails if MySQL doesn't answer.
    pub async fn outbox_ends(&self) -> Result<Vec<(u16, u64)>> {
        Ok(sqlx::query_as("SELECT `partition`, outbox FROM partition_owner").fetch_all(self.pool()).await?)
    }

    /// Returns the number of partitions of which Redis does not have these rows yet.
    ///
    /// # Errors
    /// Fails if MySQL doesn't answer.
    pub async fn outboxes_before(&self, ends: &[(u16, u64)]) -> Result<usize> {
        let sql = "SELECT `partition`, applied FROM outbox_state";
        let applied: Vec<(u16, u64)> = sqlx::query_as(sql).fetch_all(self.pool()).await?;
        let applied: BTreeMap<u16, u64> = applied.into_iter().collect();
        Ok(ends.iter().filter(|(partition, end)| applied.get(partition).copied().unwrap_or(0) < *end).count())
    }

    /// Returns the number of messages that are in queues or unacknowledged.
    async fn unacknowledged(&self) -> Result<u64> {
        let list = self.stack.rabbitmqctl(&["-q", "list_queues", "name", "messages", "--no-table-headers"]).await?;
        let of_ours = |line: &str| -> Option<u64> {
            let (name, messages) = line.split_once('\t')?;
            name.starts_with(&format!("{}.events.", self.name)).then(|| messages.trim().parse().ok())?
        };
        Ok(list.lines().filter_map(of_ours).sum())
    }

    /// Returns the number of messages that wait in queues.
    async fn on_the_way(&self) -> Result<Option<String>> {
        let broker = Broker::new(&self.admin_config().amqp)?;
        let link = broker.connect_publisher("torture").await?;
        for partition in 0..PARTITIONS {
            let queue = broker.queue(partition);
            match link.depth(&queue).await? {
                Depth::Unknown => return Ok(Some(format!("RabbitMQ does not say how many messages {queue} has"))),
                Depth::Known { consumers: 0, .. } => return Ok(Some(format!("no consumer on {queue}"))),
                Depth::Known { messages: 0, .. } => {}
                Depth::Known { messages, .. } => return Ok(Some(format!("{queue} has {messages} messages"))),
            }
        }
        Ok(None)
    }
}
