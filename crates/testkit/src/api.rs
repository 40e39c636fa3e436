//! Clients of tallyd, as API servers use them.

use tallyd::config::Config;
use tallyd_client::{Client, Settings};

use super::World;

impl World {
    /// Makes the client of an API server in this world.
    pub fn client(&self) -> Client {
        client_of(&self.api)
    }
}

/// Makes the client of an API server with that configuration.
pub fn client_of(config: &Config) -> Client {
    Client::new(&Settings::from(config)).unwrap()
}
