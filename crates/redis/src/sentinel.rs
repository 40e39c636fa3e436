//! Redis Sentinel: finds the master. Sentinels are asked before each new connection, and every second while a
//! connection is used. After a failover, sentinels demote the old master only after about ten seconds. Everything that
//! is counted on the old master during these seconds is lost.
//!
//! All sentinels are asked at the same time. The client uses an address as soon as the majority has named this address.
//! So a single sentinel that is unreachable, disconnected or outdated can't decide alone (decision 0040). If there is
//! no majority, the client tries the most frequent address first. The server at this address must confirm that it is
//! the master. If the server's answer to ROLE is not `master`, the server was demoted, or has not been promoted yet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisConnectionInfo, RedisError, RedisResult, Value};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::error::{is_unknown_command, is_wrong_login};
use super::login::{Login, tls_fault};
use super::text;
use crate::config::Redis;

const ANSWER_MAX: Duration = Duration::from_secs(1);

/// The time within which all calls share one answer of the sentinels. While the master is unreachable, every call asks
/// the sentinels.
const ASKED_FOR: Duration = Duration::from_millis(50);

const MASTER: &str = "master";

struct Sentinel {
    login: Login,
    client: Client,
    connection: Mutex<Option<MultiplexedConnection>>,
}

pub(super) struct Sentinels {
    sentinels: Vec<Arc<Sentinel>>,
    name: String,
    login: Login,
    timeout: Duration,
    masters: Mutex<Option<(Instant, RedisResult<Masters>)>>,
}

#[derive(Clone, Debug)]
struct Masters {
    addresses: Vec<String>,
    by_most: bool,
}

impl Masters {
    fn have_left(&self, master: &str) -> bool {
        self.by_most && self.addresses.iter().all(|address| address != master)
    }
}

impl Sentinels {
    pub(super) fn new(config: &Redis, login: Login) -> RedisResult<Self> {
        let mut account = RedisConnectionInfo::default();
        if let Some(password) = &config.sentinel_password {
            account = account.set_password(password.expose());
        }
        let sentinel = |address: &String| {
            let login = login.at(address)?;
            let (client, connection) = (login.client_as(Some(account.clone()))?, Mutex::default());
            Ok(Arc::new(Sentinel { login, client, connection }))
        };
        let sentinels = config.sentinels.iter().map(sentinel).collect::<RedisResult<_>>()?;
        let (name, timeout) = (config.sentinel_master.clone(), login.timeout);
        Ok(Self { sentinels, name, login, timeout, masters: Mutex::default() })
    }

