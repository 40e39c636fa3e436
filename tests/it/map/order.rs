//! Users like and unlike within one second, while daemons crash and messages are redelivered.

use super::{Site, event, now_ms};
use crate::common::{eventually, stderr};
use tallyd_core::fence::Depth;

#[tokio::test(flavor = "multi_thread")]
async fn events_of_one_second_end_in_the_queues_order_after_crashes() {
    let site = Site::new("map_order", "s").await;
    let daemon = site.daemon().await;
    assert!(daemon.stop().success());
    let now = now_ms() / 1_000;
    // The last event of user 1 is an unlike, and that of user 2 is a like. User 3's latest event is from a later
    // second, but it is published before the user's other events.
    for (action, user, ts) in [
        ("LIKE", 1, now),
        ("LIKE", 3, now),
        ("UNLIKE", 1, now),
        ("UNLIKE", 2, now),
        ("UNLIKE", 3, now - 1),
        ("LIKE", 1, now),
        ("LIKE", 2, now),
        ("UNLIKE", 1, now),
    ] {
        site.publish(&event(action, 42, user, ts)).await;
    }
    // Each daemon crashes after it has committed at most one batch, and before it acknowledges any batch.
    for point in ["consumer:after-commit", "consumer:before-commit", "consumer:after-commit"] {
        let output = site.world.command().env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&output).contains("fault-point"), "{}", stderr(&output));
    }
    let liked = "SELECT COUNT(*) FROM like_record WHERE is_del = 0 AND user_id IN (2, 3)";
    let unliked = "SELECT COUNT(*) FROM like_record WHERE is_del = 1 AND user_id = 1";
    let daemon = site.world.daemon();
    // For a moment, the broker can still count the consumer of a crashed daemon, so the test waits.
    eventually("the daemon consumes", || async { daemon.log().matches("\"consuming\"").count() == 2 }).await;
    eventually("the queue is empty", || async {
        site.link.depth(&site.queue()).await.unwrap() == Depth::Known { messages: 0, consumers: 1 }
    })
    .await;
    assert!(daemon.stop().success());
    assert_eq!((site.world.count(liked).await, site.world.count(unliked).await), (2, 1));
    let counted = "SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE target_id = 42 AND metric = 1";
    assert_eq!(site.world.count(counted).await, 2);
    site.close().await;
}
