//! Likes and unlikes within one second, with crashes and redeliveries.

use super::{Site, event, now_ms};
use crate::common::{eventually, stderr};

#[tokio::test(flavor = "multi_thread")]
async fn events_of_one_second_end_in_the_queues_order_after_crashes() {
    let site = Site::new("map_order", "s").await;
    let daemon = site.world.daemon();
    eventually("the queue is bound", || async { daemon.log().matches("\"consuming\"").count() == 2 }).await;
    assert!(daemon.stop().success());
    let now = now_ms() / 1_000;
    // User 1's last event is an unlike, and user 2's last event is a like. The last event of user 3 is from a later
    // second, but it is published first.
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
    // Each daemon commits at most one batch and acknowledges none.
    for point in ["consumer:after-commit", "consumer:before-commit", "consumer:after-commit"] {
        let output = site.world.command().env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&output).contains("fault-point"), "{}", stderr(&output));
    }
    let liked = "SELECT COUNT(*) FROM like_record WHERE is_del = 0 AND user_id IN (2, 3)";
    let unliked = "SELECT COUNT(*) FROM like_record WHERE is_del = 1 AND user_id = 1";
    let daemon = site.world.daemon();
    // The broker can still count the consumer of a crashed daemon.
    eventually("it listens", || async { daemon.log().matches("\"consuming\"").count() == 2 }).await;
    eventually("the queue is empty", || async {
        let depth = site.link.depth(&site.queue()).await.unwrap();
        depth.messages == 0 && depth.consumers == 1
    })
    .await;
    assert!(daemon.stop().success());
    assert_eq!((site.world.count(liked).await, site.world.count(unliked).await), (2, 1));
    let counted = "SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE target_id = 42 AND metric = 1";
    assert_eq!(site.world.count(counted).await, 2);
    site.close().await;
}
