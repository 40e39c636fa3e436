//! Tests the Bloom filters for likes that the daemon counts. API servers only publish these likes, so the filters get
//! the users and targets from the outbox.

use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_redis::keys::KindNames;

use super::{BY_HAND, assert_no_false_no, run, seed};
use crate::common;
use common::{World, body, target};

/// The daemon counts likes, so a run does not wait for `publish_grace`.
const NO_WAIT: &str = "[reconcile]\npublish_grace = \"1h\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn likes_that_are_only_published_come_into_the_filter() {
    let world = World::new("filters_daemon", &format!("{BY_HAND}{NO_WAIT}")).await;
    seed(&world, target(1), 1..=2_000).await;
    let publisher = world.publisher().await;
    let mut daemon = world.daemon();
    let mut users: Vec<u64> = (1..=2_000).collect();
    for round in 10..15 {
        let likes = |users: std::ops::Range<u64>| -> Vec<_> {
            let at = tallyd::runtime::clock::now();
            users.map(|user| body(&LikeEvent { target: target(1), user: UserId(user), at, liked: true })).collect()
        };
        let (first, second) = (1_000 * round..1_000 * round + 200, 1_000 * round + 200..1_000 * round + 300);
        let bodies = likes(first.clone());
        // Likes arrive in each round. Over all rounds, the filter is built, kept up to date, and rebuilt.
        if round == 12 {
            world.cache.drop_filters(&KindNames::new(&world.config.kinds), &[target(1)]).await.unwrap();
        }
        let ((), report) = tokio::join!(world.publish(&publisher, &bodies), run(&world));
        assert!(!report.stopped);
        if round % 2 == 0 {
            daemon.kill();
            daemon = world.daemon();
        }
        world.publish(&publisher, &likes(second.clone())).await;
        users.extend(first.chain(second));
        world.drained(&publisher).await;
        world.outbox_added().await;
        assert_eq!(world.counters().await[&target(1)], users.len() as i64);
        assert_no_false_no(&world, target(1), users.iter().copied()).await;
    }
    assert!(daemon.stop().success());
    world.close().await;
}
