//! An archive can be limited to the best places, and it can expire.

use redis::AsyncCommands;
use tallyd::jobs::archive::{Archiver, Outcome, Scope};
use tallyd_base::jobs::run::RunReport as _;
use tallyd_base::jobs::runner::RunOutcome;

use super::{DAY, NOW, Stage, WEEKLY, board, outcomes, says, week};

#[tokio::test]
async fn only_the_best_places_are_archived_where_that_is_set() {
    let settings = format!("{WEEKLY}archive_top = 10\n");
    let (mut stage, at) = Stage::with_closed("archive_top", &settings, &board(33)).await;
    let best = stage.ranked(&stage.live(&at)).await[..10].to_vec();
    let report = stage.archive(NOW).await;
    let said = report.periods[0].to_string();
    assert!(said.starts_with("likes 2026-W46: archived, 10 members, 23 left out, in "), "{said}");
    assert_eq!(stage.archived(&at).await, best);

    // After this late write, other members are among the best ten.
    stage.write(&at, &[(b"member-32".to_vec(), 500.0)].into()).await;
    assert_eq!(outcomes(&stage.archive(NOW).await), [("2026-W46", Outcome::Archived)]);
    let frozen = stage.frozen(&at);
    let best = stage.ranked(&frozen).await[..10].to_vec();
    assert_eq!((stage.archived(&at).await, best[0].0.as_slice()), (best.clone(), b"member-32".as_slice()));
    assert_eq!(outcomes(&stage.archive(NOW.after(30 * DAY)).await), [("2026-W46", Outcome::Ended)]);
    stage.restore("2026-W46", NOW.after(30 * DAY)).await.unwrap();
    assert_eq!(stage.ranked(&frozen).await, best);
    assert_eq!(outcomes(&stage.archive(NOW.after(60 * DAY)).await), [("2026-W46", Outcome::Ended)]);
}

#[tokio::test]
async fn a_smaller_archive_leaves_none_of_a_larger_one_behind() {
    let (mut stage, at) = Stage::with_archived("archive_top_less", WEEKLY, &board(33)).await;
    stage.write(&at, &board(1)).await;
    let mut config = stage.world.config.clone();
    config.boards[0].archive_top = 5;
    let mut archiver = Archiver::new(&config, Scope::default());
    archiver.now = Some(NOW);
    let report = stage.run(&archiver).await.unwrap();
    assert_eq!((report.periods[0].members, report.periods[0].left_out), (5, 28));
    assert_eq!(stage.archived(&at).await.len(), 5);
}

#[tokio::test]
async fn an_archive_is_deleted_when_its_time_is_over_and_not_before() {
    let mut stage =
        Stage::new("archive_keep", &format!("{WEEKLY}expire_after = \"1d\"\narchive_keep = \"60d\"\n")).await;
    let [old, newer] = ["2026-W45", "2026-W46"].map(week);
    stage.write(&old, &board(2_500)).await;
    stage.archive(NOW).await;
    stage.write(&newer, &board(30)).await;
    stage.archive(NOW.after(10 * DAY)).await;
    stage.archive(NOW.after(11 * DAY)).await;
    assert_eq!(stage.archive(NOW.after(59 * DAY)).await.periods, []);

    let dry = stage.archive_as(0, &Scope { dry_run: true, ..Scope::default() }, NOW.after(61 * DAY)).await.unwrap();
    assert_eq!(outcomes(&dry), [("2026-W45", Outcome::WouldPrune)]);
    assert_eq!(stage.archived(&old).await.len(), 2_500);
    let report = stage.archive(NOW.after(61 * DAY)).await;
    assert!(report.is_done());
    assert_eq!(outcomes(&report), [("2026-W45", Outcome::Pruned)]);
    assert_eq!(stage.archived(&old).await.len(), 0);
    let freezes = stage.world.cache.keys.board_freezes("likes");
    let mut noted: Vec<String> = stage.redis.hkeys(&freezes).await.unwrap();
    noted.sort_unstable();
    assert_eq!(noted, ["-", "2026-W46"], "the pruned week is forgotten");
    stage.holds(&newer, &board(30)).await;
    assert_eq!(stage.archive(NOW.after(62 * DAY)).await.periods, []);

    // The pruned week must not be archived again or restored.
    stage.write(&old, &board(2)).await;
    let report = stage.archive(NOW.after(62 * DAY)).await;
    says(&report, "2026-W45", "after its archive was deleted");
    assert_eq!(report.outcome(), RunOutcome::Refused, "the run is not due before its next scheduled time");
    assert!(stage.restore("2026-W45", NOW).await.unwrap_err().to_string().contains("the period's archive was deleted"));
}

