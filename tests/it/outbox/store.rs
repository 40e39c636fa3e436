//! Tests the reads of the outbox in MySQL, the rows that jobs append to it, and the deletion of rows.

use std::collections::BTreeMap;

use sqlx::AssertSqlSafe;
use tallyd_core::model::Addition;
use tallyd_core::outbox::{CORRECTIONS, OutboxOffsets};
use tallyd_mysql::outbox::Asked;
use tallyd_mysql::{Store, outbox};

use super::common::{World, target};
use super::{Counts, METRICS, VIEW, assert_exact, in_redis};

#[tokio::test]
async fn corrections_are_added_beside_the_partitions() {
    let world = World::new("outbox_append", METRICS).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let mut counts = Counts::of(20);
    world.publish(&publisher, &counts.some(50)).await;
    let additions: Vec<Addition> =
        (1..=2_500).map(|id| Addition { target: target(1_000 + id), metric: VIEW, delta: 3 }).collect();
    for (rows, kept) in [(3, true), (3, false), (6, true)] {
        let mut tx = world.pool.begin().await.unwrap();
        outbox::append(&mut tx, CORRECTIONS, &additions).await.unwrap();
        if kept {
            tx.commit().await.unwrap()
        } else {
            tx.rollback().await.unwrap()
        }
        let count = "SELECT COUNT(*) FROM outbox WHERE `partition` = 65535";
        assert_eq!(world.count(count).await, rows);
    }
    assert_exact(&world, &publisher, &counts).await;
    let redis = in_redis(&world, &world.cache, 3_500).await;
    assert!((1_001..=3_500).all(|id| redis.get(&(id, VIEW.0)) == Some(&6)));
    // A reconcile must also succeed after the daemon has added these outbox rows to Redis.
    assert!(world.tallyd(&["reconcile", "--changed"]).status.success());
}

async fn pruned(world: &World) -> u64 {
    sqlx::query_scalar("SELECT pruned FROM outbox_state WHERE `partition` = 0").fetch_one(&world.pool).await.unwrap()
}

#[tokio::test]
async fn rows_are_deleted_only_once_they_are_added() {
    let world = World::new("outbox_prune", &format!("[consumer]\nbatch_events_max = 10\n{METRICS}")).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let mut counts = Counts::of(20);
    world.publish(&publisher, &counts.some(300)).await;
    world.counted(&publisher).await;
    assert!(daemon.stop().success());
    let store = Store::new(&world.config.mysql, 2).unwrap();
    let numbers = store.outbox_numbers().await.unwrap();
    assert_eq!(store.outbox_applied().await.unwrap(), numbers);
    let last = numbers.of(0);
    let since = async |after: u64| store.outbox_after(0, after, 1_000).await.unwrap();
    let all = since(0).await;
    let rows: Vec<u64> = all.iter().map(|row| row.number).collect();
    assert!(rows.len() > 20 && rows.is_sorted_by(|one, next| one < next) && rows.last() == Some(&last), "{rows:?}");
    assert_eq!(since(rows[6]).await, all[7..]);
    // A sample that has the first rows lacks the sums of the later rows.
    let (held, mut sums) = (OutboxOffsets::from_iter([(0, rows[6])]), BTreeMap::new());
    for Addition { target, metric, delta } in all[7..].iter().flat_map(|row| &row.additions) {
        *sums.entry((*target, *metric)).or_insert(0) += delta;
    }
    let lag = async |after: u64| {
        let applied = OutboxOffsets::from_iter([(0, after)]);
        let asked = Asked { applied: &applied, sampled: &|_| Some(&held) };
        store.truths(&[], None, Some(asked)).await.unwrap().1
    };
    let found = lag(0).await;
    assert!(sums.iter().all(|(number, sum)| found.of(*number, &held) == Some(*sum)), "{found:?}");
    assert_eq!(found.ends().map(|ends| ends.of(0)), Some(last));

    // The store deletes only the rows that MySQL has noted as added to Redis.
    sqlx::query("UPDATE outbox_state SET applied = ?").bind(rows[5]).execute(&world.pool).await.unwrap();
    assert!(!store.prune_outbox(0, u64::MAX).await.unwrap());
    let some = since(0).await;
    assert_eq!((pruned(&world).await, some.as_slice()), (rows[5], &all[6..]));
    assert_eq!(lag(rows[4]).await.ends(), None, "a deleted row is missing");
    assert!(lag(rows[5]).await.ends().is_some());
    assert!(!store.prune_outbox(0, u64::MAX).await.unwrap());
    assert_eq!(since(0).await, some);
    // MySQL has not noted that some rows were added to Redis. The daemon adds these rows to Redis again, and this
    // changes nothing.
    let _daemon = world.daemon();
    assert_exact(&world, &publisher, &counts).await;
    super::eventually("all rows are noted as added", || async { store.outbox_applied().await.unwrap() == numbers })
        .await;
    // One call deletes more rows than one statement.
    let many: Vec<String> = (1..=2_500).map(|number| format!("(9, {number}, NOW(6), '1:1:3:1')")).collect();
    let many = format!("INSERT INTO outbox (`partition`, number, written_at, body) VALUES {}", many.join(", "));
    for sql in [many.as_str(), "INSERT INTO outbox_state (`partition`, applied) VALUES (9, 2400)"] {
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    assert!(!store.prune_outbox(9, u64::MAX).await.unwrap());
    assert_eq!(world.count("SELECT COUNT(*) FROM outbox WHERE `partition` = 9").await, 100);
    for (until, last) in [(rows[7], rows[7]), (rows[2], rows[7]), (u64::MAX, last)] {
        assert!(!store.prune_outbox(0, until).await.unwrap());
        assert_eq!(pruned(&world).await, last);
    }
    assert_eq!(since(0).await, []);
    assert_exact(&world, &publisher, &counts).await;
}
