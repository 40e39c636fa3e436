//! Tests how tallyd archives a closed board. tallyd freezes the board, copies it to MySQL and verifies the copy. When
//! the board expires, tallyd removes it from Redis.

use std::time::Duration;

use redis::AsyncCommands;
use tallyd::jobs::archive::Outcome;
use tallyd_base::jobs::run::RunReport as _;
use tallyd_core::model::{BoardPeriod, Micros};

use super::common::private::Private;
use super::{Board, DAY, ENDED_AT_ONCE, NOW, Stage, WEEKLY, board, outcomes, week};

#[tokio::test]
async fn a_closed_board_is_archived_in_rank_order_and_expires_later() {
    let config = WEEKLY.replace("page_members = 7", "page_members = 1000");
    let mut stage = Stage::new("archive_whole", &config).await;
    let at = week("2026-W46");
    let members = board(20_000);
    let key = stage.live(&at);
    for piece in Vec::from_iter(&members).chunks(1_000) {
        let piece: Vec<(f64, &Vec<u8>)> = piece.iter().map(|(member, score)| (**score, *member)).collect();
        stage.redis.zadd_multiple::<_, _, _, ()>(&key, &piece).await.unwrap();
    }
    let ranked = stage.ranked(&key).await;

    let report = stage.archive(NOW).await;

    assert!(report.is_done(), "{report:#}");
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Archived)]);
    assert_eq!(report.periods[0].members, 20_000);
    assert_eq!(stage.archived(&at).await, ranked);
    assert_eq!(stage.state(&at).await.as_deref(), Some("done"));
    assert!(!stage.exists(&key).await);
    let frozen = stage.frozen(&at);
    assert_eq!(stage.ranked(&frozen).await, ranked);
    // The default expiry of 30 days, and a safety margin of one day.
    assert!((31 * 86_400 - 60..=31 * 86_400).contains(&stage.ttl_s(&frozen).await));

    let again = stage.archive(NOW).await;
    assert_eq!((again.is_done(), outcomes(&again)), (true, vec![]), "the period waits for its end");
    assert_eq!(stage.archived(&at).await, ranked);
}

#[tokio::test]
async fn members_are_any_bytes_and_scores_come_back_bit_by_bit() {
    let mut stage = Stage::new("archive_bytes", WEEKLY).await;
    let at = week("2026-W46");
    let mut members: Board = (0..=255_u8).map(|byte| (vec![byte], f64::from(byte) / 10.0)).collect();
    members.insert(Vec::new(), 9_007_199_254_740_991.0);
    members.insert(vec![0xff; 255], f64::MAX);
    members.insert(b"'; DROP TABLE leaderboard_archive; --".to_vec(), -f64::MAX);
    members.insert(i64::MAX.to_be_bytes().to_vec(), f64::MIN_POSITIVE);
    members.insert("点赞".into(), 0.1 + 0.2);
    members.insert(b"A".to_vec(), -1.5);
    stage.write(&at, &members).await;
    let ranked = stage.ranked(&stage.live(&at)).await;

    let report = stage.archive(NOW).await;

    assert!(report.is_done(), "{report:#}");
    assert_eq!(stage.archived(&at).await, ranked);
    stage.holds(&at, &members).await;
}

#[tokio::test]
async fn weeks_missed_while_down_are_made_up_for_and_the_open_ones_left_alone() {
    let more = "[[board]]\nname = \"likes\"\nperiod = \"day\"\n[[board]]\nname = \"posts\"\nperiod = \"month\"\n";
    let mut stage = Stage::new("archive_missed", &format!("{WEEKLY}{more}")).await;
    let missed = ["2026-W46", "2026-W45", "2026-W44", "2026-11-20", "2026-11-19"].map(week);
    let open = ["2026-W47", "2026-11-21"].map(week);
    for (index, at) in missed.iter().chain(&open).enumerate() {
        stage.write(at, &board(20 + index)).await;
    }
    let month = BoardPeriod { board: "posts".to_owned(), period: "2026-10".to_owned() };
    stage.write(&month, &board(3)).await;

    let report = stage.archive(NOW).await;

    assert!(report.is_done(), "{report:#}");
    assert_eq!(report.periods.len(), missed.len() + 1, "{report:#}");
    for (index, at) in missed.iter().enumerate() {
        stage.holds(at, &board(20 + index)).await;
    }
    stage.holds(&month, &board(3)).await;
    for at in &open {
        let live = stage.live(at);
        assert!(stage.exists(&live).await);
        stage.holds(at, &Board::new()).await;
        assert_eq!(stage.state(at).await, None);
    }
}

#[tokio::test]
async fn a_board_stays_until_late_writes_have_been_waited_for() {
    let config =
        "[[board]]\nname = \"likes\"\nperiod = \"week\"\ntime_zone = \"Asia/Shanghai\"\narchive_grace = \"2h\"\n";
    let (stage, at) = Stage::with_closed("archive_grace", config, &board(5)).await;
    // The week ends on Sunday, 15 November, at 16:00 UTC. It closes at 18:00 UTC, because the grace period is two
    // hours.
    let closes = Micros(1_794_765_600_000_000);
    assert_eq!(stage.archive(closes.before(Duration::from_micros(1))).await.periods, []);
    assert_eq!(outcomes(&stage.archive(closes).await), [("2026-W46", Outcome::Archived)]);
    stage.holds(&at, &board(5)).await;
}

#[tokio::test]
async fn an_archived_board_is_unlinked_when_its_time_has_come() {
    let (mut stage, at) = Stage::with_archived("archive_ends", WEEKLY, &board(50)).await;
    let frozen = stage.frozen(&at);

    assert_eq!(outcomes(&stage.archive(NOW.after(29 * DAY)).await), []);
    assert!(stage.exists(&frozen).await);
    let report = stage.archive(NOW.after(30 * DAY)).await;

    assert!(report.is_done());
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Ended)]);
    assert!(!stage.exists(&frozen).await);
    assert_eq!(stage.state(&at).await.as_deref(), Some("ended"));
    stage.holds(&at, &board(50)).await;
    assert_eq!(stage.archive(NOW.after(31 * DAY)).await.periods, []);
}

#[tokio::test]
async fn a_board_that_shall_not_stay_is_unlinked_as_soon_as_it_is_archived() {
    let (mut stage, at) = Stage::with_closed("archive_at_once", ENDED_AT_ONCE, &board(50)).await;
    let report = stage.archive(NOW).await;
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Ended)]);
    assert!(!stage.exists(&stage.frozen(&at)).await);
    assert_eq!(stage.state(&at).await.as_deref(), Some("ended"));
    stage.holds(&at, &board(50)).await;
}

#[tokio::test]
async fn a_redis_whose_memory_is_full_is_freed_by_the_archive() {
    let redis = Private::start(&[]).await;
    let mut stage = Stage::new("archive_full", &format!("[redis]\nurl = \"{}\"\n{WEEKLY}", redis.url())).await;
    let [ended, closed] = ["2026-W46", "2026-W47"].map(week);
    stage.write(&ended, &board(50)).await;
    stage.archive(NOW).await;
    stage.write(&closed, &board(20)).await;
    // A late write, which the run merges.
    stage.write(&ended, &board(1)).await;
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(1).exec_async(&mut stage.redis).await.unwrap();
    let report = stage.archive(NOW.after(30 * DAY)).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Archived), ("2026-W46", Outcome::Archived)]);
    let report = stage.archive(NOW.after(60 * DAY)).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Ended), ("2026-W46", Outcome::Ended)]);
}
