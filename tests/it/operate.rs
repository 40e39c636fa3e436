//! Tests the commands that an operator uses instead of manual work in MySQL and RabbitMQ. Each command does its task,
//! can be repeated, and rejects invalid requests.

use std::process::{Command, Output, Stdio};

use sqlx::AssertSqlSafe;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_rabbitmq::Broker;

use crate::common::{World, body, eventually, stderr, stdout, target};

#[track_caller]
fn assert_exits(output: &Output, code: i32, said: &str) {
    let text = stdout(output) + &stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(said), "\"{said}\" is not in: {text}");
}

async fn like(world: &World, users: std::ops::RangeInclusive<u64>) {
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let now = tallyd_base::runtime::clock::now();
    let event = |user| LikeEvent { target: target(42), user: UserId(user), at: now, liked: true };
    world.publish(&publisher, &users.map(|user| body(&event(user))).collect::<Vec<_>>()).await;
}

// ---------------------------------------------------------------------------------------------- partitions lower

/// Changes the number of partitions in the configuration.
fn set(world: &mut World, partitions: u16) {
    world.set(&format!("[amqp]\npartitions = {partitions}\n"));
    world.broker = Broker::new(&world.config.amqp).unwrap();
}

/// Returns for each queue the number of its messages, or `None` if the queue is missing. If the number is unknown, it
/// is 0 here.
async fn queued(world: &World) -> Vec<Option<u32>> {
    let link = world.broker.connect("test").await.unwrap();
    let depths = world.broker.depths(&link, &world.broker.numbered(4)).await.unwrap();
    depths.into_iter().map(|(_, depth)| depth.map(|depth| depth.messages().unwrap_or_default())).collect()
}

