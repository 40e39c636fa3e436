//! An operator pauses the consumers and the outbox. All daemons obey the operator. No event is lost, and each count is
//! added once.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

use sqlx::Row;

use super::common::{World, eventually, eventually_each, stderr, stdout};
use super::{Counts, METRICS, assert_exact, in_mysql, in_redis};

/// The time within which a daemon must follow an order. A daemon needs at most two seconds, because it reads the orders
/// once a second and writes a batch in less than a second. The limit is higher for slow machines.
const OBEYED_WITHIN: Duration = Duration::from_secs(15);

fn ordered(world: &World, arguments: &[&str]) -> String {
    let output = world.tallyd(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

/// Waits until no daemon consumes, and returns the number of waiting messages. Leaves a fence in each queue.
async fn queued(world: &World) -> u32 {
    let mut messages = 0;
    for partition in 0..world.broker.partitions() {
        messages += world.unconsumed(&world.broker.queue(partition)).await;
    }
    messages
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_consumers_hold_nothing_and_resume_where_they_stopped() {
    let world = World::new("paused", &format!("[amqp]\npartitions = 2\n{METRICS}")).await;
    let publisher = world.publisher().await;
    let sockets = ["one", "two"].map(|name| format!("unix:{}/{name}.sock", world.folder.path().display()));
    let daemons = sockets.each_ref().map(|socket| world.daemon_with(&[("TALLYD__ADMIN__LISTEN", socket)]));
    for daemon in &daemons {
        daemon.logged("\"consuming\"").await;
    }
    let control = std::fs::metadata(world.folder.path().join("control.sock")).unwrap();
    assert_eq!(control.permissions().mode() & 0o777, 0o660);
    let mut counts = Counts::of(40);
    let (before, during) = (counts.some(6_000), counts.some(500));
    tokio::join!(world.publish(&publisher, &before), async {
        eventually("some counts are written", || async { !in_mysql(&world).await.is_empty() }).await;
        let said = ordered(&world, &["pause", "consumer", "--for", "10m", "--reason", "MySQL moves"]);
        assert!(said.contains("consumer is paused until") && said.contains(": MySQL moves\n"), "{said}");
        assert!(said.contains(&format!(" (uid {}) on ", control.uid())), "{said}");
    });
    let began = Instant::now();
    // The queues also have no consumer while a daemon restarts its session. So the test also checks the status.
    for socket in &sockets {
        let paused = || async {
            let status = world.report(&["status", "--url", socket]);
            let mut partitions = status["partitions"].as_array().unwrap().iter();
            partitions.all(|partition| partition["standing"] == "paused")
        };
        eventually("the daemon's partitions are paused", paused).await;
    }
    queued(&world).await;
    assert!(began.elapsed() < OBEYED_WITHIN, "{:?}", began.elapsed());
    let held = "SELECT COUNT(*) FROM partition_owner WHERE owner IS NOT NULL";
    eventually("the partitions are released", || async { world.count(held).await == 0 }).await;
    let (written, waiting) = (in_mysql(&world).await, queued(&world).await);
    world.publish(&publisher, &during).await;
    let fences = u32::from(world.broker.partitions());
    assert_eq!(queued(&world).await, waiting + fences + 500, "the queues grow");
    assert_eq!(in_mysql(&world).await, written);
    for socket in &sockets {
        let shown = || async { stdout(&world.tallyd(&["status", "--url", socket])) };
        eventually_each(Duration::from_millis(250), "the status shows the pause", || async {
            shown().await.contains("consumer is paused until")
        })
        .await;
        let shown = shown().await;
        assert!(shown.contains("tallyd resume consumer") && shown.contains("ready: "), "{shown}");
        assert_eq!(world.tallyd(&["admin", "healthcheck", "--url", socket]).status.code(), Some(0));
    }
    // While the consumers are paused, no consumer would handle the fence message of a reconcile. So a reconcile does
    // not start.
    let refused = world.tallyd(&["reconcile"]);
    assert_eq!(refused.status.code(), Some(75));
    assert!(stderr(&refused).contains("consumer is paused until"), "{}", stderr(&refused));

    assert_eq!(ordered(&world, &["resume", "consumer"]), "consumer resumes\n");
    assert_exact(&world, &publisher, &counts).await;
    // A second daemon does not replace the socket of a running daemon. The second daemon takes over the socket only
    // when the first daemon has ended.
    let [one, two] = daemons;
    let (holder, other) = if one.log().contains("control-not-listening") { (two, one) } else { (one, two) };
    assert!(other.log().contains("another process listens there"), "{}", other.log());
    assert!(holder.stop().success());
    other.logged("control-listening").await;
    assert_eq!(ordered(&world, &["resume", "consumer"]), "consumer was not paused\n");
    assert!(other.stop().success());
    let gone = world.tallyd(&["pause", "consumer"]);
    assert_eq!(gone.status.code(), Some(75));
    assert!(stderr(&gone).contains("no daemon answers at"), "{}", stderr(&gone));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_outbox_resumes_automatically_once_its_time_is_over() {
    let world = World::new("paused_outbox", METRICS).await;
    let publisher = world.publisher().await;
    let daemons = [world.daemon(), world.daemon()];
    daemons[0].logged("\"consuming\"").await;
    let mut counts = Counts::of(20);
    world.publish(&publisher, &counts.some(100)).await;
    assert_exact(&world, &publisher, &counts).await;
    let known = in_redis(&world, &world.cache, counts.targets).await;

    let began = Instant::now();
    ordered(&world, &["pause", "outbox", "--for", "8s"]);
    for daemon in &daemons {
        daemon.logged("order-begun").await;
    }
    world.consumed(&publisher, &counts.some(200)).await;
    assert_eq!(in_mysql(&world).await, counts.sums, "the consumers continue");
    // A daemon that starts later also obeys the pause.
    let [first, second] = daemons;
    assert!(first.stop().success());
    let third = world.daemon();
    third.logged("order-begun").await;
    let archive = world.tallyd(&["archive"]);
    let ends: i64 = sqlx::query("SELECT CAST(until_at > NOW(6) AS SIGNED) FROM control")
        .fetch_one(&world.pool)
        .await
        .unwrap()
        .get(0);
    if ends == 1 {
        assert_eq!(in_redis(&world, &world.cache, counts.targets).await, known);
        assert_eq!(archive.status.code(), Some(75), "{}", stderr(&archive));
    }
    assert_exact(&world, &publisher, &counts).await;
    assert!(began.elapsed() >= Duration::from_secs(8));
    second.logged("order-ended").await;
    for daemon in [second, third] {
        assert!(daemon.stop().success());
    }
}
