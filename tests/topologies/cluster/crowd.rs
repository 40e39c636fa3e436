//! Users who like one video after another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tallyd_core::model::UserId;
use tokio::task::JoinSet;

use super::common::{Model, event_of, target};
use crate::common::scripts::{ApiServer, Clicked, LikeError, OnBoard};

/// The number of videos.
pub const TARGETS: u64 = 200;

/// The result of a user's like.
pub type Liked = Result<Clicked, LikeError>;

/// Returns a model with all likes that did not fail.
pub fn model(liked: Vec<Liked>) -> Model {
    let mut model = Model::default();
    liked.into_iter().flatten().for_each(|clicked| model.apply(&event_of(clicked)));
    model
}

/// Eight concurrent users who like until the test stops them.
pub struct Crowd {
    stop: Arc<AtomicBool>,
    /// The number of likes that did not fail.
    counted: Arc<AtomicU64>,
    tasks: JoinSet<Vec<Liked>>,
}

impl Crowd {
    /// Starts the users. With `with_board`, each like also counts on the board `videos`.
    pub fn new(client: ApiServer, with_board: bool) -> Self {
        let (stop, counted) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (user, client, mut tasks) = (Arc::new(AtomicU64::new(1)), Arc::new(client), JoinSet::new());
        for _ in 0..8 {
            let (stop, counted) = (Arc::clone(&stop), Arc::clone(&counted));
            let (user, client) = (Arc::clone(&user), Arc::clone(&client));
            tasks.spawn(async move {
                let mut all = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let user = user.fetch_add(1, Ordering::Relaxed);
                    let video = (1 + user % TARGETS).to_string();
                    let on = [OnBoard { board: "videos", member: video.as_bytes() }];
                    let on = if with_board { &on[..] } else { &[] };
                    let liked = client.like(target(1 + user % TARGETS), UserId(user), on).await;
                    if liked.is_err() {
                        // After a failed like the user pauses, as real users do. The pause leaves CPU time for the
                        // other programs.
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    } else {
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                    all.push(liked);
                }
                all
            });
        }
        Self { stop, counted, tasks }
    }

    /// Returns the number of likes that did not fail so far.
    pub fn counted(&self) -> u64 {
        self.counted.load(Ordering::Relaxed)
    }

    /// Stops the users. Returns the results of all likes.
    pub async fn stop(self) -> Vec<Liked> {
        self.stop.store(true, Ordering::Relaxed);
        self.tasks.join_all().await.into_iter().flatten().collect()
    }
}
