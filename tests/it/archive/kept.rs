//! If the archiver can't archive a board, it leaves the board in Redis and reports the reason. Other boards
//! continue.

use redis::AsyncCommands;
use tallyd::jobs::archive::{Outcome, Scope};
use tallyd_base::jobs::run::RunReport as _;
use tallyd_core::model::BoardPeriod;
use tokio_util::sync::CancellationToken;

use super::late::late;
use super::saved::{add, open};
use super::{Board, DAY, NOW, Stage, Stored, WEEKLY, board, outcomes, reason, says, week};
use crate::common::eventually;

#[tokio::test]
async fn a_copy_that_differs_keeps_its_board_and_the_others_go_on() {
    let more = "[[board]]\nname = \"posts\"\nperiod = \"week\"\n";
    let mut stage = Stage::new("archive_differs", &format!("{WEEKLY}{more}")).await;
    let (bad, good) = (week("2026-W46"), week("2026-W45"));
    let other = BoardPeriod { board: "posts".to_owned(), ..bad.clone() };
    let mut marked = board(30);
    marked.insert(b"marked".to_vec(), 1_000.0);
    stage.write(&bad, &marked).await;
    stage.write(&good, &board(30)).await;
    stage.write(&other, &board(30)).await;
    // This trigger acts like another program, which changes a row while tallyd copies the row.
    stage
        .execute(
            "CREATE TRIGGER tamper BEFORE INSERT ON leaderboard_archive FOR EACH ROW \
             SET NEW.score = IF(NEW.member = 'marked', NEW.score + 1, NEW.score)",
        )
        .await;

    let report = stage.archive(NOW).await;

    assert!(!report.is_done());
    assert_eq!(
        outcomes(&report),
        [("2026-W46", Outcome::Kept), ("2026-W45", Outcome::Archived), ("2026-W46", Outcome::Archived)]
    );
    says(&report, "2026-W46", "differ at place 1");
    let frozen = stage.frozen(&bad);
    assert_eq!(stage.ranked(&frozen).await.len(), 31);
    assert_eq!(stage.ttl_s(&frozen).await, -1);
    assert_eq!(stage.state(&bad).await.as_deref(), Some("frozen"));

    stage.execute("DROP TRIGGER tamper").await;
    assert!(stage.archive(NOW).await.is_done());
    stage.holds(&bad, &marked).await;
}

#[tokio::test]
async fn rows_that_changed_since_they_were_verified_keep_their_zset_for_good() {
    let (mut stage, at) = Stage::with_archived("archive_changed", WEEKLY, &board(30)).await;
    stage.execute("DELETE FROM leaderboard_archive WHERE place = 30").await;

    let report = stage.archive(NOW.after(30 * DAY)).await;

    assert!(!report.is_done());
    says(&report, "2026-W46", "differ at place 30");
    let frozen = stage.frozen(&at);
    assert_eq!(stage.ranked(&frozen).await.len(), 30);
    assert_eq!(stage.ttl_s(&frozen).await, -1);

    // The report recommends this statement as the fix.
    stage.execute("DELETE FROM leaderboard_period").await;
    assert!(stage.archive(NOW).await.is_done());
    stage.holds(&at, &board(30)).await;
}

#[tokio::test]
async fn a_board_that_redis_lost_before_it_was_verified_is_reported_and_what_came_late_is_not_taken_for_it() {
    let (mut stage, at) = Stage::with_archived("archive_lost", WEEKLY, &board(30)).await;
    // Redis is flushed while late writes are archived. More writes arrive after the flush.
    stage.execute("UPDATE leaderboard_period SET state = 'frozen'").await;
    let frozen = stage.frozen(&at);
    stage.delete(&frozen).await;
    stage.write(&at, &board(1)).await;

    let report = stage.archive(NOW).await;

    assert!(!report.is_done());
    says(&report, "2026-W46", "lost the period's frozen zset");
    assert_eq!(stage.ranked(&stage.live(&at)).await.len(), 1);
    assert!(!stage.exists(&frozen).await);
    stage.holds(&at, &board(30)).await;
}

#[tokio::test]
async fn a_flush_in_the_middle_of_the_copy_is_never_taken_for_the_boards_end() {
    let (mut stage, at) = Stage::with_closed("archive_flushed", &WEEKLY.replace("= 7", "= 1"), &board(1_000)).await;
    let run = stage.take().await;
    let archiver = stage.archiver(&Scope::default(), NOW);
    let running = stage.rival(run, archiver, &CancellationToken::new());
    eventually("the run copies the board", async || stage.rows().await > 0).await;
    let keys = [stage.frozen(&at), stage.world.cache.keys.board_claim("likes")];
    stage.redis.del::<_, ()>(&keys).await.unwrap();

    let report = running.await.unwrap().unwrap();

    assert!(!report.is_done());
    says(&report, "2026-W46", "frozen zset while the run read");
    assert_eq!(stage.state(&at).await.as_deref(), Some("frozen"));
    let copied = stage.rows().await;
    assert!((1..1_000).contains(&copied), "{copied}");
    stage.end_lease().await;
    says(&stage.archive(NOW).await, "2026-W46", "lost the period's frozen zset");
    assert_eq!(stage.rows().await, copied);
}

