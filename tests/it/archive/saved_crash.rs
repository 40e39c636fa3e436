//! A run that saves, restores or deletes boards crashes between any two steps, and the next run finishes its work.

use std::collections::BTreeSet;

use redis::AsyncCommands;
use tallyd::jobs::archive::PRUNE_FAULT_POINTS;
use tallyd::jobs::snapshots::FAULT_POINTS;
use tallyd_core::model::BoardPeriod;
use tallyd_core::period::{Calendar, Period, PeriodKind};

use super::crash::dies;
use super::{Board, Stage, board};

const SETTINGS: &str = "[archive]\npage_members = 300\n\
    [[board]]\nname = \"likes\"\nperiod = \"week\"\narchive_keep = \"1s\"\nexpire_after = \"0s\"\n\
    [[board]]\nname = \"likes\"\nperiod = \"total\"\n";

/// Runs the command until it crashes at the fault point. Then runs the command a second time, and this run must
/// succeed. Returns true if the first run reached the fault point.
async fn survives(stage: &Stage, arguments: &[&str], fault_point: &str) -> bool {
    if !dies(stage, arguments, fault_point) {
        return false;
    }
    stage.end_lease().await;
    assert!(!dies(stage, arguments, "none"), "{fault_point}");
    true
}

fn points(task: &str) -> BTreeSet<&'static str> {
    FAULT_POINTS.into_iter().chain(PRUNE_FAULT_POINTS).filter(|point| point.starts_with(task)).collect()
}

#[tokio::test]
async fn a_crash_between_any_two_steps_of_a_snapshot_leaves_one_that_the_next_completes() {
    let (mut stage, at) = Stage::with_board("saved_crash", SETTINGS, "total", &board(2_500)).await;
    let save = ["board", "snapshot", "likes", "total"];
    let mut reached = BTreeSet::new();
    assert!(!dies(&stage, &save, "none"));
    for fault_point in points("snapshot") {
        if survives(&stage, &save, fault_point).await {
            reached.insert(fault_point);
        }
        assert_eq!(stage.saved(&at).await, stage.written[&at], "{fault_point}");
        let added = Board::from([(b"member-7".to_vec(), 1.0), (fault_point.as_bytes().to_vec(), 3.0)]);
        stage.write(&at, &added).await;
    }
    assert_eq!(reached, points("snapshot"));
}

#[tokio::test]
async fn a_first_snapshot_that_dies_is_no_loss_of_the_board() {
    for (index, fault_point) in ["snapshot:marked", "snapshot:saved-page", "snapshot:saved"].into_iter().enumerate() {
        let name = format!("saved_crash_first_{index}");
        let (stage, at) = Stage::with_board(&name, SETTINGS, "total", &board(2_500)).await;
        assert!(survives(&stage, &["board", "snapshot", "likes", "total"], fault_point).await, "{fault_point}");
        assert_eq!(stage.saved(&at).await, board(2_500), "{fault_point}");
    }
}

#[tokio::test]
async fn a_crash_between_any_two_steps_of_a_restore_loses_nothing_and_adds_nothing_twice() {
    let (mut stage, at) = Stage::with_board("restored_crash", SETTINGS, "total", &board(2_500)).await;
    let mut reached = BTreeSet::new();
    for fault_point in points("restore") {
        assert!(!dies(&stage, &["board", "snapshot", "likes", "total"], "none"), "{fault_point}");
        stage.lose(&at).await;
        let since: Board = (2_000..2_700).map(|id| (format!("member-{id}").into_bytes(), 2.0)).collect();
        stage.write(&at, &since).await;
        let restore = ["board", "restore", "likes", "total", "--yes"];
        if dies(&stage, &restore, fault_point) {
            reached.insert(fault_point);
            stage.end_lease().await;
            // Before the test repeats the restore, `member-9` gets more likes.
            stage.write(&at, &Board::from([(b"member-9".to_vec(), 4.0)])).await;
            if fault_point != "restore:put" {
                assert!(!dies(&stage, &restore, "none"), "{fault_point}");
            }
        }
        assert_eq!(stage.in_redis(&at).await, stage.written[&at], "{fault_point}");
    }
    let skipped = ["restore:raised-page", "restore:noted"];
    assert_eq!(reached, points("restore").into_iter().filter(|point| !skipped.contains(point)).collect());
    // A crashed restore can also be repeated if Redis has older data of the board.
    let mark = stage.mark(&at);
    stage.redis.set::<_, _, ()>(&mark, 1).await.unwrap();
    assert!(survives(&stage, &["board", "restore", "likes", "total", "--yes"], "restore:raised-page").await);
    stage.is_whole(&at).await;
}

#[tokio::test]
async fn a_crash_while_an_archive_is_put_back_is_made_up_for() {
    let mut stage = Stage::new("restored_crash_archive", SETTINGS).await;
    let now = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC);
    let mut period = now.previous().and_then(Period::previous);
    let mut reached = BTreeSet::new();
    for fault_point in points("restore") {
        let at = BoardPeriod { board: "likes".to_owned(), period: period.unwrap().to_string() };
        period = period.and_then(Period::previous);
        stage.write(&at, &board(2_500)).await;
        assert!(!dies(&stage, &["archive", "--board", "likes", "--period", &at.period, "--yes"], "none"));
        let restore = ["board", "restore", "likes", &at.period, "--yes"];
        if dies(&stage, &restore, fault_point) {
            reached.insert(fault_point);
            stage.end_lease().await;
            // If the first restore has already restored the board, the second restore fails, because Redis has the
            // board.
            let again = stage.world.tallyd(&restore).status.success();
            assert_eq!(again, fault_point != "restore:put", "{fault_point}");
        }
        assert_eq!(stage.state(&at).await.as_deref(), Some("done"), "{fault_point}");
        assert_eq!(stage.ranked(&stage.frozen(&at)).await, stage.archived(&at).await, "{fault_point}");
    }
    let skipped = ["restore:merged-page", "restore:raised-page"];
    assert_eq!(reached, points("restore").into_iter().filter(|point| !skipped.contains(point)).collect());
}

#[tokio::test]
async fn a_crash_while_it_deletes_leaves_what_the_next_run_deletes() {
    let mut stage = Stage::new("pruned_crash", SETTINGS).await;
    let now = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC);
    let mut period = now.previous().and_then(Period::previous);
    let mut reached = BTreeSet::new();
    for fault_point in points("archive") {
        let at = BoardPeriod { board: "likes".to_owned(), period: period.unwrap().to_string() };
        period = period.and_then(Period::previous);
        stage.write(&at, &board(2_500)).await;
        assert!(!dies(&stage, &["board", "snapshot", "likes", &at.period], "none"));
        let archive = ["archive"];
        let mut died = survives(&stage, &archive, fault_point).await;
        stage.execute("UPDATE leaderboard_period SET done_at = done_at - INTERVAL 1 HOUR").await;
        died |= survives(&stage, &archive, fault_point).await;
        assert!(!dies(&stage, &archive, "none"));
        if died {
            reached.insert(fault_point);
        }
        assert_eq!(stage.state(&at).await.as_deref(), Some("pruned"), "{fault_point}");
        assert_eq!((stage.archived(&at).await.len(), stage.saved(&at).await.len()), (0, 0), "{fault_point}");
        assert_eq!(stage.store.snapshot(&at).await.unwrap(), None);
    }
    assert_eq!(reached, points("archive"));
}
