//! An erase also removes members from boards. In open zsets the members are deleted. In archives the members are
//! renamed, and keep their places and scores.

use redis::AsyncCommands;
use serde_json::json;
use sqlx::Row;
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_core::period::{Calendar, Period, PeriodKind};
use tallyd_core::tally::Tally;

use super::{USER, erase, named, report};
use crate::common::{World, stderr};

/// Returns the settings of a board of users. API servers write its scores. Archived weeks stay in Redis for
/// `expire_after`.
fn settings(expire_after: &str) -> String {
    format!(
        "[[board]]\nname = \"people\"\nperiod = \"week\"\narchive_grace = \"0s\"\nexpire_after = \"{expire_after}\"\n"
    )
}

/// Returns the current week and the last week.
fn weeks() -> [BoardPeriod; 2] {
    let now = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC);
    [now, now.previous().unwrap()].map(|period| BoardPeriod { board: "people".to_owned(), period: period.to_string() })
}

/// The users to erase have the same score as the users before and after them. So the erase must find the right places
/// among equal scores.
const SCORES: [(u64, f64); 8] = [
    (90_000_000_000, 5.0),
    (USER.0, 5.0),
    (SECOND, 5.0),
    (1, 5.0),
    (3, 9.0),
    (4, 2.0),
    (5, 2.0),
    (80_000_000_000, 2.0),
];

const SECOND: u64 = 60_060_060_006;

async fn fill(world: &World, at: &BoardPeriod) {
    let mut redis = world.redis().await;
    for (user, score) in SCORES {
        let key = world.cache.keys.board(&at.board, &at.period);
        let () = redis.zadd(key, user.to_string(), score).await.unwrap();
    }
}

/// Returns the tally of the archived rows, and the checksum that was stored with them.
async fn tally(world: &World, at: &BoardPeriod) -> (Tally, u64) {
    let sql = "SELECT a.member, a.score, p.checksum FROM leaderboard_archive AS a JOIN leaderboard_period AS p \
               USING (board, period) WHERE a.copy = p.copy AND board = ? AND period = ?";
    let rows = sqlx::query(sql).bind(&at.board).bind(&at.period).fetch_all(&world.pool).await.unwrap();
    let members: Vec<BoardMember> =
        rows.iter().map(|row| BoardMember { member: row.get(0), score: row.get(1) }).collect();
    let mut tally = Tally::default();
    tally.add_members(&members);
    (tally, rows[0].get(2))
}

/// Returns the archived members, ordered by place. Fails if the archive is incomplete or does not match its checksum.
async fn archived(world: &World, at: &BoardPeriod) -> Vec<(String, f64)> {
    let sql = "SELECT a.place, a.member, a.score, p.members, p.checksum FROM leaderboard_archive AS a \
               JOIN leaderboard_period AS p USING (board, period) \
               WHERE a.copy = p.copy AND board = ? AND period = ? ORDER BY place";
    let rows = sqlx::query(sql).bind(&at.board).bind(&at.period).fetch_all(&world.pool).await.unwrap();
    let places: Vec<u32> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(places, (1..=rows.len() as u32).collect::<Vec<_>>());
    let members: Vec<BoardMember> =
        rows.iter().map(|row| BoardMember { member: row.get(1), score: row.get(2) }).collect();
    let mut tally = Tally::default();
    tally.add_members(&members);
    assert_eq!((tally.members, tally.checksum), (rows[0].get(3), rows[0].get(4)), "the checksum");
    members.into_iter().map(|member| (String::from_utf8(member.member).unwrap(), member.score)).collect()
}

#[track_caller]
fn succeeds(world: &World, arguments: &[&str]) {
    let output = world.tallyd(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_keeps_the_place_and_can_be_restored_and_ended() {
    let mut world = World::new("erase_board", &settings("1h")).await;
    world.publisher().await;
    let [open, closed] = weeks();
    for at in [&open, &closed] {
        fill(&world, at).await;
    }
    succeeds(&world, &["board", "snapshot", "people"]);
    succeeds(&world, &["archive"]);
    let before = archived(&world, &closed).await;
    assert_eq!(before.len(), SCORES.len());

    for (user, name) in [(USER.0, "0"), (SECOND, "0:1")] {
        let dry = report(&erase(&world, &["--user", &user.to_string(), "--board", "people", "--dry-run"]), 0);
        let erased = report(&erase(&world, &["--user", &user.to_string(), "--board", "people"]), 0);
        for erased in [dry, erased] {
            assert_eq!((&erased["places"], &erased["zsets"], &erased["saved"]), (&json!(1), &json!(2), &json!(1)));
        }
        assert_eq!(named(&world, user).await, [] as [String; 0]);
        let after = archived(&world, &closed).await;
        let scores = |board: &[(String, f64)]| board.iter().map(|(_, score)| *score).collect::<Vec<_>>();
        assert_eq!(scores(&after), scores(&before), "every place must keep its score");
        assert!(after.contains(&(name.to_owned(), 5.0)), "{after:?}");
    }
    // The archiver removes a zset only if the zset is equal to the archived rows.
    world.set(&settings("0s"));
    succeeds(&world, &["archive"]);
    let state = "SELECT COUNT(*) FROM leaderboard_period WHERE state = 'ended'";
    assert_eq!(world.count(state).await, 1);
    succeeds(&world, &["board", "restore", "people", &closed.period, "--yes"]);
    let mut redis = world.redis().await;
    let frozen = world.cache.keys.frozen_board(&closed.board, &closed.period);
    let restored: Vec<(String, f64)> = redis.zrevrange_withscores(frozen, 0, -1).await.unwrap();
    assert_eq!(restored, archived(&world, &closed).await);
    succeeds(&world, &["archive"]);
    assert_eq!(world.count(state).await, 1);

    let live: Vec<String> = redis.zrange(world.cache.keys.board(&open.board, &open.period), 0, -1).await.unwrap();
    assert_eq!(live.len(), SCORES.len() - 2, "the other users stay on the open board");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_was_changed_loses_the_name_and_stays_wrong() {
    let world = World::new("erase_board_bad", &settings("1h")).await;
    world.publisher().await;
    let [_, closed] = weeks();
    fill(&world, &closed).await;
    succeeds(&world, &["archive"]);
    sqlx::query("UPDATE leaderboard_archive SET score = 8 WHERE score = 9").execute(&world.pool).await.unwrap();
    let erased = report(&erase(&world, &["--user", &USER.to_string(), "--board", "people"]), 0);
    assert_eq!(erased["places"], 1);
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
    let (members, checksum) = tally(&world, &closed).await;
    assert_eq!(members.members, SCORES.len() as u64);
    assert_ne!(members.checksum, checksum, "the erase must not hide the change");
}
