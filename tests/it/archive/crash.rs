//! An archive run crashes between any two steps, and the next run finishes the work of the crashed run.

use std::collections::BTreeSet;
use std::iter;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use sqlx::AssertSqlSafe;
use tallyd::jobs::archive::{FAULT_POINTS, RAISE_FAULT_POINTS};
use tallyd_core::model::BoardPeriod;
use tallyd_core::period::Period;

use super::late::late;
use super::saved::add;
use super::{Board, ENDED_AT_ONCE, Stage, WEEKLY, board, week};

const SIGABRT: i32 = 6;

/// Runs the real program. Returns true if the program crashed at the fault point.
pub fn dies(stage: &Stage, arguments: &[&str], fault_point: &str) -> bool {
    let mut tallyd = stage.world.command();
    let ended = tallyd
        .args(arguments)
        .env("TALLYD_FAULT_POINT", fault_point)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(ended.success() || ended.signal() == Some(SIGABRT), "{fault_point}: {ended}");
    !ended.success()
}

fn dies_at(stage: &Stage, at: &BoardPeriod, fault_point: &str) -> bool {
    dies(stage, &["archive", "--period", &at.period, "--yes"], fault_point)
}

/// Returns one closed week for each fault point.
fn weeks() -> impl Iterator<Item = (&'static str, BoardPeriod)> {
    let last: Period = "2026-W46".parse().unwrap();
    let weeks = iter::successors(Some(last), |week| week.previous());
    FAULT_POINTS.into_iter().chain(RAISE_FAULT_POINTS).zip(weeks.map(|period| week(&period.to_string())))
}

/// Archives one week per fault point. Each run starts from the state that `prepare` makes, and crashes at its fault
/// point. If a run doesn't reach its fault point, it archives its week without a crash. Returns the fault points that
/// the runs reached.
async fn survive(
    stage: &mut Stage,
    writes_late: bool,
    prepare: impl AsyncFn(&mut Stage, &BoardPeriod),
) -> BTreeSet<&'static str> {
    let mut reached = BTreeSet::new();
    for (fault_point, at) in weeks() {
        stage.write(&at, &board(30)).await;
        prepare(stage, &at).await;
        if dies_at(stage, &at, fault_point) {
            reached.insert(fault_point);
            if writes_late {
                stage.write(&at, &late()).await;
            }
            stage.end_lease().await;
            assert!(!dies_at(stage, &at, "none"), "{fault_point}");
        }
        stage.holds_all(&at).await;
        let sql = format!("SELECT COUNT(*) FROM leaderboard_archive WHERE period = '{}'", at.period);
        let rows: i64 = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&stage.world.pool).await.unwrap();
        assert_eq!(rows, stage.written[&at].len() as i64, "{fault_point}: only one copy must be left");
        assert!(!stage.exists(&stage.live(&at)).await, "{fault_point}");
        let frozen = stage.frozen(&at);
        match stage.state(&at).await.as_deref() {
            Some("ended") => assert!(!stage.exists(&frozen).await, "{fault_point}"),
            Some("done") => {
                assert_eq!(stage.archived(&at).await, stage.ranked(&frozen).await, "{fault_point}");
                assert!(stage.ttl_s(&frozen).await > 30 * 86_400, "{fault_point}");
            }
            other => panic!("{fault_point}: {other:?}"),
        }
    }
    reached
}

async fn nothing(_: &mut Stage, _: &BoardPeriod) {}

#[tokio::test]
async fn a_crash_between_any_two_steps_of_the_first_archive_loses_nothing() {
    let mut stage = Stage::new("archive_crash_1", WEEKLY).await;
    let reached = survive(&mut stage, true, nothing).await;
    let skipped = ["archive:merged-page", "archive:unlinked", "archive:ended"];
    assert_eq!(reached, FAULT_POINTS.into_iter().filter(|point| !skipped.contains(point)).collect());
}

#[tokio::test]
async fn a_crash_between_any_two_steps_of_archiving_again_loses_nothing() {
    let mut stage = Stage::new("archive_crash_2", WEEKLY).await;
    let reached = survive(&mut stage, true, async |stage, at| {
        assert!(!dies_at(stage, at, "none"));
        stage.write(at, &late()).await;
    })
    .await;
    let skipped = ["archive:frozen", "archive:unlinked", "archive:ended"];
    assert_eq!(reached, FAULT_POINTS.into_iter().filter(|point| !skipped.contains(point)).collect());
}

#[tokio::test]
async fn a_crash_on_the_way_out_of_redis_loses_nothing() {
    let mut stage = Stage::new("archive_crash_3", ENDED_AT_ONCE).await;
    let reached = survive(&mut stage, false, nothing).await;
    assert_eq!(reached, FAULT_POINTS.into_iter().filter(|point| *point != "archive:merged-page").collect());
}

/// With this page size, a run needs several pages to raise the scores, but only a few pages to copy the board.
const LARGE: &str = "[archive]\npage_members = 1000\n[[board]]\nname = \"likes\"\nperiod = \"week\"\n";

/// Returns late writes of several pages.
fn many_late() -> Board {
    let mut late = late();
    add(&mut late, &(0..2_500).map(|id| (format!("member-{id}").into_bytes(), 20.0)).collect());
    late
}

#[tokio::test]
async fn a_crash_between_any_two_steps_of_archiving_what_went_back_counts_nothing_twice() {
    let mut stage = Stage::new("archive_crash_4", LARGE).await;
    // This first run archives nothing, and only creates the notes in Redis.
    assert!(!dies(&stage, &["archive"], "none"));
    let reached = survive(&mut stage, false, async |stage, at| {
        let then = stage.remember().await;
        stage.write(at, &many_late()).await;
        assert!(!dies_at(stage, at, "none"));
        stage.go_back(&then).await;
    })
    .await;
    let skipped = ["archive:noted", "archive:merged-page", "archive:unlinked", "archive:ended"];
    let points = FAULT_POINTS.into_iter().chain(RAISE_FAULT_POINTS);
    assert_eq!(reached, points.filter(|point| !skipped.contains(point)).collect());
}

/// Redis goes back to a copy that has the frozen zset, but none of the late writes that MySQL has.
#[tokio::test]
async fn a_crash_while_a_zset_gets_its_archived_late_writes_again_loses_nothing() {
    let mut stage = Stage::new("archive_crash_5", LARGE).await;
    let reached = survive(&mut stage, false, async |stage, at| {
        assert!(!dies_at(stage, at, "none"));
        let then = stage.remember().await;
        stage.write(at, &many_late()).await;
        assert!(!dies_at(stage, at, "none"));
        stage.go_back(&then).await;
        // More late writes arrive than Redis has counted before.
        let new: Board = (0..3_000).map(|id| (format!("new-{id}").into_bytes(), 7.0)).collect();
        stage.write(at, &new).await;
    })
    .await;
    let skipped = ["archive:frozen", "archive:noted-again", "archive:unlinked", "archive:ended"];
    let points = FAULT_POINTS.into_iter().chain(RAISE_FAULT_POINTS);
    assert_eq!(reached, points.filter(|point| !skipped.contains(point)).collect());
}
