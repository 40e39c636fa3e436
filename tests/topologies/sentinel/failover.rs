//! Another server becomes the master while likes are counted.

use tallyd_core::chain::Chain;
use tallyd_core::model::UserId;

use super::common::{as_api, eventually, target};
use super::{SETTINGS, Stage, model};
use crate::common::scripts::LikeError;

#[tokio::test(flavor = "multi_thread")]
async fn likes_go_on_with_the_next_master_in_order_and_after_a_death_and_what_was_lost_is_repaired() {
    let mut stage = Stage::new("sentinel_failover", "").await;
    let first = stage.group.master().await.unwrap();
    let data_set = stage.world.cache.data_set().await.unwrap();
    let crowd = stage.crowd();
    stage.goes_on().await;

    stage.group.fail_over().await;
    let second = stage.group.is_promoted_over(first).await;
    stage.goes_on().await;
    stage.group.is_replica(first).await;
    // When the old master became a replica, it closed the client's connection. So the test retries.
    eventually("the new master has another data set", || async {
        stage.world.cache.data_set().await.is_ok_and(|found| found != data_set)
    })
    .await;

    stage.group.kill(second);
    stage.group.is_promoted_over(second).await;
    stage.goes_on().await;
    // The server restarts without data. The server is a master until a sentinel makes it a replica.
    stage.group.start_again(second).await;
    stage.goes_on().await;
    stage.group.is_replica(second).await;
    stage.goes_on().await;

    let liked = crowd.stop().await;
    assert!(liked.iter().all(Result::is_ok), "a client publishes likes without Redis");
    let model = model(liked);
    stage.world.drained(&stage.publisher).await;
    // The killed master had likes that the next master lacks.
    stage.world.outbox_added().await;
    stage.reconcile("--changed").await;
    let log = stage.daemon.log();
    assert!(log.contains("checking Redis for lost buckets works again"), "{log}");
    stage.close(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_master_that_comes_back_gets_no_like_though_it_takes_itself_for_the_master() {
    let stage = Stage::new("sentinel_frozen", &as_api(SETTINGS)).await;
    let old = stage.group.master().await.unwrap();
    // This client sends nothing while the master is frozen, so its connection stays open.
    let idle = stage.group.api_server(&stage.world);
    let mut kept = vec![idle.like(target(1), UserId(1_000_001), &[]).await];
    let crowd = stage.crowd();
    stage.goes_on().await;

    stage.group.signal(old, "STOP");
    let new = stage.group.is_promoted_over(old).await;
    stage.goes_on().await;
    let before = stage.group.commands(new, "evalsha").await;
    stage.group.signal(old, "CONT");
    assert!(stage.group.says(old, "role:master").await, "the test was too slow");
    let took = stage.group.commands(old, "evalsha").await;
    kept.push(idle.like(target(2), UserId(1_000_001), &[]).await);
    stage.goes_on().await;
    assert_eq!(stage.group.commands(old, "evalsha").await, took, "the old master must get no like");
    assert!(stage.group.commands(new, "evalsha").await > before);
    stage.group.is_replica(old).await;
    stage.goes_on().await;

    let mut liked = crowd.stop().await;
    assert!(liked.iter().any(Result::is_err), "some likes must fail during the failover");
    assert!(kept.iter().all(Result::is_ok), "{kept:?}");
    liked.extend(kept);
    let model = model(liked);
    stage.world.drained(&stage.publisher).await;
    stage.reconcile("--changed").await;
    stage.close(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_replaced_master_counted_is_lost_with_it_and_repaired_unless_it_must_have_replicas() {
    let stage = Stage::new("sentinel_replaced", &as_api(SETTINGS)).await;
    let old = stage.group.master().await.unwrap();
    // This client acts like an API server that does not ask the sentinels while it is connected.
    let unaware = stage.group.unaware(&stage.world, old);
    let mut kept = vec![unaware.like(target(1), UserId(1), &[]).await];
    stage.group.fail_over().await;
    stage.group.is_promoted_over(old).await;
    // Eight seconds after the promotion the sentinels would make the old master a replica.
    stage.group.signal_sentinels("STOP");
    assert!(stage.group.says(old, "role:master").await, "the sentinels were faster than the test");
    kept.push(unaware.like(target(1), UserId(2), &[]).await);
    eventually("the old master must have no replicas", || stage.group.says(old, "connected_slaves:0")).await;
    stage.group.set(old, "min-replicas-to-write", "1").await;
    let refused = unaware.like(target(1), UserId(3), &[]).await;
    assert!(
        matches!(&refused, Err(LikeError::NotCounted(error)) if Chain(error).to_string().contains("NOREPLICAS")),
        "{refused:?}"
    );
    assert!(kept.iter().all(Result::is_ok), "{kept:?}");
    let model = model(kept);
    stage.group.signal_sentinels("CONT");
    stage.world.drained(&stage.publisher).await;
    stage.group.is_replica(old).await;
    let report = stage.reconcile("--changed").await;
    assert_eq!(
        (&report["drifted"], &report["repaired"], &report["drift_sum"]),
        (&1.into(), &1.into(), &1.into()),
        "{report}"
    );
    stage.close(&model).await;
}
