//! Simulates users who like and unlike until a test stops them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tallyd_base::config::ServerUrl;
use tallyd_core::model::{Target, UserId};
use tokio::task::JoinHandle;

use super::proxy::Proxy;
use super::scripts::{Clicked, LikeError, OnBoard};
use super::{ApiServer, Dice, Model, World, event_of, eventually, target};

#[derive(Clone, Copy)]
pub struct Clicker {
    pub number: u64,
    pub users: u64,
    /// The number of popular targets. The ids of popular targets begin at 1. These targets get half of the clicks, so
    /// the same user likes and unlikes the same target many times a second.
    pub hot: u64,
    /// The number of other targets. The ids of these targets begin at 100. These targets get the other half of the
    /// clicks.
    pub cold: u64,
}

impl Clicker {
    pub async fn click(self, server: Arc<ApiServer>, stop: Arc<AtomicBool>, clicks: Arc<AtomicU64>) -> Model {
        let mut dice = Dice::of_run(self.number + 1);
        let mut model = Model::default();
        let mut likes: HashMap<(Target, UserId), bool> = HashMap::new();
        while !stop.load(Ordering::Relaxed) {
            let user = UserId(1 + self.number * self.users + dice.below(self.users));
            let is_hot = dice.percent(50);
            let target = if is_hot { target(1 + dice.below(self.hot)) } else { target(100 + dice.below(self.cold)) };
            let liked = likes.entry((target, user)).or_default();
            *liked = !*liked;
            let clicked =
                if *liked { server.like(target, user, &[]).await } else { server.unlike(target, user, &[]).await };
            model.apply(&event_of(clicked.unwrap()));
            clicks.fetch_add(1, Ordering::Relaxed);
        }
        model
    }
}

/// Makes user 7 like target 42. The event does not reach the broker until the caller releases the proxy.
pub async fn held_like(
    world: &World,
    boards: &'static [OnBoard<'static>],
) -> (Proxy, JoinHandle<Result<Clicked, LikeError>>) {
    let (proxy, url) = Proxy::before(world.api.amqp.url.expose()).await;
    let mut config = world.api.clone();
    config.amqp.url = ServerUrl::from(url.as_str());
    let server = ApiServer::new(&config);
    proxy.hold_from(b"target_id");
    let click = tokio::spawn(async move { server.like(target(42), UserId(7), boards).await });
    eventually("the event is in flight", || async { proxy.holds() }).await;
    (proxy, click)
}
