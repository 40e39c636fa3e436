//! Users click while Redis becomes a replica, or restarts without data.

use tallyd_client::Source;
use tallyd_core::model::{Metric, UserId};

use crate::common::private::Private;
use crate::common::scripts::{Clicked, LikeError};
use crate::common::{Model, World, as_api, eventually, redis_likes, target};

async fn world_on(server: &Private, name: &str) -> World {
    let url = server.url();
    let settings = format!("[redis]\nurl = \"{url}\"\n[reconcile]\nwatch_every = \"1s\"\n");
    World::new(name, &as_api(&settings)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demoted_redis_counts_nothing_and_the_same_client_goes_on_after_its_promotion() {
    let server = Private::start(&[]).await;
    let world = world_on(&server, "readonly").await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let client = world.api_server();
    let mut model = Model::default();
    model.apply(&client.like(target(1), UserId(7), &[]).await.unwrap().counted().unwrap().event);

    let replica_of = async |arguments: [&str; 2]| {
        let () = redis::cmd("REPLICAOF").arg(&arguments).query_async(&mut server.connect().await).await.unwrap();
    };
    // The test makes Redis a replica of an address at which no server listens. So Redis keeps its data, but rejects
    // writes.
    replica_of(["127.0.0.1", "9"]).await;
    for user in [7, 8] {
        let failed = client.like(target(2), UserId(user), &[]).await;
        assert!(matches!(failed, Err(LikeError::NotCounted(_))), "{failed:?}");
    }
    assert_eq!(redis_likes(&client, &[target(1), target(2)]).await, [Some(1), Some(0)], "Redis must answer reads");
    replica_of(["NO", "ONE"]).await;
    let first = client.like(target(2), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert_eq!(first.count, Some(1), "a rejected click must not be counted");
    model.apply(&first.event);
    let publisher = world.publisher().await;
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_starts_again_with_nothing_is_never_shown_as_zero_and_remembers_through_mysql() {
    let mut server = Private::start(&[]).await;
    let world = world_on(&server, "restarted").await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let client = world.api_server();
    let mut model = Model::default();
    for user in 1..=5 {
        model.apply(&client.like(target(1), UserId(user), &[]).await.unwrap().counted().unwrap().event);
    }
    let publisher = world.publisher().await;
    world.drained(&publisher).await;
    server.restart().await;

    let click = async || loop {
        // After a failed call, the next call makes a new connection.
        if let Ok(clicked) = client.like(target(1), UserId(5), &[]).await {
            return clicked;
        }
    };
    assert!(matches!(click().await, Clicked::Same { .. }), "MySQL has the click that Redis has lost");
    model.apply(&client.like(target(1), UserId(6), &[]).await.unwrap().counted().unwrap().event);
    eventually("all counters are loaded again", || async {
        let numbers = client.read(&[target(1)]).await.unwrap();
        let likes = numbers[0].get(Metric(1));
        assert!(likes.is_none_or(|likes| likes.value > 0), "a lost number was shown as zero");
        likes.is_some_and(|likes| likes.source == Source::Redis)
    })
    .await;
    world.drained(&publisher).await;
    world.succeeds(&["reconcile"]).await;
    assert_eq!(redis_likes(&client, &[target(1)]).await, [Some(6)]);
    assert_eq!(world.counters().await, model.counters());
}
