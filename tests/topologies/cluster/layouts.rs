//! Clients read the layout from the site card. Counters migrate to a layout with more buckets. Most targets then have their bucket on another node than before.

use tallyd_core::model::{Metric, UserId};

use super::Stage;
use super::common::{client_of, eventually, redis_likes, stderr, stranger_of, target};
use super::crowd::{Crowd, TARGETS, model};

#[tokio::test(flavor = "multi_thread")]
async fn counters_move_to_more_buckets_on_other_nodes_while_likes_go_on() {
    let settings =
        "[redis.also]\nbucket_bits = 7\n[reconcile]\nclock_skew_max = \"100ms\"\nrepair_targets_max_percent = 100\n";
    let stage = Stage::new("cluster_moved", settings, &[]).await;
    let migrate = async |proof: &str| {
        eventually("the counters are migrated", || async {
            let moved = stage.world.tallyd(&["admin", "layout", "migrate", "--from", "packed:4", "--to", "packed:7"]);
            let said = stderr(&moved);
            assert!(matches!(moved.status.code(), Some(0 | 75)), "{said}");
            moved.status.success() && said.contains(proof)
        })
        .await;
    };
    let crowd = Crowd::new(stage.nodes.api_server(&stage.world), false);
    eventually("more than 500 likes are counted", || async { crowd.counted() > 500 }).await;
    migrate("agrees with MySQL").await;
    let counted = crowd.counted();
    eventually("likes continue", || async { crowd.counted() > counted + 200 }).await;
    let model = model(crowd.stop().await);
    stage.world.drained(&stage.publisher).await;
    stage.world.assert_rows_equal(&model).await;
    stage.world.outbox_added().await;
    migrate("found no difference").await;

    let mut config = stage.nodes.api(&stage.world);
    config.redis = config.redis.moved().unwrap();
    let moved = client_of(&config);
    let targets: Vec<_> = (1..=TARGETS).map(target).collect();
    let counters = model.counters();
    let expected: Vec<_> = targets.iter().map(|target| Some(counters.get(target).copied().unwrap_or(0))).collect();
    assert_eq!(redis_likes(&moved, &targets).await, expected);
    assert_eq!(redis_likes(&stage.client, &targets).await, expected);

    // The two layouts can put a target's bucket on different nodes. The test needs at least one such target.
    let (keys, also) =
        (&stage.world.cache.keys, stage.world.cache.also(&stage.world.config.redis, &stage.world.config.metrics));
    let also = also.unwrap().unwrap();
    let mut apart = 0;
    for target in &targets {
        let places = [keys, &also.keys].map(|keys| keys.place("video", *target, Metric(1)).key);
        apart += u32::from(stage.nodes.place_of(&places[0]).await != stage.nodes.place_of(&places[1]).await);
    }
    assert!(apart > 50, "{apart}");
    stage.is_exact("--full").await;
    assert!(stage.daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_one_nodes_address_needs_no_other_setting() {
    let stage = Stage::new("cluster_card", "bucket_bits = 6\n", &[]).await;
    let client = stranger_of(&stage.nodes.api(&stage.world));
    eventually("the client sees the card", || async { client.site_refreshed().await.is_known }).await;
    let targets: Vec<_> = (1..=30).map(target).collect();
    for target in &targets {
        client.like(*target, UserId(7)).await.unwrap();
    }
    stage.world.drained(&stage.publisher).await;
    stage.world.outbox_added().await;
    assert_eq!(redis_likes(&client, &targets).await, vec![Some(1); targets.len()]);
    assert!(stage.daemon.stop().success());
}
