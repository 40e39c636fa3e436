//! Daemons save boards and report losses automatically, without commands. Even if several daemons run, each board is
//! archived only once.

use std::process::Stdio;

use redis::AsyncCommands;
use tallyd_core::model::BoardPeriod;

use super::{Board, Stage, board, week};
use crate::common::private::Private;
use crate::common::scripts::OnBoard;
use crate::common::{eventually, stderr};

const SAVED: &str =
    "[archive]\ncron = \"\"\n[[board]]\nname = \"likes\"\nperiod = \"total\"\nsnapshot_every = \"2s\"\n";

#[tokio::test]
async fn a_daemon_saves_boards_and_tells_of_a_loss_once() {
    let settings = "[archive]\ncron = \"\"\n[[board]]\nname = \"likes\"\nperiod = \"total\"\nsnapshot_every = \"1s\"\n";
    let (mut stage, at) = Stage::with_board("daemon_saves", settings, "total", &board(1_500)).await;
    let daemon = stage.world.daemon();
    daemon.logged("\"board-saved\"").await;
    assert_eq!(stage.saved(&at).await, board(1_500));
    let added = Board::from([(b"new".to_vec(), 3.0)]);
    stage.write(&at, &added).await;
    eventually("the additions are saved", async || stage.saved(&at).await.len() == 1_501).await;

    stage.lose(&at).await;
    stage.write(&at, &added).await;
    daemon.logged("\"board-lost\"").await;
    assert!(stage.world.cache.is_board_lost(&at).await.unwrap());
    // The daemon is sometimes making a snapshot at this moment, so the test retries.
    let restored = || async {
        let output = stage.world.tallyd(&["board", "restore", "likes", "total", "--yes"]);
        assert!([Some(0), Some(75)].contains(&output.status.code()), "{}", stderr(&output));
        output.status.success()
    };
    eventually("the board is restored", restored).await;
    assert!(!stage.world.cache.is_board_lost(&at).await.unwrap());
    stage.is_whole(&at).await;
    eventually("the board is saved again", async || stage.saved(&at).await == stage.written[&at]).await;
    let told = daemon.log().matches("\"board-lost\"").count();
    assert_eq!(told, 1, "{}", daemon.log());
}

#[tokio::test]
async fn a_full_redis_hides_no_lost_board_and_keeps_no_other_unsaved() {
    let redis = Private::start(&[]).await;
    let board_of = |name| format!("[[board]]\nname = \"{name}\"\nperiod = \"total\"\nsnapshot_every = \"1s\"\n");
    let boards = [board_of("likes"), board_of("other")].concat();
    let settings = format!("[redis]\nurl = \"{}\"\n[archive]\ncron = \"\"\n{boards}", redis.url());
    let mut stage = Stage::new("daemon_full", &settings).await;
    let (lost, other) = (week("total"), BoardPeriod { board: "other".to_owned(), period: "total".to_owned() });
    for at in [&lost, &other] {
        stage.write(at, &board(20)).await;
    }
    let daemon = stage.world.daemon();
    eventually("both boards are saved", async || {
        stage.saved(&lost).await == board(20) && stage.saved(&other).await == board(20)
    })
    .await;
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(1).exec_async(&mut stage.redis).await.unwrap();
    stage.lose(&lost).await;
    daemon.logged("\"board-lost\"").await;
    let began = "leaderboard_snapshot_period SET began_at = '2026-01-01', taken_at = began_at WHERE board = 'other'";
    stage.execute(&format!("UPDATE {began}")).await;
    let again = "SELECT COUNT(*) FROM leaderboard_snapshot_period WHERE board = 'other' AND taken_at > '2026-01-02'";
    eventually("the other board is saved again", async || stage.world.count(again).await == 1).await;
}