const IN_USE: &str = "SELECT CAST(partitions AS SIGNED) FROM partition_count";

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_lowered_and_each_event_still_has_one_queue() {
    let mut world = World::new("lower", "[amqp]\npartitions = 4\n").await;
    let daemon = world.consuming().await;
    like(&world, 1..=50).await;
    eventually("all likes are written", || async { world.counters().await.get(&target(42)) == Some(&50) }).await;
    assert!(daemon.stop().success());
    for (to, queues) in [(2, [Some(0), Some(0), None, None]), (1, [Some(0), None, None, None])] {
        set(&mut world, to);
        let before = queued(&world).await;
        let command = ["admin", "partitions", "lower", "--yes", "--to", &to.to_string()];
        assert_exits(&world.tallyd(&[&command[..], &["--dry-run"]].concat()), 0, "delete the queue");
        assert_eq!(queued(&world).await, before, "a dry run changes nothing");
        assert_exits(&world.tallyd(&command), 0, &format!("{to} partitions are in use: start the daemons"));
        assert_eq!((queued(&world).await, world.count(IN_USE).await), (queues.to_vec(), i64::from(to)));
        assert_exits(&world.tallyd(&command), 0, &format!("{to} partitions are in use"));
        // The test restores the old number of partitions, as if the command had been killed before it stored the new
        // number.
        sqlx::query("UPDATE partition_count SET partitions = 4").execute(&world.pool).await.unwrap();
        assert_exits(&world.tallyd(&command), 0, &format!("{to} partitions are in use: start the daemons"));
    }
    like(&world, 51..=100).await;
    assert_eq!(queued(&world).await[0], Some(50), "each like must be queued once");
    let _daemon = world.consuming().await;
    eventually("all likes are written", || async { world.counters().await.get(&target(42)) == Some(&100) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_stay_while_daemons_run_or_queues_hold_events() {
    let mut world = World::new("lower_refused", "[amqp]\npartitions = 4\n").await;
    let command = ["admin", "partitions", "lower", "--to", "2"];
    let daemon = world.consuming().await;
    assert_exits(&world.tallyd(&command), 78, "[amqp] partitions is 4: first set it to 2 on every host");
    set(&mut world, 2);
    assert_exits(&world.tallyd(&command), 75, "a daemon consumes");
    assert!(daemon.stop().success());
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    publisher.publish_behind(&world.broker.queue(3), b"{}").await.unwrap();
    eventually("the message is queued", || async { queued(&world).await[3] == Some(1) }).await;
    assert_exits(&world.tallyd(&command), 75, &format!("these queues are not empty: {}", world.broker.queue(3)));
    let link = world.broker.connect("test").await.unwrap();
    link.channel.queue_purge(world.broker.queue(3).into(), Default::default()).await.unwrap();
    let job =
        "INSERT INTO job_run (run, job, mode, owner, started_at) VALUES (900, 'archive', 'due', 'elsewhere:7', NOW(6))";
    let lock = "INSERT INTO job_lock (job, run, owner, lease_until) VALUES ('archive', 900, 'elsewhere:7', NOW(6) + INTERVAL 20 SECOND)";
    for sql in [job, lock] {
        sqlx::query(sql).execute(&world.pool).await.unwrap();
    }
    assert_exits(&world.tallyd(&command), 75, "elsewhere:7 runs archive due");
    sqlx::query("DELETE FROM job_lock").execute(&world.pool).await.unwrap();
    let declared = world.command().args(command).env("TALLYD__AMQP__DECLARE", "false").output().unwrap();
    assert_exits(&declared, 75, "[amqp] declare is false");
    assert_eq!((queued(&world).await, world.count(IN_USE).await), (vec![Some(0); 4], 4));
    let mut more = world.command();
    more.args(["admin", "partitions", "lower", "--to", "8"]).env("TALLYD__AMQP__PARTITIONS", "8");
    assert_exits(&more.output().unwrap(), 64, "4 partitions are in use");
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_that_consume_nothing_are_noticed_all_the_same() {
    let world = World::new("lower_unseen", &format!("[amqp]\npartitions = 4\n{SEARCHED}")).await;
    let daemon = world.consuming().await;
    let refused = |world: &World, said: &str| {
        world.write(&format!("[amqp]\npartitions = 2\n{SEARCHED}"));
        assert_exits(&world.tallyd(&["admin", "partitions", "lower", "--to", "2"]), 75, said);
        world.write(&format!("[amqp]\npartitions = 4\n{FOUND}"));
        assert_exits(&world.tallyd(&["admin", "names", "rename", "metric", "search", "find", "--yes"]), 75, said);
    };
    assert_exits(&world.tallyd(&["pause", "consumer", "--for", "10m"]), 0, "consumer is paused until");
    let consumed = async || {
        let link = world.broker.connect("test").await.unwrap();
        world
            .broker
            .depths(&link, &world.broker.numbered(4))
            .await
            .unwrap()
            .into_iter()
            .any(|(_, depth)| depth.is_some_and(|depth| depth.consumers() > Some(0)))
    };
    eventually("no queue has a consumer", || async { !consumed().await }).await;
    refused(&world, "consumer is paused until");
    assert_exits(&world.tallyd(&["resume", "consumer"]), 0, "consumer resumes");
    assert!(daemon.stop().success());

    world.write(&format!("[amqp]\npartitions = 4\n{SEARCHED}"));
    let daemon = world.daemon_with(&[("TALLYD__AMQP__URL", "amqp://tally:tally@127.0.0.1:1/%2f")]);
    daemon.logged("control-listening").await;
    refused(&world, "a daemon or a command uses MySQL");
    assert_eq!(world.count(IN_USE).await, 4);
    assert!(daemon.stop().success());
    assert_exits(
        &world.tallyd(&["admin", "names", "rename", "metric", "search", "find", "--yes"]),
        0,
        "renamed: start the daemons",
    );
}

// ---------------------------------------------------------------------------------------------- names rename

const SEARCHED: &str = "[metrics]\nlike = 1\nsearch = 6\n";
const FOUND: &str = "[metrics]\nlike = 1\nfind = 6\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_metric_is_renamed_once_the_configuration_has_the_name() {
    let mut world = World::new("rename", SEARCHED).await;
    let daemon = world.consuming().await;
    let rename = |from, to| ["admin", "names", "rename", "metric", from, to, "--yes"];
    assert_exits(&world.tallyd(&rename("search", "find")), 78, "[metrics] has no find = 6");
    world.write(FOUND);
    assert_exits(&world.tallyd(&rename("search", "find")), 75, "a daemon consumes");
    assert!(daemon.stop().success());
    assert_exits(
        &world.tallyd(&rename("view", "find")),
        64,
        "no metric is named view in MySQL: the names are like, search",
    );
    assert_exits(&world.tallyd(&rename("search", "like")), 64, "the metric with the code 1 already has the name like");
    assert_exits(&world.tallyd(&["archive"]), 78, "tallyd admin names rename");

    let dry = world.tallyd(&[&rename("search", "find")[..], &["--dry-run"]].concat());
    assert_exits(&dry, 0, "rename the metric search (code 6) to find");
    let renamed = "SELECT COUNT(*) FROM metric_name WHERE metric = 6 AND name = 'find'";
    assert_eq!(world.count(renamed).await, 0);
    assert_exits(&world.tallyd(&rename("search", "find")), 0, "renamed: start the daemons");
    assert_eq!(world.count(renamed).await, 1);
    assert_exits(&world.tallyd(&rename("search", "find")), 0, "already has this name");
    world.set(FOUND);
    assert!(world.consuming().await.stop().success());

    world.write(&format!("{FOUND}[kinds]\nfilm = 1\n"));
    assert_exits(
        &world.tallyd(&["admin", "names", "rename", "kind", "video", "film", "--yes"]),
        0,
        "renamed: start the daemons",
    );
    assert_exits(&world.tallyd(&["archive"]), 0, "");
}

// ---------------------------------------------------------------------------------------------- after-restore

/// Runs a command in a terminal, and types this answer.
fn typed(world: &World, arguments: &str, answer: &str) -> Output {
    let line = format!("{} --config {} {arguments}", env!("CARGO_BIN_EXE_tallyd"), world.config_path().display());
    let echo = format!("echo {answer} | script -qec '{line}' /dev/null");
    Command::new("sh").args(["-c", &echo]).stdin(Stdio::null()).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restore_of_mysql_redis_follows_its_state() {
    let settings = "[reconcile]\nrepair_abs_max = 5\n[filter]\nlikes_min = 1000\ncron = \"\"\n";
    let world = World::new("after_restore", settings).await;
    let _daemon = world.consuming().await;
    assert_exits(&world.tallyd(&["reconcile"]), 0, "");
    let written = async |likes: i64| {
        eventually("all likes are written", || async { world.counters().await.get(&target(42)) == Some(&likes) }).await;
        world.outbox_added().await;
        assert_eq!(world.redis_counters().await[&target(42)], likes);
    };
    like(&world, 1..=10).await;
    written(10).await;
    for table in ["like_record", "counter"] {
        let sql = format!("CREATE TABLE saved_{table} AS SELECT * FROM {table}");
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    like(&world, 11..=30).await;
    written(30).await;
    let columns = "kind, target_id, metric, slot, value, update_at";
    for sql in [
        "DELETE FROM like_record".to_owned(),
        "INSERT INTO like_record SELECT * FROM saved_like_record".to_owned(),
        "DELETE FROM counter".to_owned(),
        format!("INSERT INTO counter ({columns}) SELECT {columns} FROM saved_counter"),
        "INSERT INTO job_run (job, mode, owner, started_at, finished_at, outcome, checkpoint) \
         VALUES ('filters', 'keep', 'test', NOW(6), NOW(6), 'done', '{}')"
            .to_owned(),
    ] {
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    assert_exits(&world.tallyd(&["admin", "after-restore", "--dry-run"]), 2, "video:42");
    assert_exits(&world.tallyd(&["reconcile"]), 1, "");
    assert_exits(&typed(&world, "admin after-restore", "n"), 1, "nothing was changed");
    assert_exits(&world.tallyd(&["admin", "after-restore"]), 64, "nothing was changed: without a terminal, add --yes");
    let marks = "SELECT COUNT(*) FROM job_run WHERE job = 'filters' AND checkpoint IS NOT NULL";
    assert_eq!((world.redis_counters().await[&target(42)], world.count(marks).await), (30, 1));

    assert_exits(&world.tallyd(&["pause", "reconcile"]), 0, "reconcile is paused until");
    assert_exits(&world.tallyd(&["admin", "after-restore", "--yes"]), 75, "reconcile is paused until");
    assert_eq!(world.count(marks).await, 1, "a rejected command must change nothing");
    assert_exits(&world.tallyd(&["resume", "reconcile"]), 0, "reconcile resumes");
    assert_exits(&typed(&world, "admin after-restore", "y"), 0, "a full reconcile without limits");
    world.outbox_added().await;
    assert_eq!((world.redis_counters().await[&target(42)], world.count(marks).await), (10, 0));
    assert_exits(&world.tallyd(&["admin", "after-restore", "--yes"]), 0, "");
    like(&world, 31..=35).await;
    written(15).await;
}
