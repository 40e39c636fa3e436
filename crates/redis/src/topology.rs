//! Finds out whether an unknown Redis is one server, a node of a Redis Cluster, or a sentinel. For `tallyd init`.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo};
use tallyd_connect::fate::Fate;

use super::error::CacheError;
use super::login::Login;
use super::{Context, Result};
use crate::config::Redis;

const ACTION: &str = "find out the kind of Redis";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    #[default]
    Single,
    Cluster(Vec<String>),
    Sentinel(Vec<Watched>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    pub name: String,
    pub master: String,
    pub replicas: Vec<String>,
    pub sentinels: Vec<String>,
}

impl Topology {
    pub async fn find(config: &Redis) -> Result<Self> {
        let mut connection = connect(config).await?;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await.context(ACTION)?;
        // The line is called redis_mode in Redis, and server_mode in Valkey.
        let mode = info.lines().find_map(|line| line.split_once("_mode:")).map_or("", |(_, mode)| mode.trim());
        Ok(match mode {
            "cluster" => {
                let nodes: String =
                    redis::cmd("CLUSTER").arg("NODES").query_async(&mut connection).await.context(ACTION)?;
                Self::Cluster(nodes.lines().filter_map(node).collect())
            }
            "sentinel" => Self::Sentinel(watched(&mut connection).await?),
            _ => Self::Single,
        })
    }
}

/// Connects with the account in the URL. If the server refuses this account, the call tries the sentinels' account. If
/// the server refuses both accounts, the call connects without an account.
async fn connect(config: &Redis) -> Result<MultiplexedConnection> {
    let timeout = Duration::from_millis(config.timeout_ms);
    let login = Login::new(config, timeout);
    let of_sentinels = config.sentinel_password.as_ref();
    let mut accounts = vec![None];
    accounts.extend(of_sentinels.map(|it| Some(RedisConnectionInfo::default().set_password(it.expose()))));
    accounts.push(Some(RedisConnectionInfo::default()));
    let settings =
        AsyncConnectionConfig::new().set_connection_timeout(Some(timeout)).set_response_timeout(Some(timeout));
    let mut refused = None;
    for account in accounts {
        let client = login.client_as(account).context(ACTION)?;
        let asked = async {
            let mut connection = client.get_multiplexed_async_connection_with_config(&settings).await?;
            redis::cmd("INFO").arg("server").exec_async(&mut connection).await?;
            Ok(connection)
        };
        match asked.await.map_err(|error| login.explain(error)).context(ACTION) {
            Ok(connection) => return Ok(connection),
            Err(error) if error.fate() == Fate::Refused => drop(refused.get_or_insert(error)),
            Err(error) => return Err(error),
        }
    }
    Err(refused.unwrap_or_else(|| CacheError::wrong(ACTION, "no account fits".to_owned())))
}

/// Returns the `host:port` in a line of CLUSTER NODES. Returns `None` for a node that has failed or is not known yet.
fn node(line: &str) -> Option<String> {
    let mut words = line.split(' ').skip(1);
    let (address, flags) = (words.next()?, words.next()?);
    let is_there = !flags.split(',').any(|flag| matches!(flag, "fail" | "noaddr" | "handshake"));
    let address = address.split(['@', ',']).next().filter(|address| !address.starts_with(':'))?;
    is_there.then(|| address.to_owned())
}

async fn watched(connection: &mut MultiplexedConnection) -> Result<Vec<Watched>> {
    let mut all = Vec::new();
    for master in ask(connection, "MASTERS", None).await? {
        let name = master.get("name").cloned().unwrap_or_default();
        let [replicas, sentinels] =
            [ask(connection, "REPLICAS", Some(&name)).await?, ask(connection, "SENTINELS", Some(&name)).await?]
                .map(|found| found.iter().filter_map(address).collect());
        all.extend(address(&master).map(|master| Watched { name, master, replicas, sentinels }));
    }
    Ok(all)
}

async fn ask(
    connection: &mut MultiplexedConnection,
    what: &str,
    name: Option<&str>,
) -> Result<Vec<HashMap<String, String>>> {
    redis::cmd("SENTINEL").arg(what).arg(name).query_async(connection).await.context(ACTION)
}

fn address(fields: &HashMap<String, String>) -> Option<String> {
    let (host, port) = (fields.get("ip")?, fields.get("port")?);
    Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_read_with_its_address_unless_it_is_away() {
        for (line, expected) in [
            ("07c3 127.0.0.1:30004@31004,host4 slave e7d1 0 1426238317239 4 connected", Some("127.0.0.1:30004")),
            ("67ed 10.0.0.2:6379@16379 myself,master - 0 0 2 connected 5461-10922", Some("10.0.0.2:6379")),
            ("292f 127.0.0.1:30003@31003 master,fail - 0 1426238318243 3 connected", None),
            ("6ec2 :0@0 master,noaddr - 0 0 3 disconnected", None),
            ("", None),
        ] {
            assert_eq!(node(line).as_deref(), expected, "{line}");
        }
    }
}
