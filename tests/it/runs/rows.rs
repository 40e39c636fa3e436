//! On a large table, a run must limit how many rows the server reads, and not only how many rows the server returns.

use sqlx::AssertSqlSafe;
use tallyd_core::model::{Kind, TargetId};
use tallyd_mysql::Store;

use super::common::World;
use super::settled;

/// The number of rows in `counter`. All rows have the same metric, so their targets have no rows for the other metrics.
const ROWS: i64 = 20_000;

/// Settings with three metrics, although the table has only rows of one metric.
const SPARSE: &str = "[metrics]\nlike = 1\nshare = 2\nview = 3\n[reconcile]\nrepair_targets_max_percent = 100\n";

async fn filled(name: &str) -> World {
    let world = World::new(name, SPARSE).await;
    if is_mariadb(&world).await {
        // MySQL always counts read rows, but MariaDB needs this setting.
        sqlx::query("SET GLOBAL userstat = 1").execute(&world.pool).await.unwrap();
    }
    insert(&world, (1..=ROWS).map(|id| (id, 2, 0))).await;
    world
}

/// Adds a row of `counter` for each target, metric and slot, with the value 1.
async fn insert(world: &World, rows: impl Iterator<Item = (i64, i64, i64)>) {
    let rows: Vec<String> = rows.map(|(id, metric, slot)| format!("(1,{id},{metric},{slot},1,'2026-01-01')")).collect();
    let sql =
        format!("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {}", rows.join(","));
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
}

async fn is_mariadb(world: &World) -> bool {
    let version: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(&world.pool).await.unwrap();
    version.contains("MariaDB")
}

/// Returns how many rows of `counter` the server has read so far.
async fn rows_read(world: &World) -> i64 {
    let sql = if is_mariadb(world).await {
        "SELECT CAST(ROWS_READ AS SIGNED) FROM information_schema.TABLE_STATISTICS \
         WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'counter'"
    } else {
        "SELECT CAST(COUNT_READ AS SIGNED) FROM performance_schema.table_io_waits_summary_by_table \
         WHERE OBJECT_SCHEMA = DATABASE() AND OBJECT_NAME = 'counter'"
    };
    sqlx::query_scalar(sql).fetch_optional(&world.pool).await.unwrap().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_without_rows_cost_no_scan_of_the_counters() {
    let world = filled("sparse").await;
    let _daemon = world.consuming().await;
    let before = rows_read(&world).await;
    // Redis is empty, so the run first loads all counters and then compares them.
    let report = world.report(&["reconcile", "--full"]);
    assert_eq!((&report["counters_loaded"], &report["checked"]), (&ROWS.into(), &ROWS.into()), "{report}");
    assert_eq!((&report["exact"], &report["phantoms"]), (&ROWS.into(), &0.into()), "{report}");
    // To load the counters, the run reads each row twice: to list the targets, and to read the counters. To compare
    // the counters, the run reads each row two more times.
    let read = rows_read(&world).await - before;
    assert!(read < ROWS * 9 / 2, "{read} rows of {ROWS} were read");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_counters_reads_no_more_rows_than_it_has() {
    let world = filled("page_rows").await;
    let store = Store::new(&world.config.mysql, 2).unwrap();
    let before = rows_read(&world).await;
    let range = store.list_range(Kind(1), TargetId(7_000), 100).await.unwrap();
    // The query reads one row more than it needs, to find out whether the last target is complete.
    assert_eq!((range.counters.len(), range.until), (100, TargetId(7_100)));
    let read = rows_read(&world).await - before;
    assert!(read <= 102, "{read} rows");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_with_more_rows_than_a_page_is_read_whole() {
    let world = World::new("whole_target", SPARSE).await;
    insert(&world, (0..120).map(|number| (5 + number / 100, 1 + number % 2, number))).await;
    let store = Store::new(&world.config.mysql, 2).unwrap();
    let first = store.list_range(Kind(1), TargetId(0), 30).await.unwrap();
    let read: Vec<_> = first.counters.iter().map(|counted| (counted.number.1.0, counted.value)).collect();
    assert_eq!((first.until, read), (TargetId(5), vec![(1, 50), (2, 50)]));
    let second = store.list_range(Kind(1), first.until, 30).await.unwrap();
    assert_eq!((second.counters.len(), second.rows(), second.until.0), (2, 20, i64::MAX.unsigned_abs()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_of_the_buckets_ends_when_its_time_is_over() {
    let settings = "[redis]\nbucket_bits = 14\n[reconcile]\npause_ms = 1000\n";
    let (world, _daemon, _) = settled("search_over", 0, settings).await;
    // The run has no time to compare a counter, because it first searches all buckets in four parts, with a pause
    // before each part.
    let report = world.report(&["reconcile", "--full", "--run-time", "2s"]);
    assert_eq!((&report["ended"], &report["cut"]), (&"time-over".into(), &serde_json::Value::Null), "{report}");
}
