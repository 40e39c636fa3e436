//! An archive run can be limited to some boards, can be a dry run, and can be stopped.

use tallyd::jobs::archive::{Outcome, Scope, ScopeError};
use tallyd_base::jobs::run::Ended;
use tallyd_base::jobs::run::RunReport as _;
use tallyd_core::model::BoardPeriod;
use tokio_util::sync::CancellationToken;

use super::{Board, DAY, NOW, Stage, WEEKLY, board, outcomes, week};
use crate::common::eventually;

#[tokio::test]
async fn a_dry_run_changes_nothing_and_says_what_would_be_done() {
    let mut stage = Stage::new("archive_dry", WEEKLY).await;
    let [fresh, again, waiting, over, open] = ["2026-W46", "2026-W45", "2026-W44", "2026-W43", "2026-W47"].map(week);
    stage.write(&over, &board(4)).await;
    stage.archive(NOW.before(30 * DAY).after(7 * DAY)).await;
    for at in [&again, &waiting] {
        stage.write(at, &board(5)).await;
    }
    stage.archive(NOW.before(DAY)).await;
    stage.execute("UPDATE leaderboard_period SET done_at = done_at - INTERVAL 31 DAY WHERE period = '2026-W43'").await;
    stage.write(&fresh, &board(6)).await;
    stage.write(&again, &board(1)).await;
    stage.write(&open, &board(7)).await;
    let before = stage.everything().await;

    let report = stage.archive_as(0, &Scope { dry_run: true, ..Scope::default() }, NOW).await.unwrap();

    assert_eq!(stage.everything().await, before);
    assert!(!report.is_done());
    assert_eq!(
        outcomes(&report),
        [
            ("2026-W47", Outcome::Open),
            ("2026-W46", Outcome::WouldArchive),
            ("2026-W45", Outcome::WouldArchive),
            ("2026-W44", Outcome::Waiting),
            ("2026-W43", Outcome::WouldEnd),
        ]
    );
    let said = format!("{report:#}");
    for line in [
        "likes 2026-W47: open (until 2026-11-23T01:00:00Z)",
        "likes 2026-W46: would be archived, 6 members",
        "likes 2026-W45: would be archived, 5 members, 1 late",
        "likes 2026-W44: waiting, 5 members (until 2026-12-20T12:00:00Z)",
        "likes 2026-W43: would be ended, 4 members",
        "boards: 1 waiting, 2 would be archived, 1 would be ended, 1 open",
    ] {
        assert!(said.lines().any(|said| said == line), "{line}\n{said}");
    }
}

#[tokio::test]
async fn one_board_or_one_period_can_be_asked_for() {
    let more = "[[board]]\nname = \"posts\"\nperiod = \"week\"\n";
    let mut stage = Stage::new("archive_scope", &format!("{WEEKLY}{more}")).await;
    let likes = ["2026-W46", "2026-W45"].map(week);
    let posts = BoardPeriod { board: "posts".to_owned(), period: "2026-W46".to_owned() };
    let old = week("2011-W01");
    for at in likes.iter().chain([&posts, &old]) {
        stage.write(at, &board(5)).await;
    }
    let run = stage.take().await;
    let stage = stage;
    let asked = async |board: Option<&str>, period: Option<&str>| {
        let (board, period) = (board.map(str::to_owned), period.map(str::to_owned));
        stage.archive_as(run, &Scope { board, period, dry_run: false }, NOW).await
    };

    let report = asked(Some("likes"), Some("2026-W45")).await.unwrap();
    assert_eq!(outcomes(&report), [("2026-W45", Outcome::Archived)]);
    let report = asked(Some("posts"), None).await.unwrap();
    assert_eq!((outcomes(&report), report.periods[0].board.as_str()), (vec![("2026-W46", Outcome::Archived)], "posts"));
    // This week is so old that a run without options does not check it.
    let report = asked(None, Some("2011-W01")).await.unwrap();
    assert_eq!(outcomes(&report), [("2011-W01", Outcome::Archived), ("2011-W01", Outcome::Nothing)]);
    for (board, period, expected) in [
        (Some("like"), None, "no board is called \"like\""),
        (None, Some("2026-46"), "is not a period"),
        (Some("likes"), Some("2026-W47"), "likes 2026-W47 is not closed"),
        (None, Some("2026-10"), "the requested boards have no periods of that length"),
    ] {
        let error = asked(board, period).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error:#}");
        assert!(error.downcast_ref::<ScopeError>().is_some());
    }
    stage.holds(&likes[0], &Board::new()).await;
}

#[tokio::test]
async fn a_stop_ends_a_run_between_two_pages_and_the_next_one_finishes() {
    let (stage, at) = Stage::with_closed("archive_stop", &WEEKLY.replace("= 7", "= 1"), &board(1_000)).await;
    let run = stage.take().await;
    let stop = CancellationToken::new();
    let running = stage.rival(run, stage.archiver(&Scope::default(), NOW), &stop);
    eventually("the run copies the board", async || stage.rows().await > 0).await;
    stop.cancel();
    let report = running.await.unwrap().unwrap();
    assert!(report.head.ended == Ended::Stopped && !report.is_done(), "{report:#}");
    let copied = stage.rows().await;
    assert!(copied < 1_000, "{copied}");
    stage.end_lease().await;
    assert!(stage.archive(NOW).await.is_done());
    stage.holds_all(&at).await;
}
