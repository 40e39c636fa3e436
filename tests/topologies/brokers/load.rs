//! A load of likes, unlikes and counts, which continues during all faults of the broker.
//!
//! Users and services retry a call until the broker confirms it, and so does this load. So the test knows the exact
//! result. For likes, the result is the newest event per user and target. For counts, the result is the sum of all
//! events with different ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tallyd_core::chain::Chain;
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{TargetId, UserId};
use tallyd_rabbitmq::{Broker, Publisher};
use tokio::task::JoinSet;

use super::common::{Model, World, event_of, target};
use crate::common::scripts::{ApiServer, LikeError};

/// The number of videos.
pub const TARGETS: u64 = 200;

/// The number of concurrent users.
const USERS: u64 = 8;

/// The pauses between two clicks of a user, and between two counts. The load has only a few hundred events per second,
/// so that three nodes can start at the same time on two processors.
const CLICK_EVERY: Duration = Duration::from_millis(40);
const COUNT_EVERY: Duration = Duration::from_millis(10);

/// The pause before a retry.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

pub struct Load {
    stop: Arc<AtomicBool>,
    progress: Arc<Progress>,
    users: JoinSet<Vec<LikeEvent>>,
    counts: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Progress {
    /// The number of published clicks.
    clicks: AtomicU64,
    /// The number of retried clicks.
    again: AtomicU64,
    /// The sum of all published counts.
    counted: AtomicI64,
}

impl Load {
    pub fn start(world: &World) -> Self {
        let (stop, progress) = (Arc::<AtomicBool>::default(), Arc::<Progress>::default());
        let client = Arc::new(world.api_server());
        let mut users = JoinSet::new();
        for user in 0..USERS {
            users.spawn(click(user, Arc::clone(&client), Arc::clone(&stop), Arc::clone(&progress)));
        }
        // A user does not wait as long as a test does.
        let broker = Broker::new(&world.api.amqp).unwrap();
        let counts = tokio::spawn(count(broker, Arc::clone(&stop), Arc::clone(&progress)));
        Self { stop, progress, users, counts }
    }

    /// Returns the number of clicks and the sum of the counts that were published so far.
    pub fn published(&self) -> (u64, i64) {
        (self.progress.clicks.load(Ordering::Relaxed), self.progress.counted.load(Ordering::Relaxed))
    }

    /// Stops the load. Returns the expected likes, the expected sum of the counts, and the number of retried clicks.
    pub async fn stop(self) -> (Model, i64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        let mut model = Model::default();
        self.users.join_all().await.into_iter().flatten().for_each(|event| model.apply(&event));
        self.counts.await.unwrap();
        (model, self.progress.counted.load(Ordering::Relaxed), self.progress.again.load(Ordering::Relaxed))
    }
}

/// One user after another likes a video, and every fourth user then unlikes it. Returns all events that the broker may
/// have received.
async fn click(first: u64, client: Arc<ApiServer>, stop: Arc<AtomicBool>, progress: Arc<Progress>) -> Vec<LikeEvent> {
    let mut events = Vec::new();
    for turn in 0.. {
        let user = UserId(1 + first + turn * USERS);
        let likes = if turn % 4 == 3 { &[true, false][..] } else { &[true] };
        for likes in likes {
            loop {
                let video = target(1 + user.0 % TARGETS);
                let clicked = match likes {
                    true => client.like(video, user, &[]).await,
                    false => client.unlike(video, user, &[]).await,
                };
                match clicked {
                    Ok(clicked) => {
                        events.push(event_of(clicked));
                        break;
                    }
                    Err(LikeError::NotConfirmed { event, .. }) => events.push(event),
                    Err(error) => panic!("{}", Chain(&error)),
                }
                progress.again.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(AGAIN_AFTER).await;
            }
            progress.clicks.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(CLICK_EVERY).await;
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    events
}

/// Counts views. Each `count` event has an id, and is published again with the same id until the broker confirms it.
async fn count(broker: Broker, stop: Arc<AtomicBool>, progress: Arc<Progress>) {
    let mut publisher: Option<Publisher> = None;
    for number in 0_u64.. {
        let (id, delta) = (1 + number % TARGETS, 1 + (number % 5).cast_signed());
        let event_id = format!("view-{number}");
        let body =
            encode_count(TargetId(id), ("video", "view"), delta, tallyd_base::runtime::clock::now(), &event_id, None);
        loop {
            let open = match publisher.take() {
                Some(open) => Ok(open),
                None => broker.connect_publisher("test").await,
            };
            if let Ok(open) = open
                && open.publish(&broker.exchange(), &number.to_string(), &body).await.is_ok()
            {
                publisher = Some(open);
                break;
            }
            tokio::time::sleep(AGAIN_AFTER).await;
        }
        progress.counted.fetch_add(delta, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) {
            break;
        }
        tokio::time::sleep(COUNT_EVERY).await;
    }
}