#[tokio::test]
async fn a_redis_lost_in_a_second_copy_leaves_the_first_archive() {
    let (first, settings) = (board(1_000), WEEKLY.replace("= 7", "= 1"));
    let (mut stage, at) = Stage::with_archived("archive_flushed_again", &settings, &first).await;
    stage.write(&at, &late()).await;
    let run = stage.take().await;
    let archiver = stage.archiver(&Scope::default(), NOW);
    let running = stage.rival(run, archiver, &CancellationToken::new());
    let copied = "SELECT COUNT(*) FROM leaderboard_archive WHERE member = 'another new one'";
    eventually("the run copies the board again", async || stage.world.count(copied).await > 0).await;
    stage.go_back(&Stored::new()).await;
    says(&running.await.unwrap().unwrap(), "2026-W46", "frozen zset while the run read");
    stage.holds(&at, &first).await;

    // A later write is added to the restored board.
    stage.end_lease().await;
    stage.write(&at, &late()).await;
    says(&stage.archive(NOW).await, "2026-W46", "`tallyd board restore` to restore the archive");
    stage.restore("2026-W46", NOW).await.unwrap();
    assert!(stage.archive(NOW).await.is_done());
    let mut whole = first;
    add(&mut whole, &late());
    stage.holds(&at, &whole).await;
    let rows = "SELECT COUNT(*) FROM leaderboard_archive";
    assert_eq!(stage.world.count(rows).await, whole.len() as i64, "only one copy must be left");
}

#[tokio::test]
async fn a_board_that_redis_lost_after_it_was_archived_is_noted_as_ended() {
    let (mut stage, at) = Stage::with_archived("archive_lost_later", WEEKLY, &board(30)).await;
    stage.delete(&stage.frozen(&at)).await;
    let report = stage.archive(NOW).await;
    assert!(report.is_done());
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Ended)]);
    stage.holds(&at, &board(30)).await;
    // If a late write arrives after the board has ended, the next run reports the write.
    stage.write(&at, &board(1)).await;
    assert_eq!(outcomes(&stage.archive(NOW).await), [("2026-W46", Outcome::Kept)]);
}

#[tokio::test]
async fn what_mysql_can_not_hold_is_kept_with_its_reason() {
    let mut stage = Stage::new("archive_refused", WEEKLY).await;
    let (infinite, long, no_zset, good) = (week("2026-W46"), week("2026-W45"), week("2026-W44"), week("2026-W43"));
    stage.write(&infinite, &Board::from([(b"a".to_vec(), f64::INFINITY)])).await;
    stage.write(&long, &Board::from([(vec![b'a'; 256], 1.0)])).await;
    let key = stage.live(&no_zset);
    stage.redis.set::<_, _, ()>(&key, "no zset").await.unwrap();
    stage.write(&good, &board(5)).await;

    let report = stage.archive(NOW).await;

    assert!(!report.is_done());
    for (period, member) in [("2026-W46", "a: "), ("2026-W45", "aaaaaaaaaa: ")] {
        let why = reason(&report, period);
        assert!(why.contains("MySQL cannot store the member") && why.contains(member), "{report:#}");
    }
    says(&report, "2026-W44", "WRONGTYPE");
    for at in [&infinite, &long, &no_zset] {
        let frozen = stage.frozen(at);
        assert_eq!(stage.ttl_s(&frozen).await, -1, "{at}");
    }
    stage.holds(&good, &board(5)).await;
}

#[tokio::test]
async fn a_board_that_left_the_configuration_is_named_and_left_alone() {
    let (mut stage, at) = Stage::with_archived("archive_unknown", WEEKLY, &board(5)).await;
    stage.write(&open(), &board(5)).await;
    stage.save_all(false).await;
    stage.world.config.boards.clear();
    let report = stage.archive(NOW.after(40 * DAY)).await;
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Kept), ("2026-W47", Outcome::Kept)]);
    for period in ["2026-W46", "2026-W47"] {
        says(&report, period, "the configuration no longer has this board");
    }
    assert!(stage.exists(&stage.frozen(&at)).await);
}

#[tokio::test]
async fn a_key_of_the_wrong_type_keeps_only_its_own_board() {
    let settings = format!("{WEEKLY}[[board]]\nname = \"posts\"\nperiod = \"week\"\n");
    let mut stage = Stage::new("archive_types", &settings).await;
    let posts = |period: &str| BoardPeriod { board: "posts".to_owned(), ..week(period) };
    for at in [week("2026-W46"), open(), posts("2026-W46"), posts("2026-W47")] {
        stage.write(&at, &board(5)).await;
    }
    let freezes = stage.world.cache.keys.board_freezes("likes");
    stage.redis.set::<_, _, ()>(&freezes, "no hash").await.unwrap();
    let mark = stage.mark(&open());
    stage.redis.rpush::<_, _, ()>(&mark, "no text").await.unwrap();

    let report = stage.save_due(NOW).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Kept), ("2026-W47", Outcome::Saved)]);
    let report = stage.archive(NOW).await;
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Kept), ("2026-W46", Outcome::Archived)]);
    says(&report, "2026-W46", "WRONGTYPE");
}