    pub(super) async fn connect(&self, config: &AsyncConnectionConfig) -> RedisResult<(MultiplexedConnection, String)> {
        let addresses = self.masters().await?.addresses;
        let mut failed = no_answer("no sentinel knows a master".to_owned());
        let time = self.timeout / u32::try_from(addresses.len()).unwrap_or(1).max(1);
        for address in addresses {
            let connected = tokio::time::timeout(time, self.connect_to(&address, config)).await;
            match connected.unwrap_or_else(|_| Err(no_answer(format!("the master {address} does not answer in time"))))
            {
                Ok(connection) => return Ok((connection, address)),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn connect_to(&self, address: &str, config: &AsyncConnectionConfig) -> RedisResult<MultiplexedConnection> {
        let login = self.login.at(address)?;
        let connected = login.client()?.get_multiplexed_async_connection_with_config(config).await;
        let mut connection = connected.map_err(|error| login.explain(error))?;
        // With TLS 1.3 a server refuses a client's certificate only after the handshake, with the first answer.
        let role =
            redis::cmd("ROLE").query_async::<Value>(&mut connection).await.map_err(|error| login.explain(error))?;
        let role = if let Value::Array(parts) = &role { parts.first().and_then(text) } else { None };
        match role {
            Some(MASTER) => Ok(connection),
            role => {
                let role = role.unwrap_or("unknown");
                Err(no_answer(format!(
                    "sentinels name {address} as the master {}, but the ROLE of that server is {role}",
                    self.name
                )))
            }
        }
    }

    /// Returns true if most sentinels name another master now. A minority of sentinels can be outdated, so a working
    /// link ignores the minority.
    pub(super) async fn have_left(&self, master: &str) -> bool {
        self.masters().await.is_ok_and(|masters| masters.have_left(master))
    }

    async fn masters(&self) -> RedisResult<Masters> {
        let mut last = self.masters.lock().await;
        if let Some((at, masters)) = last.as_ref()
            && at.elapsed() < ASKED_FOR
        {
            return masters.clone();
        }
        let masters = self.ask().await;
        *last = Some((Instant::now(), masters.clone()));
        masters
    }

    async fn ask(&self) -> RedisResult<Masters> {
        let mut asked = JoinSet::new();
        for sentinel in &self.sentinels {
            let (sentinel, name, time) = (Arc::clone(sentinel), self.name.clone(), ANSWER_MAX.min(self.timeout / 2));
            asked.spawn(async move { sentinel.ask(name, time).await });
        }
        let mut votes = Votes::new(self.sentinels.len());
        while let Some(answer) = asked.join_next().await {
            let answer = answer.unwrap_or_else(|_| Err(no_answer("a sentinel could not be asked".to_owned())));
            if let Some(masters) = votes.take(answer) {
                // The other tasks are not aborted, because an abort would close their connections. They end within
                // `time`.
                asked.detach_all();
                return Ok(masters);
            }
        }
        votes.count(&self.name)
    }
}

struct Votes {
    sentinels: usize,
    of: BTreeMap<String, usize>,
    unknown: usize,
    failed: Vec<RedisError>,
}

impl Votes {
    fn new(sentinels: usize) -> Self {
        Self { sentinels, of: BTreeMap::new(), unknown: 0, failed: Vec::new() }
    }

    /// Counts an answer. Returns the result as soon as most sentinels have named the same address.
    fn take(&mut self, answer: RedisResult<Option<String>>) -> Option<Masters> {
        match answer {
            Ok(Some(address)) => {
                let votes = self.of.entry(address.clone()).or_default();
                *votes += 1;
                (*votes * 2 > self.sentinels).then(|| Masters { addresses: vec![address], by_most: true })
            }
            Ok(None) => {
                self.unknown += 1;
                None
            }
            Err(error) => {
                self.failed.push(error);
                None
            }
        }
    }

    /// Call this function after all sentinels have answered or timed out. Returns the addresses that sentinels named as
    /// the master. The address that most sentinels named is first.
    fn count(self, name: &str) -> RedisResult<Masters> {
        if self.unknown == self.sentinels {
            let text = format!("no sentinel watches a master \"{name}\": fix [redis] sentinel_master");
            return Err(RedisError::from((ErrorKind::InvalidClientConfig, "read [redis] sentinel_master", text)));
        }
        if self.of.is_empty() {
            // A refusal is reported first, because it explains more than the error of an unreachable sentinel.
            let says_more = |error: &&RedisError| error.kind() != ErrorKind::Io || tls_fault(error).is_some();
            let refused = self.failed.iter().find(says_more).or(self.failed.first());
            return Err(refused.cloned().unwrap_or_else(|| no_answer("no sentinel answers".to_owned())));
        }
        let mut named: Vec<(String, usize)> = self.of.into_iter().collect();
        named.sort_by_key(|(_, votes)| std::cmp::Reverse(*votes));
        Ok(Masters { addresses: named.into_iter().map(|(address, _)| address).collect(), by_most: false })
    }
}

impl Sentinel {
    /// Asks the sentinel for the address of the master with this name. Returns `None` if the sentinel knows no such
    /// master.
    async fn ask(&self, name: String, time: Duration) -> RedisResult<Option<String>> {
        let mut shared = self.connection.lock().await;
        let asking = async {
            let mut connection = match shared.take() {
                Some(connection) => connection,
                None => {
                    let config = AsyncConnectionConfig::new().set_connection_timeout(Some(time));
                    self.client.get_multiplexed_async_connection_with_config(&config).await?
                }
            };
            let mut ask = redis::cmd("SENTINEL");
            ask.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
            let answer = ask.query_async::<Value>(&mut connection).await?;
            *shared = Some(connection);
            Ok(answer)
        };
        let answer = tokio::time::timeout(time, asking).await;
        match answer.unwrap_or_else(|_| Err(no_answer("it does not answer in time".to_owned()))) {
            Ok(answer) => Ok(address(&answer)),
            Err(error) => Err(of_sentinel(&self.login, error)),
        }
    }
}

pub(super) fn address(answer: &Value) -> Option<String> {
    let Value::Array(parts) = answer else { return None };
    let [host, port] = parts.as_slice() else { return None };
    let (host, port) = (text(host)?, text(port)?);
    Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
}

fn of_sentinel(sentinel: &Login, error: RedisError) -> RedisError {
    let error = sentinel.explain(error);
    if tls_fault(&error).is_some() {
        return error;
    }
    let detail = format!("{}: {error}", sentinel.address());
    if is_wrong_login(&error) {
        let what = "the sentinel expects another password, or it is not a sentinel: fix [redis] sentinel_password_file or sentinels";
        RedisError::from((ErrorKind::AuthenticationFailed, what, detail))
    } else if is_unknown_command(&error) {
        let what = "the server is not a sentinel: fix [redis] sentinels";
        RedisError::from((ErrorKind::InvalidClientConfig, what, detail))
    } else {
        RedisError::from((ErrorKind::Io, "a sentinel does not answer", detail))
    }
}

fn no_answer(text: String) -> RedisError {
    RedisError::from((ErrorKind::Io, "ask the sentinels for the master", text))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes the answers to [`Votes`] and returns the result.
    fn masters(sentinels: usize, answers: &[Option<&str>]) -> RedisResult<Masters> {
        let mut votes = Votes::new(sentinels);
        for answer in answers {
            if let Some(masters) = votes.take(Ok(answer.map(str::to_owned))) {
                return Ok(masters);
            }
        }
        votes.count("mymaster")
    }

    #[test]
    fn what_most_sentinels_say_is_taken_before_all_have_answered() {
        for answers in [vec![Some("a:1"), Some("a:1")], vec![Some("b:1"), Some("a:1"), Some("a:1")]] {
            let masters = masters(3, &answers).unwrap();
            assert_eq!(masters.addresses, ["a:1"]);
            assert!(masters.have_left("b:1") && !masters.have_left("a:1"));
        }
        assert_eq!(masters(1, &[Some("a:1")]).unwrap().addresses, ["a:1"]);
    }

    #[test]
    fn where_too_few_answer_what_was_said_most_often_comes_first_and_no_link_is_left() {
        assert_eq!(masters(5, &[Some("a:1"), Some("b:1"), Some("b:1")]).unwrap().addresses, ["b:1", "a:1"]);
        let one = masters(3, &[None, Some("b:1")]).unwrap();
        assert_eq!(one.addresses, ["b:1"]);
        assert!(!one.have_left("a:1"), "one sentinel alone decides nothing");
    }

    #[test]
    fn a_name_that_none_knows_is_a_mistake_and_silence_is_not() {
        assert_eq!(masters(2, &[None, None]).unwrap_err().kind(), ErrorKind::InvalidClientConfig);
        assert_eq!(masters(2, &[None]).unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn an_address_is_read_as_sentinels_give_it() {
        let answer = |host: &str| {
            let parts = [host, "6379"].map(|part| Value::BulkString(part.as_bytes().to_vec()));
            address(&Value::Array(parts.to_vec()))
        };
        assert_eq!(answer("10.0.0.1").as_deref(), Some("10.0.0.1:6379"));
        assert_eq!(answer("fd00::1").as_deref(), Some("[fd00::1]:6379"));
        assert_eq!(address(&Value::Nil), None);
    }
}
