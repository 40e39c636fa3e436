//! The clients and API servers of a world.

use tallyd::config::Config;
use tallyd_client::{Client, Settings};
use tallyd_core::event::LikeEvent;

use super::World;
use super::scripts::{ApiServer, Clicked, Counted};

impl World {
    /// Makes the client of an API server in this world. It only publishes and reads.
    pub fn client(&self) -> Client {
        client_of(&self.api)
    }

    /// Makes an API server of this world. Numbers whose rule says `writer = "api"` it counts in Redis itself.
    pub fn api_server(&self) -> ApiServer {
        ApiServer::new(&self.api)
    }
}

/// Returns the event of a click. The click must not be one that changes nothing.
#[track_caller]
pub fn event_of(clicked: Clicked) -> LikeEvent {
    match clicked {
        Clicked::Published(event) | Clicked::Counted(Counted { event, .. }) => event,
        other => panic!("the click has no new event: {other:?}"),
    }
}

/// Makes the client of an API server with that configuration.
pub fn client_of(config: &Config) -> Client {
    Client::new(&Settings::from(config)).unwrap()
}
