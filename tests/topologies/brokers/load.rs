//! Likes, unlikes and counts that go on through whatever happens to the broker.
//!
//! What was not confirmed is tried again until it is, as a user and a service would, so that the end is known exactly: of likes by the
//! newest event of each pair, of counts by their ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tallyd_client::{Client, Counted, LikeError};
use tallyd_core::chain::Chain;
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{TargetId, UserId};
use tallyd_rabbitmq::{Broker, Publisher};
use tokio::task::JoinSet;

use super::common::{Model, World, target};

/// How many videos there are.
pub const TARGETS: u64 = 200;

/// How many users click at once.
const USERS: u64 = 8;

/// Between two clicks of a user, and between two counts: some hundred events a second, and two processors left for three nodes that start.
const CLICK_EVERY: Duration = Duration::from_millis(40);
const COUNT_EVERY: Duration = Duration::from_millis(10);

/// Before something is tried again.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

pub struct Load {
    stop: Arc<AtomicBool>,
    progress: Arc<Progress>,
    users: JoinSet<Vec<LikeEvent>>,
    counts: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Progress {
    /// Clicks that were published.
    clicks: AtomicU64,
    /// How often a click had to be tried again.
    again: AtomicU64,
    /// What all counts that were published come to.
    counted: AtomicI64,
}

impl Load {
    pub fn start(world: &World) -> Self {
        let (stop, progress) = (Arc::<AtomicBool>::default(), Arc::<Progress>::default());
        let client = Arc::new(world.client());
        let mut users = JoinSet::new();
        for user in 0..USERS {
            users.spawn(click(user, Arc::clone(&client), Arc::clone(&stop), Arc::clone(&progress)));
        }
        let counts = tokio::spawn(count(world.broker.clone(), Arc::clone(&stop), Arc::clone(&progress)));
        Self { stop, progress, users, counts }
    }

    /// How many clicks and counts were published so far.
    pub fn published(&self) -> (u64, i64) {
        (self.progress.clicks.load(Ordering::Relaxed), self.progress.counted.load(Ordering::Relaxed))
    }

    /// Ends it: what must come out of the likes, what of the counts, and how often a click had to be tried again.
    pub async fn stop(self) -> (Model, i64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        let mut model = Model::default();
        self.users.join_all().await.into_iter().flatten().for_each(|event| model.apply(&event));
        self.counts.await.unwrap();
        (model, self.progress.counted.load(Ordering::Relaxed), self.progress.again.load(Ordering::Relaxed))
    }
}

/// One user after the other likes a video, and each fourth takes it back. All events that may have been published.
async fn click(first: u64, client: Arc<Client>, stop: Arc<AtomicBool>, progress: Arc<Progress>) -> Vec<LikeEvent> {
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
                        // The same as before is the last event once more.
                        events.extend(clicked.counted().map(|Counted { event, .. }| event));
                        break;
                    }
                    Err(LikeError::NotPublished { counted, .. }) => events.push(counted.event),
                    Err(LikeError::NotConfirmed { event, .. }) => events.push(event),
                    Err(LikeError::NotCounted(error)) => panic!("Redis is well: {}", Chain(&error)),
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

/// Counts views, each with an id of its own, under which it is published until that is confirmed.
async fn count(broker: Broker, stop: Arc<AtomicBool>, progress: Arc<Progress>) {
    let mut publisher: Option<Publisher> = None;
    for number in 0_u64.. {
        let (id, delta) = (1 + number % TARGETS, 1 + (number % 5).cast_signed());
        let event_id = format!("view-{number}");
        let body = encode_count(TargetId(id), ("video", "view"), delta, tallyd::runtime::clock::now(), &event_id, None);
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
