//! Clients of tallyd, as API servers use them.

use tallyd::config::Config;
use tallyd_client::{Clicked, Client, Counted, Settings};
use tallyd_core::event::LikeEvent;

use super::World;

impl World {
    /// Makes the client of an API server in this world.
    pub fn client(&self) -> Client {
        client_of(&self.api)
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
