//! RabbitMQ says "no messages and no consumers" about a queue with messages, because the queue's leader is silent. No job
//! and no command may take such a queue for empty.

use std::process::Output;

use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_rabbitmq::Broker;

use crate::common::servers::SilentLeader;
use crate::common::{Model, World, as_api, body, stderr, stdout, target};

/// API servers count likes, so a reconcile needs a fence.
const SETTINGS: &str = "[reconcile]\nfence_max = \"1s\"\n\
    [amqp]\ntimeout_ms = 1500\n";

#[track_caller]
fn assert_exits(output: &Output, code: i32, said: &str) {
    let text = stdout(output) + &stderr(output);
    assert!(output.status.code() == Some(code) && text.contains(said), "{:?}: {text}", output.status);
}

async fn like(world: &World, model: &mut Model, user: u64) {
    let publisher = world.publisher().await;
    let event =
        LikeEvent { target: target(42), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true };
    model.apply(&event);
    world.publish(&publisher, &[body(&event)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_leader_is_no_proof_that_no_event_waits() {
    let world = World::new("silent_run", &as_api(SETTINGS)).await;
    world.publisher().await;
    assert_exits(&world.tallyd(&["reconcile"]), 0, "");
    like(&world, &mut Model::default(), 7).await;
    let silent = SilentLeader::of(&world.broker.queue(0));
    assert_exits(&world.tallyd(&["reconcile", "--full"]), 75, "send a fence to");
    let erased = world.report(&["admin", "erase", "--user", "8", "--dry-run"]);
    let waiting = serde_json::json!([{ "queue": world.broker.queue(0), "messages": null }]);
    assert_eq!(erased["waiting"], waiting, "an erase must not take the queue for empty");
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_pass_idle_queues_until_an_event_waits_in_one() {
    let world = World::new("silent_idle", &as_api(SETTINGS)).await;
    world.publisher().await;
    let queue = world.broker.queue(0);
    let full = ["reconcile", "--full"];
    for _ in 0..2 {
        assert_exits(&world.tallyd(&full), 0, "");
    }
    assert_eq!(world.unconsumed(&queue).await, 2, "each run leaves one fence");
    let left = "SELECT COUNT(*) FROM left_fence";
    assert_eq!(world.count(left).await, 2);
    let daemon = world.daemon();
    let mut model = Model::default();
    like(&world, &mut model, 7).await;
    world.drained(&world.publisher().await).await;
    assert!(daemon.stop().success());
    assert_eq!(world.count(left).await, 0, "the daemon has dropped the fences");
    assert_exits(&world.tallyd(&full), 0, "");
    like(&world, &mut model, 8).await;
    assert_exits(&world.tallyd(&full), 75, &format!("{queue} has 1 messages and no consumer"));
    let _daemon = world.daemon();
    assert_exits(&world.tallyd(&full), 0, "");
    world.drained(&world.publisher().await).await;
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_lower_deletes_no_queue_whose_leader_is_silent() {
    let settings = |partitions: u16| format!("{SETTINGS}partitions = {partitions}\n");
    let mut world = World::new("silent_lower", &settings(2)).await;
    let daemon = world.consuming().await;
    assert!(daemon.stop().success());
    let queue = world.broker.queue(1);
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let event = LikeEvent { target: target(42), user: UserId(7), at: tallyd_base::runtime::clock::now(), liked: true };
    publisher.publish("", &queue, &body(&event).1).await.unwrap();
    world.set(&settings(1));
    world.broker = Broker::new(&world.config.amqp).unwrap();
    let lower = ["admin", "partitions", "lower", "--yes", "--to", "1"];
    let silent = SilentLeader::of(&queue);
    assert_exits(&world.tallyd(&lower), 75, &format!("the queue {queue} stays"));
    drop(silent);
    assert!(world.unconsumed(&queue).await > 0, "the message is still there");
    assert_exits(&world.tallyd(&lower), 75, &format!("these queues are not empty: {queue}"));
    assert_eq!(world.count("SELECT CAST(partitions AS SIGNED) FROM partition_count").await, 2);
}
