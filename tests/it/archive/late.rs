//! Late writes are never lost, at any step of the archiver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::AsyncCommands;
use sqlx::AssertSqlSafe;
use tallyd::jobs::archive::Outcome;
use tallyd_base::jobs::run::RunReport as _;

use super::{Board, ENDED_AT_ONCE, NOW, Stage, WEEKLY, board, outcomes, says};

/// Returns some late writes.
pub fn late() -> Board {
    Board::from([
        (b"member-3".to_vec(), 100.0),
        (b"member-4".to_vec(), 0.5),
        (b"a new one".to_vec(), 4.0),
        (b"another new one".to_vec(), 1_000.0),
    ])
}

#[tokio::test]
async fn what_is_written_after_the_period_but_before_the_freeze_is_archived() {
    let (mut stage, at) = Stage::with_closed("archive_late_1", WEEKLY, &board(30)).await;
    stage.write(&at, &late()).await;
    stage.archive(NOW).await;
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn what_is_written_after_the_freeze_is_merged_once() {
    let (mut stage, at) = Stage::with_closed("archive_late_2", WEEKLY, &board(30)).await;
    // The test freezes the board without archiving it, as if a run had crashed right after the freeze.
    stage.claim(1).await;
    stage.world.cache.freeze_board(&at, 1, 0, None).await.unwrap();
    stage.write(&at, &late()).await;

    let report = stage.archive(NOW).await;

    assert!(report.is_done(), "{report:#}");
    assert_eq!((report.periods[0].members, report.periods[0].late_members), (32, 4));
    stage.holds_all(&at).await;
    assert!(!stage.exists(&stage.live(&at)).await);
}

#[tokio::test]
async fn what_is_written_after_the_archive_is_done_is_merged_and_archived_again() {
    let (mut stage, at) = Stage::with_archived("archive_late_3", WEEKLY, &board(30)).await;
    for _ in 0..3 {
        stage.write(&at, &late()).await;
        let report = stage.archive(NOW).await;
        assert_eq!(outcomes(&report), [("2026-W46", Outcome::Archived)]);
        assert_eq!(report.periods[0].late_members, 4);
        stage.holds_all(&at).await;
        let (live, frozen) = (stage.live(&at), stage.frozen(&at));
        assert!(!stage.exists(&live).await);
        assert_eq!(stage.archived(&at).await, stage.ranked(&frozen).await);
        assert!(stage.ttl_s(&frozen).await > 30 * 86_400);
    }
}

#[tokio::test]
async fn late_writes_are_archived_again_after_mysql_was_restored() {
    let (mut stage, at) = Stage::with_archived("archive_late_older", WEEKLY, &board(30)).await;
    // The test first backs up MySQL's tables, then archives late writes, and then restores the tables.
    for table in ["leaderboard_period", "leaderboard_archive"] {
        sqlx::query(AssertSqlSafe(format!("CREATE TABLE older_{table} AS SELECT * FROM {table}")))
            .execute(&stage.world.pool)
            .await
            .unwrap();
    }
    stage.write(&at, &late()).await;
    stage.archive(NOW).await;
    for table in ["leaderboard_period", "leaderboard_archive"] {
        sqlx::query(AssertSqlSafe(format!("DELETE FROM {table}"))).execute(&stage.world.pool).await.unwrap();
        sqlx::query(AssertSqlSafe(format!("INSERT INTO {table} SELECT * FROM older_{table}")))
            .execute(&stage.world.pool)
            .await
            .unwrap();
    }

    let report = stage.archive(NOW).await;

    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Archived)]);
    stage.holds_all(&at).await;
    assert_eq!(outcomes(&stage.archive(NOW).await), []);
}

#[tokio::test]
async fn what_is_written_after_the_board_has_ended_is_kept_and_reported() {
    let (mut stage, at) = Stage::with_archived("archive_late_4", ENDED_AT_ONCE, &board(30)).await;
    stage.write(&at, &late()).await;
    for _ in 0..2 {
        let report = stage.archive(NOW).await;
        assert!(!report.is_done());
        assert_eq!(outcomes(&report), [("2026-W46", Outcome::Kept)]);
        says(&report, "2026-W46", "these writes are in the live zset");
        let live = stage.live(&at);
        assert_eq!(stage.ranked(&live).await.into_iter().collect::<Board>(), late());
        assert_eq!(stage.ttl_s(&live).await, -1);
        stage.holds(&at, &board(30)).await;
    }
}

#[tokio::test]
async fn a_surplus_of_places_from_an_earlier_copy_is_deleted() {
    let (mut stage, at) = Stage::with_archived("archive_surplus", WEEKLY, &board(2_500)).await;
    // An operator deletes the board's row, so the archiver archives the board again. The zset is now smaller.
    let frozen = stage.frozen(&at);
    stage.redis.zremrangebyrank::<_, ()>(&frozen, 20, -1).await.unwrap();
    stage.execute("DELETE FROM leaderboard_period").await;
    let report = stage.archive(NOW).await;
    assert_eq!(report.periods[0].members, 20, "{report:#}");
    assert_eq!(stage.archived(&at).await, stage.ranked(&frozen).await);
}

#[tokio::test]
async fn a_writer_that_goes_on_all_the_while_loses_nothing() {
    let (mut stage, at) = Stage::with_closed("archive_late_5", WEEKLY, &board(30)).await;
    let (key, mut redis) = (stage.live(&at), stage.world.redis().await);
    let member = |step: u32| format!("member-{}", step % 61);
    let has_two_runs = Arc::new(AtomicBool::new(false));
    let may_end = Arc::clone(&has_two_runs);
    let writer = tokio::spawn(async move {
        let mut step = 0;
        while step < 3_000 || !may_end.load(Ordering::Relaxed) {
            redis.zincr::<_, _, _, f64>(&key, member(step), 1.0).await.unwrap();
            step += 1;
        }
        step
    });
    for _ in 0..2 {
        stage.archive(NOW).await;
    }
    has_two_runs.store(true, Ordering::Relaxed);
    while !writer.is_finished() {
        stage.archive(NOW).await;
    }
    for step in 0..writer.await.unwrap() {
        stage.note(&at, &Board::from([(member(step).into_bytes(), 1.0)]));
    }
    assert!(stage.archive(NOW).await.is_done());

    stage.holds_all(&at).await;
    assert!(!stage.exists(&stage.live(&at)).await);
}
