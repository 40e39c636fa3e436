//! Tests the consumer during crashes, with closed connections, rival daemons and deleted queues.

use sqlx::AssertSqlSafe;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

use super::common::proxy::Proxy;
use super::common::{Dice, Model, World, body, eventually, servers, target};
use super::{NOW, assert_dead_letters, prefetch_of, receive_and_die, traffic};

#[tokio::test(flavor = "multi_thread")]
async fn sigkill_at_any_moment_loses_and_doubles_nothing() {
    let world = World::new("sigkill", "[consumer]\nbatch_events_max = 500").await;
    let publisher = world.publisher().await;
    let (bodies, model, malformed) = traffic(50_000, 3);
    let mut dice = Dice::of_run(4);
    let mut daemon = world.daemon();
    for part in bodies.chunks(bodies.len().div_ceil(6)) {
        world.publish(&publisher, part).await;
        if part.len() == bodies.len().div_ceil(6) {
            // The test kills the daemon at random moments, because the result must not depend on the moment.
            tokio::time::sleep(std::time::Duration::from_millis(dice.below(400))).await;
            daemon.kill();
            daemon = world.daemon();
        }
    }
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &malformed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_daemon_that_wakes_up_after_a_takeover_writes_nothing() {
    let world =
        World::new("paused", "[consumer]\nbatch_events_max = 100\n[amqp]\nprefetch = 200\nheartbeat_s = 1").await;
    let publisher = world.publisher().await;
    let (bodies, model, malformed) = traffic(20_000, 5);
    let first = world.daemon();
    let (before, after) = bodies.split_at(10_000);
    world.publish(&publisher, before).await;
    // The first session takes the messages one by one and ends soon.
    first.logged("\"epoch\":2").await;
    first.signal("STOP");
    let second = world.daemon();
    world.consumed(&publisher, after).await;
    let taken = world.count("SELECT CAST(epoch AS SIGNED) FROM partition_owner").await;
    assert!(taken >= 2, "the second daemon took the partition over: epoch {taken}");
    first.signal("CONT");
    world.assert_equals(&model).await;
    let again = || async { first.log().contains("outage-begun") || first.log().contains("partition-taken-over") };
    eventually("the first daemon notices the takeover", again).await;
    assert!(first.stop().success());
    world.assert_equals(&model).await;
    assert!(second.stop().success());
    assert_dead_letters(&world, &malformed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_deleted_is_made_again_and_consumed() {
    let world = World::new("queue_deleted", "").await;
    let (publisher, daemon) = (world.publisher().await, world.consuming().await);
    let link = world.broker.connect("test").await.unwrap();
    link.channel.queue_delete(world.broker.queue(0).into(), Default::default()).await.unwrap();
    daemon.logged("the broker cancelled the consumer").await;
    daemon.logged("outage-over").await;
    let (bodies, model, malformed) = traffic(1_000, 14);
    world.publish(&publisher, &bodies).await;
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &malformed).await;
}

/// If a queue is deleted and declared again, RabbitMQ does not report this to the old queue's consumer.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_made_again_at_the_moment_of_its_deletion_is_consumed_again() {
    let world = World::new("remade", "[amqp]\nprefetch = 100\n[consumer]\nbatch_events_max = 50").await;
    let (publisher, _daemon) = (world.publisher().await, world.daemon());
    let likes = |id: u64| -> Vec<(UserId, Vec<u8>)> {
        let at = Micros(1_790_000_000_000_000);
        (1..=300).map(|user| body(&LikeEvent { target: target(id), user: UserId(user), at, liked: true })).collect()
    };
    world.consumed(&publisher, &likes(1)).await;
    let link = world.broker.connect("test").await.unwrap();
    let deleted = link.channel.queue_delete(world.broker.queue(0).into(), Default::default());
    let (deleted, made) = tokio::join!(deleted, world.broker.declare_for(&link, world.broker.partitions()));
    deleted.unwrap();
    made.unwrap();
    world.consumed(&publisher, &likes(2)).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 600);
}

