//! Sends confirmed likes to Redis. One round trip can contain the likes of several requests. A separate round trip for
//! each request would cost the gateway and Redis more time than the likes themselves.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::hints::Hints;
use tallyd_client::Client;
use tallyd_core::event::LikeEvent;

/// Length of the queue. Further requests wait for a place in the queue.
const REQUESTS_MAX: usize = 1_024;

/// If a round trip contains at least this number of likes, the gateway adds no further request to the round trip.
const LIKES_AT_ONCE: usize = 1_000;

/// The likes of a request. The request waits until `done` is dropped.
struct Request {
    likes: Vec<LikeEvent>,
    done: oneshot::Sender<()>,
}

pub(super) struct Remembered(mpsc::Sender<Request>);

impl Remembered {
    /// Starts the task that sends likes to Redis. The task ends when `Remembered` is dropped.
    pub(super) fn by(client: Arc<Client>, hints: Arc<Hints>) -> Self {
        let (sender, requests) = mpsc::channel(REQUESTS_MAX);
        tokio::spawn(remember(client, hints, requests));
        Self(sender)
    }

    /// Waits until Redis has the likes. If Redis does not answer, the gateway skips Redis and the wait ends.
    pub(super) async fn add(&self, likes: Vec<LikeEvent>) {
        let (done, ended) = oneshot::channel();
        if self.0.send(Request { likes, done }).await.is_ok() {
            // The task sends no value and only drops the sender, so the result is always an error.
            let _ = ended.await;
        }
    }
}

async fn remember(client: Arc<Client>, hints: Arc<Hints>, mut requests: mpsc::Receiver<Request>) {
    while let Some(Request { mut likes, done }) = requests.recv().await {
        let mut waiting = vec![done];
        while likes.len() < LIKES_AT_ONCE
            && let Ok(request) = requests.try_recv()
        {
            likes.extend(request.likes);
            waiting.push(request.done);
        }
        hints.ask(client.remember_published(&likes)).await;
        drop(waiting);
    }
}
