//! Tests which daemon owns which partition, and which owners each daemon reports.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::common::site::{Site, all_held, has_all};
use crate::common::{Daemon, World, eventually, stderr, stdout};

const ADMIN: &str = "[amqp]\npartitions = 4\n[admin]\nlisten = \"127.0.0.1:0\"\n";

/// Returns the URL of the daemon's admin port.
async fn url(daemon: &Daemon) -> String {
    daemon.logged("\"admin-listening\"").await;
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"admin-listening\"")).unwrap();
    format!("http://{}", serde_json::from_str::<Value>(line).unwrap()["address"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_daemon_tells_who_has_every_partition_since_when_and_in_which_epoch() {
    let world = World::new("sharing", ADMIN).await;
    world.publisher().await;
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    let (first, second, third) = (world.daemon(), world.daemon(), world.daemon());
    let site = Site::open(&world);
    all_held(&world).await;
    first.kill();
    site.clicked(100).await;
    second.kill();
    has_all(&world, &third).await;
    let url = url(&third).await;
    let told = || {
        let status = world.report(&["status", "--url", &url]);
        let partitions = status["partitions"].as_array().unwrap().iter().filter_map(|one| {
            let owner = one["owner"].as_str()?.to_owned();
            let since = one["taken_at"].as_i64()?;
            assert!(since > 1_700_000_000_000_000, "{one}");
            Some((one["partition"].as_u64()?, (owner, one["epoch"].as_u64()?)))
        });
        partitions.collect::<BTreeMap<_, _>>()
    };
    eventually("the status has all owners", || async { held(&world).await == told() }).await;
    let text = stdout(&world.tallyd(&["status", "--url", &url]));
    assert!(text.contains("WRITER") && text.contains("EPOCH"), "{text}");

    // A daemon that is configured with fewer partitions also reports the owners of all partitions, and reports the
    // mismatch.
    let fewer = world.daemon_with(&[("TALLYD__AMQP__PARTITIONS", "1")]);
    let url = self::url(&fewer).await;
    eventually("all owners are reported", || async {
        told_by(&world, &url) == ["listening", "elsewhere", "elsewhere", "elsewhere"]
    })
    .await;
    let text = stdout(&world.tallyd(&["status", "--url", &url]));
    assert!(text.contains("[amqp] partitions is 1 here, but 4 partitions are in use"), "{text}");
    assert!(fewer.stop().success());
    site.end(&world).await;
}

/// Returns the owner and the epoch of each partition that has an owner.
async fn held(world: &World) -> BTreeMap<u64, (String, u64)> {
    let rows: Vec<(u16, Option<String>, u64)> =
        sqlx::query_as("SELECT `partition`, owner, epoch FROM partition_owner").fetch_all(&world.pool).await.unwrap();
    rows.into_iter().filter_map(|(partition, owner, epoch)| Some((partition.into(), (owner?, epoch)))).collect()
}

fn told_by(world: &World, url: &str) -> Vec<String> {
    let output = world.tallyd(&["status", "--url", url, "--format", "json"]);
    let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    status["partitions"].as_array().unwrap().iter().map(|one| one["standing"].as_str().unwrap().to_owned()).collect()
}

/// A daemon begins each session with a small prefetch. The daemon restarts the session when it knows the size of
/// messages. During the restart another daemon can get the partition. Before that, the first daemon must have written
/// all its messages. Otherwise the two daemons would write the same messages.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_changes_hands_in_order_is_taken_from_nobody_who_still_writes() {
    let world = World::new("hands", "[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 10\n").await;
    world.publisher().await;
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    let daemons = [world.daemon(), world.daemon()];
    let begun = || daemons.iter().map(|daemon| daemon.log().matches("\"consuming\"").count()).sum::<usize>();
    eventually("both daemons have a session for each partition", || async { begun() == 4 }).await;
    let site = Site::open(&world);
    eventually("each partition changes its owner twice", || async { begun() >= 8 }).await;
    site.clicked(2_000).await;
    site.end(&world).await;
    for daemon in daemons {
        for sign in ["\"outage-begun\"", "\"prefetch-lowered\"", "\"partition-taken-over\"", "\"partition-given-back\""]
        {
            assert!(!daemon.log().contains(sign), "{sign} in {}", daemon.log());
        }
        assert!(daemon.stop().success());
    }
}