#[tokio::test]
async fn a_daemon_warns_once_if_a_board_is_saved_late_again_and_again() {
    let (stage, _) = Stage::with_board("daemon_late", SAVED, "total", &board(9)).await;
    let daemon = stage.world.daemon();
    daemon.logged("\"board-saved\"").await;
    let late = "UPDATE leaderboard_snapshot_period SET taken_at = '2026-01-01', began_at = UTC_TIMESTAMP(6)";
    let saves = || daemon.log().matches("\"board-saved\"").count();
    for _ in 0..3 {
        stage.execute(late).await;
        daemon.logged("\"snapshots-late\"").await;
        let before = saves();
        eventually("the board is saved twice, and is in time", async || saves() >= before + 2).await;
    }
    assert_eq!(daemon.log().matches("\"snapshots-late\"").count(), 1, "{}", daemon.log());
}

#[tokio::test]
async fn a_board_that_can_never_be_saved_is_reported_as_late() {
    let mut stage = Stage::new("daemon_never", SAVED).await;
    // MySQL's column has 255 bytes.
    stage.write(&week("total"), &Board::from([(vec![b'm'; 256], 1.0)])).await;
    let daemon = stage.world.daemon();
    daemon.logged("\"board-not-saved\"").await;
    daemon.logged("\"snapshots-late\"").await;
}

#[tokio::test]
async fn many_archivers_at_once_archive_packed_boards_with_what_comes_late_once() {
    let settings = "[metrics]\nlike = 1\ncomment = 2\n[archive]\npage_members = 50\n\
        [[board]]\nname = \"likes\"\nperiod = \"week\"\nscore = [\"like\", \"comment\"]\ntie = \"second\"\n";
    let mut stage = Stage::new("archive_many", settings).await;
    let at = week("2026-W40");
    let packed = |members: std::ops::Range<u64>, likes: u64, comments: u64| -> Board {
        members.map(|id| (format!("m{id}").into_bytes(), ((likes << 20) + comments) as f64)).collect()
    };
    stage.write(&at, &packed(0..2_000, 5, 7)).await;
    for turn in 0..4 {
        let mut rivals: Vec<_> = (0..4)
            .map(|_| stage.world.command().arg("archive").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
            .collect();
        stage.write(&at, &packed(turn * 700..turn * 700 + 900, 1, 2)).await;
        for rival in &mut rivals {
            let code = rival.wait().unwrap().code();
            assert!([Some(0), Some(75)].contains(&code), "{code:?}");
        }
    }
    assert!(stage.world.tallyd(&["archive"]).status.success());
    stage.holds_all(&at).await;
    assert_eq!(stage.archived(&at).await, stage.ranked(&stage.frozen(&at)).await);
}

#[tokio::test]
async fn the_first_to_get_there_stays_ahead_through_a_loss() {
    let settings = "[[board]]\nname = \"likes\"\nperiod = \"total\"\ntie = \"earliest\"\n";
    let mut stage = Stage::new("restored_earliest", settings).await;
    let at = BoardPeriod { board: "likes".to_owned(), period: "total".to_owned() };
    let client = stage.world.api_server();
    let like = |member: &'static str, likes| {
        let on = OnBoard { board: "likes", member: member.as_bytes() };
        client.add_to_board(on, "like", likes)
    };
    like("a first", 3).await.unwrap();
    assert!(stage.world.tallyd(&["board", "snapshot", "likes"]).status.success());
    stage.lose(&at).await;
    // An all-time board counts time in minutes, so both members have the same time. If two members have equal scores,
    // Redis gives the better place to the member whose name is later in the alphabet.
    let (live, late) = (stage.live(&at), (3_u64 << 26) as f64);
    stage.redis.zadd::<_, _, _, ()>(&live, "second", late).await.unwrap();
    assert!(stage.world.tallyd(&["board", "restore", "likes", "total", "--yes"]).status.success());
    let page = client.board_page(("likes", tallyd_core::period::PeriodKind::Total), 1, 9, Default::default()).await;
    let places: Vec<(Vec<u8>, u64)> =
        page.unwrap().entries.into_iter().map(|entry| (entry.member, entry.columns.unwrap().primary)).collect();
    assert_eq!(places, [(b"a first".to_vec(), 3), (b"second".to_vec(), 3)]);
}