#[tokio::test]
async fn one_archive_is_read_and_deleted_by_its_key_alone() {
    let mut stage = Stage::new("archive_rows_read", WEEKLY).await;
    for period in ["2026-W44", "2026-W45", "2026-W46"] {
        stage.write(&week(period), &board(2_000)).await;
    }
    stage.archive(NOW).await;
    let of_one = "FROM leaderboard_archive WHERE board = 'likes' AND period = '2026-W45' AND copy = 0 AND place";
    let mut connection = stage.world.pool.acquire().await.unwrap();
    for (sql, rows_max) in [
        (format!("SELECT place, member, score {of_one} > 10 ORDER BY place LIMIT 100"), 150),
        (format!("DELETE {of_one} BETWEEN 1 AND 1000"), 1_100),
    ] {
        let before = rows_read(&mut connection).await;
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.clone())).execute(&mut *connection).await.unwrap();
        let rows = rows_read(&mut connection).await - before;
        assert!((100..=rows_max).contains(&rows), "{sql} reads {rows} rows");
    }
    drop(connection);
}

/// Returns how many rows the connection's statements have read from tables by a key or by a scan.
async fn rows_read(connection: &mut sqlx::MySqlConnection) -> u64 {
    let sql =
        "SHOW SESSION STATUS WHERE Variable_name IN ('Handler_read_key', 'Handler_read_next', 'Handler_read_first')";
    let read: Vec<(String, String)> = sqlx::query_as(sql).fetch_all(connection).await.unwrap();
    read.iter().map(|(_, rows)| rows.parse::<u64>().unwrap()).sum()
}

#[tokio::test]
async fn weeks_are_pruned_whatever_days_there_are() {
    let settings = "[[board]]\nname = \"likes\"\nperiod = \"day\"\n\
        [[board]]\nname = \"likes\"\nperiod = \"week\"\nexpire_after = \"0s\"\narchive_keep = \"60d\"\n";
    let (stage, _) = Stage::with_board("archive_keep_kinds", settings, "2026-W45", &board(3)).await;
    stage.archive(NOW).await;
    // These days were archived earlier, and their archives are kept forever.
    let days: Vec<String> = (0..300)
        .map(|day| {
            format!(
                "('likes', '{:04}-{:02}-{:02}', 'ended', NOW(6), '2020-01-01')",
                2000 + day / 300,
                1 + day / 28,
                1 + day % 28
            )
        })
        .collect();
    let sql = "INSERT INTO leaderboard_period (board, period, state, frozen_at, done_at) VALUES";
    stage.execute(&format!("{sql} {}", days.join(","))).await;
    let of_week = Scope { period: Some("2026-W45".to_owned()), ..Scope::default() };
    let report = stage.run(&stage.archiver(&of_week, NOW.after(61 * DAY))).await.unwrap();
    assert_eq!(outcomes(&report), [("2026-W45", Outcome::Nothing)], "a run for one period deletes no archive");
    let report = stage.archive(NOW.after(61 * DAY)).await;
    assert_eq!(outcomes(&report), [("2026-W45", Outcome::Pruned)]);
}
