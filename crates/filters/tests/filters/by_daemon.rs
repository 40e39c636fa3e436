//! Tests the Bloom filters for likes that the daemon counts. API servers only publish these likes, so the filters get
//! the users and targets from the outbox.

use tallyd_base::jobs::run::Ended;
use tallyd_base::runtime::clock;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_redis::keys::KindNames;

use super::{BY_HAND, assert_no_false_no, run, seed};
use crate::common;
use common::{World, body, eventually, target};

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
            let at = clock::now();
            users.map(|user| body(&LikeEvent { target: target(1), user: UserId(user), at, liked: true })).collect()
        };
        let (first, second) = (1_000 * round..1_000 * round + 200, 1_000 * round + 200..1_000 * round + 300);
        let bodies = likes(first.clone());
        // Likes arrive in each round. Over all rounds, the filter is built, kept up to date, and rebuilt.
        if round == 12 {
            world.cache.drop_filters(&KindNames::new(&world.config.kinds), &[target(1)]).await.unwrap();
        }
        let ((), report) = tokio::join!(world.publish(&publisher, &bodies), run(&world));
        assert!(report.head.ended == Ended::Done);
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
}

#[tokio::test(flavor = "multi_thread")]
async fn a_no_of_a_filter_counts_only_while_the_outbox_is_not_behind() {
    let world = World::new("filters_behind", &format!("{BY_HAND}{NO_WAIT}")).await;
    seed(&world, target(1), 1..=30).await;
    let publisher = world.publisher().await;
    run(&world).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let (gateway, client) = (world.gateway().await, world.client());
    let asked = async |user: u64| {
        let answer = gateway.get(&format!("/v1/likes?user={user}&kind=video&ids=1")).await.json();
        let like = &answer["likes"][0];
        (like["liked"].as_bool().unwrap(), like["source"].as_str().unwrap().to_owned())
    };
    assert_eq!(asked(7).await, (true, "mysql".to_owned()), "a filter never says yes");
    assert_eq!(asked(5_000_000).await, (false, "redis".to_owned()), "MySQL is not asked");
    assert!(world.tallyd(&["pause", "outbox", "--for", "10m", "--reason", "test"]).status.success());
    let like = |user| body(&LikeEvent { target: target(1), user: UserId(user), at: clock::now(), liked: true });
    eventually("the outbox is paused", || async {
        world.publish(&publisher, &[like(40)]).await;
        world.drained(&publisher).await;
        world
            .count("SELECT COUNT(*) FROM outbox WHERE number > (SELECT COALESCE(MAX(applied), 0) FROM outbox_state)")
            .await
            > 0
    })
    .await;
    // The filter lacks this user, who likes the target.
    eventually("readers ask MySQL", || async { asked(40).await == (true, "mysql".to_owned()) }).await;
    eventually("readers ask MySQL", || async { client.liked(UserId(40), &[target(1)]).await.unwrap() == [true] }).await;
    assert_eq!(asked(5_000_001).await, (false, "mysql".to_owned()));
    assert!(world.tallyd(&["resume", "outbox"]).status.success());
    world.outbox_added().await;
    eventually("readers ask the filter again", || async { asked(5_000_001).await == (false, "redis".to_owned()) })
        .await;
    assert_eq!(asked(40).await, (true, "mysql".to_owned()));
    assert!(gateway.process.stop().success());
}
