//! If a map conflicts with a map in use, or with the exchanges and permissions in RabbitMQ, the daemon rejects the map
//! with a clear error.

use super::{Site, settings};
use crate::common::{stderr, stdout};

#[tokio::test(flavor = "multi_thread")]
async fn another_name_or_number_than_noted_ends_the_start() {
    let mut site = Site::new("map_noted", "ms").await;
    let daemon = site.daemon().await;
    assert!(daemon.stop().success());
    for (from, to) in [("name = \"site\"", "name = \"other\""), ("number = 7", "number = 8")] {
        site.world.set(&settings(&site.exchange, "ms").replace(from, to));
        let output = site.world.command().arg("run").output().unwrap();
        let said = "uses the map site with the number 7";
        assert!(output.status.code() == Some(78) && stderr(&output).contains(said), "{}", stderr(&output));
        let output = site.world.tallyd(&["config", "check"]);
        assert!(!output.status.success() && (stdout(&output) + &stderr(&output)).contains(said));
    }
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_that_is_missing_or_forbidden_is_named() {
    let mut site = Site::new("map_exchange", "ms").await;
    let missing = format!("{}.nowhere", prefix_of(&site));
    for (exchange, said, in_check) in [
        (missing.as_str(), "does not exist, and tallyd never declares it", "is missing, and tallyd never declares it"),
        (
            "amq.topic",
            "has no right to bind a queue to the exchange amq.topic",
            "give the account the right to read the exchange",
        ),
    ] {
        site.world.set(&settings(exchange, "ms"));
        let daemon = site.world.daemon();
        daemon.logged(said).await;
        assert!(daemon.stop().success());
        let output = site.world.tallyd(&["config", "check"]);
        let text = stdout(&output) + &stderr(&output);
        assert!(!output.status.success() && text.contains(in_check), "{text}");
        assert_eq!(
            site.world.count("SELECT COUNT(*) FROM map_in_use").await,
            0,
            "the daemon must not note the rejected map"
        );
    }
    site.close().await;
}

fn prefix_of(site: &Site) -> &str {
    &site.world.name
}
