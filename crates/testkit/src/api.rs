//! A world's API servers.

use tallyd::config::Config;
use tallyd_client::{Client, Settings};

use super::World;

impl World {
    /// An API server.
    pub fn client(&self) -> Client {
        client_of(&self.api)
    }
}

/// An API server of that configuration.
pub fn client_of(config: &Config) -> Client {
    Client::new(&settings(config)).unwrap()
}

/// What an API server must know of a configuration.
fn settings(config: &Config) -> Settings {
    let config = config.clone();
    Settings {
        has_filters: config.filter.is_on(),
        amqp: config.amqp,
        mysql: config.mysql,
        redis: config.redis,
        kinds: config.kinds,
        metrics: config.metrics,
        boards: config.boards,
        rules: config.rules,
        limits: config.client,
    }
}
