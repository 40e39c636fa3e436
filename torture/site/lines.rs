//! A group of proxies: one proxy for each server. All users share one group of proxies, and each daemon has its own
//! group.

use super::settings::Addresses;
use super::stack::Server;
use crate::proxy::Proxy;

pub struct Lines {
    mysql: Proxy,
    redis: Proxy,
    rabbitmq: Proxy,
    /// Returns the addresses of the proxies, to be used instead of the servers' addresses.
    pub addresses: Addresses,
}

impl Lines {
    pub async fn before(servers: &Addresses) -> Self {
        let (mysql, mysql_url) = Proxy::before(&servers.mysql).await;
        let (redis, redis_url) = Proxy::before(&servers.redis).await;
        let (rabbitmq, amqp_url) = Proxy::before(&servers.amqp).await;
        let addresses = Addresses { mysql: mysql_url, redis: redis_url, amqp: amqp_url };
        Self { mysql, redis, rabbitmq, addresses }
    }

    /// Returns the proxy of a server.
    pub fn to(&self, server: Server) -> &Proxy {
        match server {
            Server::Mysql => &self.mysql,
            Server::Redis => &self.redis,
            Server::Rabbitmq => &self.rabbitmq,
            Server::Daemon => unreachable!("no proxy leads to a daemon"),
        }
    }
}
