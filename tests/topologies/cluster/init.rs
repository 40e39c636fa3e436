//! Tests `tallyd init` with the node of a Redis Cluster as `[redis] url`.

use super::common::first_day::FirstDay;
use super::common::stack;
use super::nodes::Nodes;

#[tokio::test(flavor = "multi_thread")]
async fn init_finds_a_cluster_and_makes_accounts_on_its_nodes() {
    let nodes = Nodes::start().await;
    let day = FirstDay::new("clu");
    let mut environment = day.environment();
    environment.push(("TALLYD__REDIS__URL", nodes.url(1)));
    let config = day.initialized(&environment, &[]);
    assert!(config.contains("cluster = true\n"), "{config}");
    for place in [0, 2] {
        assert!(config.contains(nodes.url(place).trim_start_matches("redis://")), "{config}");
    }
    day.accounts(&[], &stack("MYSQL_URL"), &[]);
    day.done("migrate.toml", &["migrate"]);
    day.done("config.toml", &["config", "check"]);
    day.likes(&day.api()).await;
    day.likes_over_http().await;
    day.close().await;
}
