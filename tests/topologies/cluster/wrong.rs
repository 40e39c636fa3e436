//! The configuration has `cluster = true` for a single Redis server, or lacks it for a Redis Cluster.

use std::process::Output;

use tallyd_base::config::Redis;
use tallyd_connect::fate::Fate;
use tallyd_core::model::Metric;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

use super::common::{World, stack, stderr, target};
use super::nodes::Nodes;

#[track_caller]
fn is_refused(output: &Output, said: &str) {
    assert_eq!(output.status.code(), Some(78), "{}", stderr(output));
    assert!(stderr(output).contains(said), "\"{said}\" is not in: {}", stderr(output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_configured_as_one_server_is_an_error_of_the_configuration() {
    let nodes = Nodes::start().await;
    let world = World::new("cluster_unsaid", &nodes.settings("")).await;
    let said = "it is a node of a Redis Cluster: set [redis] cluster = true";
    let unsaid = [("TALLYD__REDIS__CLUSTER", "false"), ("TALLYD__REDIS__SEEDS", "[]")];
    for arguments in [&["config", "check"][..], &["reconcile"], &[]] {
        is_refused(&world.command().envs(unsaid).args(arguments).output().unwrap(), said);
    }
    assert!(world.tallyd(&["config", "check"]).status.success());
    // This account has no right to ask Redis whether it is a Cluster.
    let url = nodes.url(0).replace("redis://", "redis://tallyd_api:choose-another@");
    let names = KindNames::new(&world.config.kinds);
    let targets: Vec<_> = (1..=100).map(target).collect();
    let redis = Redis { url: url.as_str().into(), cluster: false, ..world.config.redis.clone() };
    let error =
        Cache::new(&redis, &world.config.metrics).unwrap().read(&names, &[Metric(1)], &targets).await.unwrap_err();
    assert_eq!(error.fate(), Fate::Misconfigured, "{error:?}");
    assert_eq!(nodes.api_server(&world).read(&targets).await.unwrap().len(), 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_server_that_is_configured_as_a_cluster_is_an_error_of_the_configuration() {
    let world = World::new("cluster_missaid", "").await;
    let said = "it is not a node of a Redis Cluster: set [redis] cluster = false";
    let url = stack("REDIS_URL");
    let missaid = [("TALLYD__REDIS__CLUSTER", "true"), ("TALLYD__REDIS__URL", url.trim_end_matches('/'))];
    for arguments in [&["config", "check"][..], &["reconcile"], &[]] {
        is_refused(&world.command().envs(missaid).args(arguments).output().unwrap(), said);
    }
}