/// A trigger returns MySQL's deadlock error several times in a row, as if another session locked the same rows in the
/// opposite order.
#[tokio::test(flavor = "multi_thread")]
async fn deadlocks_in_a_row_are_no_outage_and_lose_nothing() {
    let world = World::new("deadlocks", "").await;
    // The consumer first writes three test rows, and gets seven deadlocks. Then the consumer writes the batch, and gets
    // eight deadlocks. Rows of a MyISAM table survive a rollback, so `tries` counts all attempts.
    sqlx::raw_sql("CREATE TABLE tries (number INT) ENGINE=MyISAM; INSERT INTO tries VALUES (0)")
        .execute(&world.pool)
        .await
        .unwrap();
    let deadlocks = "CREATE TRIGGER deadlocks BEFORE INSERT ON like_record FOR EACH ROW BEGIN \
                     UPDATE tries SET number = number + 1; \
                     IF (SELECT number % 11 FROM tries) < 8 THEN SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'a deadlock'; END IF; END";
    sqlx::raw_sql(deadlocks).execute(&world.pool).await.unwrap();
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    world
        .publish(&publisher, &[body(&LikeEvent { target: target(1), user: UserId(7), at: Micros(NOW), liked: true })])
        .await;
    eventually("the like is written", || async { world.count("SELECT COUNT(*) FROM like_record").await == 1 }).await;
    assert_eq!(world.count("SELECT number FROM tries").await, 19);
    assert!(!daemon.log().contains("outage-begun"), "{}", daemon.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlocks_with_a_rival_lose_and_double_nothing() {
    let world = World::new("deadlock", "[consumer]\nbatch_events_max = 500").await;
    let (bodies, model, malformed) = traffic(20_000, 15);
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    let (first, rest) = bodies.split_at(5_000);
    world.consumed(&publisher, first).await;
    let pool = world.pool.clone();
    let rival = tokio::spawn(async move {
        let mut rolled_back = 0;
        loop {
            let mut tx = pool.begin().await.unwrap();
            let mut locked = Ok(());
            for target in [400, 300, 200, 100, 50, 20, 10, 5, 1] {
                let lock =
                    sqlx::query("SELECT value FROM counter WHERE kind = 1 AND target_id = ? FOR UPDATE").bind(target);
                locked = lock.fetch_all(&mut *tx).await.map(drop);
                if locked.is_err() {
                    break;
                }
            }
            rolled_back += u32::from(locked.is_err());
            tx.rollback().await.unwrap();
            if rolled_back >= 3 {
                return rolled_back;
            }
        }
    });
    world.consumed(&publisher, rest).await;
    rival.abort();
    world.assert_equals(&model).await;
    assert!(daemon.stop().success());
    assert_dead_letters(&world, &malformed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_cut_again_and_again_lose_and_double_nothing() {
    let world = World::new("cuts", "[consumer]\nbatch_events_max = 300").await;
    let publisher = world.publisher().await;
    let (bodies, model, malformed) = traffic(30_000, 9);
    let (rabbitmq, amqp_url) = Proxy::before(world.config.amqp.url.expose()).await;
    let (mysql, mysql_url) = Proxy::before(world.config.mysql.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__AMQP__URL", &amqp_url), ("TALLYD__MYSQL__URL", &mysql_url)]);
    for (round, part) in bodies.chunks(3_000).enumerate() {
        world.publish(&publisher, part).await;
        if round % 2 == 0 { rabbitmq.cut() } else { mysql.cut() }
    }
    world.drained(&publisher).await;
    daemon.logged("outage-over").await;
    world.assert_equals(&model).await;
    assert!(daemon.stop().success());
    assert_dead_letters(&world, &malformed).await;
}

/// MySQL aborts a statement that exceeds the account's time limit. The statements of a smaller batch are fast enough.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_beyond_a_statement_time_limit_is_written_in_parts() {
    let world = World::new("statement_time", "").await;
    let version: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(&world.pool).await.unwrap();
    if !version.contains("MariaDB") {
        servers::not_run(&format!("{version} limits the time of SELECT alone"));
        return;
    }
    let account = world.accounts.as_ref().unwrap().of_daemon_in_mysql();
    let slow = "CREATE TRIGGER slow BEFORE INSERT ON counter FOR EACH ROW DO SLEEP(0.002)";
    let limit = format!("{slow}; ALTER USER {account} WITH MAX_STATEMENT_TIME 0.6");
    sqlx::raw_sql(AssertSqlSafe(limit)).execute(&world.pool).await.unwrap();
    let publisher = world.publisher().await;
    let event =
        |id| LikeEvent { target: target(id), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true };
    let events: Vec<LikeEvent> = (1..=400).map(event).collect();
    let mut model = Model::default();
    events.iter().for_each(|event| model.apply(event));
    let bodies: Vec<Vec<u8>> = events.iter().map(|event| body(event).1).collect();
    let list = [b"[".as_slice(), &bodies.join(&b","[..]), b"]"].concat();
    let daemon = world.daemon();
    world.publish(&publisher, &[(UserId(1), list)]).await;
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &[]).await;
}

/// The consumer writes messages one by one if they were returned often. Later the consumer takes as many messages as
/// usual.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_back_often_is_taken_with_care() {
    let settings = "[amqp]\nprefetch = 1000\n[consumer]\nbatch_events_max = 500\n[log]\nlevel = \"debug\"\n";
    let world = World::new("care", settings).await;
    let publisher = world.publisher().await;
    let (bodies, model, malformed) = traffic(300, 16);
    world.publish(&publisher, &bodies).await;
    for _ in 0..12 {
        receive_and_die(&world, 300).await;
    }
    let daemon = world.daemon();
    world.drained(&publisher).await;
    let log = daemon.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let batches: Vec<u64> =
        lines.filter(|line| line["event"] == "batch-committed").filter_map(|line| line["messages"].as_u64()).collect();
    assert_eq!(batches[..300], [1; 300], "{batches:?}");
    // After enough messages without a redelivery, the consumer takes as many messages as usual again.
    let (calm, more, also_malformed) = traffic(3_000, 17);
    world.publish(&publisher, &calm).await;
    eventually("the consumer takes as many messages as usual", || async {
        daemon.log().lines().filter_map(prefetch_of).next_back().is_some_and(|prefetch| prefetch >= 500)
    })
    .await;
    world.drained(&publisher).await;
    let mut model = model;
    for ((target, user), (at, is_del)) in more.rows {
        model.apply(&LikeEvent { target, user, at, liked: !is_del });
    }
    let malformed = [malformed, also_malformed].concat();
    world.assert_equals(&model).await;
    assert!(daemon.stop().success());
    assert_dead_letters(&world, &malformed).await;
}

#[cfg(feature = "fault-points")]
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_on_either_side_of_the_commit_changes_nothing() {
    for point in ["consumer:before-commit", "consumer:after-commit"] {
        let world = World::new(&format!("crash_{}", point.len()), "").await;
        let publisher = world.publisher().await;
        let (mut bodies, mut model, malformed) = traffic(2_000, 6);
        // The daemon crashes with the first message, so no other message may have its event.
        let first = LikeEvent { target: target(1_000_000), user: UserId(1), at: Micros(NOW), liked: true };
        model.apply(&first);
        bodies.insert(0, body(&first));
        world.publish(&publisher, &bodies).await;
        // The transaction is slow. If the daemon acknowledged before the commit, the broker would get the
        // acknowledgement before the crash.
        let (mysql, url) = Proxy::before(world.config.mysql.url.expose()).await;
        mysql.delay(10..20);
        let crashed = world.command().env("TALLYD_FAULT_POINT", point).env("TALLYD__MYSQL__URL", url).output().unwrap();
        assert!(!crashed.status.success(), "{point} was not reached");
        assert_eq!(
            world.count("SELECT COUNT(*) > 0 FROM like_record").await,
            i64::from(point == "consumer:after-commit")
        );
        let daemon = world.daemon();
        world.ends_as(&model, &publisher, daemon).await;
        assert_dead_letters(&world, &malformed).await;
    }
}
