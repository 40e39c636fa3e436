//! If a clock is wrong, an archive run must not archive a period that still gets writes, and must not delete an
//! archive.

use std::path::PathBuf;

use tallyd::jobs::archive::Outcome;
use tallyd_core::card::Card;
use tallyd_core::model::BoardPeriod;
use tallyd_core::period::{Calendar, Period, PeriodKind};
use tallyd_mysql::card::CardRow;

use super::{DAY, NOW, Stage, WEEKLY, board, outcomes, says};
use crate::common::stdout;

const DAILY: &str = "[[board]]\nname = \"likes\"\nperiod = \"day\"\nexpire_after = \"0s\"\narchive_keep = \"60d\"\n";

/// The path of the library libfaketime from Debian's package, which dev/test installs.
fn libfaketime() -> PathBuf {
    let folders = std::fs::read_dir("/usr/lib").unwrap();
    let libraries = folders.map(|folder| folder.unwrap().path().join("faketime/libfaketimeMT.so.1"));
    libraries.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("libfaketime is missing"))
}

#[tokio::test]
async fn a_shell_whose_clock_is_ahead_freezes_and_prunes_nothing() {
    let mut stage = Stage::new("clocks_ahead", DAILY).await;
    let today = Period::containing(PeriodKind::Day, tallyd_base::runtime::clock::now(), &Calendar::UTC);
    let before = today.previous().and_then(Period::previous).unwrap();
    let [today, before] =
        [today, before].map(|period| BoardPeriod { board: "likes".to_owned(), period: period.to_string() });
    stage.write(&before, &board(20)).await;
    assert!(stage.world.tallyd(&["archive"]).status.success());
    assert_eq!(stage.state(&before).await.as_deref(), Some("ended"));
    stage.write(&today, &board(30)).await;
    let stored = stage.everything().await;
    for (command, ahead) in [("archive", "+3d"), ("archive", "+100d"), ("snapshot", "+3d")] {
        let arguments = if command == "archive" { vec!["archive"] } else { vec!["board", "snapshot"] };
        let mut tallyd = stage.world.command();
        tallyd.args(arguments).env("LD_PRELOAD", libfaketime()).env("FAKETIME", ahead);
        let output = tallyd.env("FAKETIME_DONT_FAKE_MONOTONIC", "1").output().unwrap();
        assert!(stage.everything().await == stored, "{command} {ahead}");
        assert!(!output.status.success(), "{command} {ahead}");
        let said = stdout(&output);
        assert!(said.contains("the clocks of this host, MySQL and Redis differ by"), "{said}");
    }
    assert!(stage.world.tallyd(&["archive"]).status.success());
}

#[tokio::test]
async fn a_snapshot_from_the_future_does_not_delay_the_next_one() {
    let (stage, _) = Stage::with_saved("clocks_future", WEEKLY, &board(30)).await;
    stage
        .execute("UPDATE leaderboard_snapshot_period SET began_at = began_at + INTERVAL 1 DAY, taken_at = began_at")
        .await;
    assert_eq!(outcomes(&stage.save_due(NOW.after(DAY / 48)).await), [("2026-W47", Outcome::Saved)]);
    assert_eq!(outcomes(&stage.save_due(NOW.after(DAY / 48)).await), [], "the snapshot must be treated as new");
    let sql = "SELECT COUNT(*) FROM leaderboard_snapshot_period WHERE began_at < '2026-11-21 13:00:00'";
    assert_eq!(stage.world.count(sql).await, 1);
}

#[tokio::test]
async fn a_board_with_another_time_zone_in_the_card_stays_open() {
    let (mut stage, at) = Stage::with_closed("archive_zone", WEEKLY, &board(30)).await;
    let mut card = Card::from(&stage.world.config);
    card.boards[0].time_zone = "America/New_York".to_owned();
    let row = |number, card: &Card| CardRow { number, text: card.encode(), by: "other".to_owned() };
    assert!(stage.store.replace_site_card(None, &row(1, &card)).await.unwrap());
    let report = stage.archive(NOW).await;
    assert_eq!(outcomes(&report), [("2026-W46", Outcome::Kept)]);
    says(&report, "2026-W46", "another time_zone or week_starts in the site card");
    assert!(stage.exists(&stage.live(&at)).await && stage.state(&at).await.is_none());

    let own = Card::from(&stage.world.config);
    assert!(stage.store.replace_site_card(Some(1), &row(2, &own)).await.unwrap());
    assert_eq!(outcomes(&stage.archive(NOW).await), [("2026-W46", Outcome::Archived)]);
}
