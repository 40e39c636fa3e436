//! The clients and API servers of a world.

use std::time::Duration;

use tallyd_base::config::Config;
use tallyd_client::{ClickLimits, Client, Settings};
use tallyd_core::card::Card;
use tallyd_core::event::LikeEvent;

use super::World;
use super::scripts::{ApiServer, Clicked, Counted};

impl World {
    pub fn client(&self) -> Client {
        client_of(&self.api)
    }

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

/// Makes the client of an API server with that configuration. It knows the card that a daemon with this configuration
/// writes, so that a test needs no daemon.
pub fn client_of(config: &Config) -> Client {
    limited_client_of(config, ClickLimits::default())
}

pub fn limited_client_of(config: &Config, limits: ClickLimits) -> Client {
    Client::with_card(&Settings { limits, ..settings_of(config) }, &Card::from(config)).unwrap()
}

/// Makes a client whose lists of events wait for `group`.
pub fn grouping_client_of(config: &Config, group: Duration) -> Client {
    Client::with_card(&Settings { group, ..settings_of(config) }, &Card::from(config)).unwrap()
}

fn settings_of(config: &Config) -> Settings {
    let Config { amqp, mysql, redis, .. } = config.clone();
    Settings { amqp, mysql, redis, ..Settings::default() }
}

pub fn stranger_of(config: &Config) -> Client {
    let mut settings = Settings::default();
    settings.amqp.url = config.amqp.url.clone();
    settings.mysql.url = config.mysql.url.clone();
    settings.redis.url = config.redis.url.clone();
    settings.redis.key_prefix.clone_from(&config.redis.key_prefix);
    Client::new(&settings).unwrap()
}
