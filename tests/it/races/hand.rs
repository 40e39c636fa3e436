//! An operator changes `counter` by hand while the consumer writes the same row.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tokio::task::JoinSet;

use super::stage::{Stage, assert_numbers};
use crate::common::{event_of, eventually, target};

/// Users who like target 1 until the test stops them.
struct Crowd {
    stop: Arc<AtomicBool>,
    clicks: Arc<AtomicU64>,
    users: JoinSet<Vec<LikeEvent>>,
}

impl Crowd {
    fn new(stage: &Stage) -> Self {
        let client = Arc::new(stage.world.api_server());
        let mut crowd = Self { stop: Arc::default(), clicks: Arc::default(), users: JoinSet::new() };
        for clicker in 1..=4 {
            let (client, stop, clicks) = (Arc::clone(&client), Arc::clone(&crowd.stop), Arc::clone(&crowd.clicks));
            crowd.users.spawn(async move {
                let mut events = Vec::new();
                for user in clicker * 100_000.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    events.push(event_of(client.like(target(1), UserId(user), &[]).await.unwrap()));
                    clicks.fetch_add(1, Ordering::Relaxed);
                }
                events
            });
        }
        crowd
    }

    async fn clicked(&self, more: u64) {
        let until = self.clicks.load(Ordering::Relaxed) + more;
        eventually("users click", || async { self.clicks.load(Ordering::Relaxed) >= until }).await;
    }

    async fn go(mut self) -> Vec<LikeEvent> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        while let Some(events) = self.users.join_next().await {
            all.extend(events.unwrap());
        }
        all
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_counter_changed_by_hand_under_load_gets_exactly_the_difference_back() {
    let mut stage = Stage::new("hand", "").await;
    let crowd = Crowd::new(&stage);
    crowd.clicked(50).await;
    let changed = sqlx::query("UPDATE counter SET value = value + 7 WHERE target_id = 1")
        .execute(&stage.world.pool)
        .await
        .unwrap();
    assert_eq!(changed.rows_affected(), 1);
    let run = stage.paused(&["--full"], &["reconcile:correcting"]).await;
    // At this point the run has read the difference but has not corrected it.
    let rows = "SELECT COUNT(*) FROM like_record WHERE target_id = 1";
    let before = stage.world.count(rows).await;
    crowd.clicked(100).await;
    eventually("the row is written", || async { stage.world.count(rows).await >= before + 50 }).await;
    let report = run.report().await;
    assert_numbers(&report, &[("counters_off", 1), ("drifted", 0), ("repaired", 0)]);
    for event in crowd.go().await {
        stage.model.apply(&event);
    }
    assert_eq!(stage.repairs().await, [(1, "mysql".to_owned(), -7, Some("done".to_owned()))]);
    stage.close().await;
}
