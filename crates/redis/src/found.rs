//! A server that possibly belongs to a Redis Cluster. A client learns this from the server's first redirection, or from
//! INFO if its account may run it.
//!
//! A pipeline that gets a redirection runs again on the Cluster. Some of its commands then run twice: a click can count
//! twice for the user's limit. This happens only to the first pipelines, because afterwards the Cluster is known.
//! Callers send no other commands that do harm if they run twice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisResult, Value};

use super::cluster::Cluster;
use super::link::{Link, is_node};
use super::login::Login;
use crate::config::Redis;

pub(super) struct Found {
    one: Link,
    cluster: Cluster,
    is_cluster: AtomicBool,
}

impl Found {
    pub(super) fn new(config: &Redis, login: Login) -> RedisResult<Self> {
        let one = Link::new(login.clone(), false)?;
        Ok(Self { one, cluster: Cluster::new(config, login)?, is_cluster: AtomicBool::default() })
    }

    pub(super) async fn run(&self, pipeline: &Pipeline, time: Duration) -> RedisResult<Vec<RedisResult<Value>>> {
        if !self.is_cluster.load(Ordering::Relaxed) {
            match self.one.run(pipeline.clone(), time).await {
                Err(error) if is_node(&error) => self.is_cluster.store(true, Ordering::Relaxed),
                results => return results,
            }
        }
        self.cluster.run(pipeline).await
    }

    pub(super) async fn ask_all(&self, command: Cmd, time: Duration) -> RedisResult<Vec<Value>> {
        if !self.is_cluster.load(Ordering::Relaxed) {
            match self.one.ask(command.clone(), time).await {
                Err(error) if is_node(&error) => self.is_cluster.store(true, Ordering::Relaxed),
                answer => return answer.map(|answer| vec![answer]),
            }
        }
        self.cluster.ask_all(&command).await
    }
}
