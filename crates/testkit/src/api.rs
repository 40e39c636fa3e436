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
    Client::new(&Settings::from(config)).unwrap()
}
