//! Runs `tallyd board` as a user does.

use redis::AsyncCommands;
use tallyd_core::period::{Calendar, Period, PeriodKind};

use super::common::{World, stderr, stdout};

const BOARDS: &str = "[[board]]\nname = \"likes\"\nperiod = \"week\"\narchive_grace = \"0s\"\n\
    [[board]]\nname = \"likes\"\nperiod = \"total\"\n\
    [[board]]\nname = \"users\"\nperiod = \"day\"\n";

/// Fills a zset. The members b and c have equal scores.
async fn fill(world: &World, board: &str, period: &str) {
    let key = world.cache.keys.board(board, period);
    let mut redis = world.redis().await;
    for (member, score) in [("a", 9), ("b", 5), ("c", 5), ("d,e", 1)] {
        let () = redis.zadd(&key, member, score).await.unwrap();
    }
}

#[tokio::test]
async fn boards_are_listed_and_shown_from_wherever_they_are() {
    let world = World::new("board_command", BOARDS).await;
    let this_week = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC);
    let (now, last) = (this_week.to_string(), this_week.previous().unwrap().to_string());
    for (board, period) in [("likes", now.as_str()), ("likes", last.as_str()), ("likes", "total")] {
        fill(&world, board, period).await;
    }
    let top = |arguments: &[&str]| world.tallyd(&[&["board", "top"], arguments].concat());
    let places = |arguments: &[&str]| {
        let report: serde_json::Value =
            serde_json::from_str(&stdout(&top(&[arguments, &["--format", "json"]].concat()))).unwrap();
        let entries = report["entries"].as_array().unwrap();
        let entry = |entry: &serde_json::Value| {
            (entry["place"].as_u64().unwrap(), entry["member"].as_str().unwrap().to_owned())
        };
        (report["from"].as_str().unwrap().to_owned(), entries.iter().map(entry).collect::<Vec<_>>())
    };
    let expected =
        |numbers: [u64; 4]| numbers.into_iter().zip(["a", "c", "b", "d,e"].map(str::to_owned)).collect::<Vec<_>>();
    assert_eq!(places(&["likes", "total"]), ("redis".to_owned(), expected([1, 2, 3, 4])));
    assert_eq!(places(&["likes", &now, "--ranking", "competition"]), ("redis".to_owned(), expected([1, 2, 2, 4])));

    let closed = stdout(&world.tallyd(&["board", "list"]));
    assert!(closed.lines().any(|line| line.split_whitespace().take(4).eq(["likes", &last, "closed", "4"])), "{closed}");
    assert!(world.tallyd(&["archive"]).status.success());
    for ranking in [("competition", [1, 2, 2, 4]), ("dense", [1, 2, 2, 3])] {
        let shown = places(&["likes", &last, "--ranking", ranking.0]);
        assert_eq!(shown, ("mysql".to_owned(), expected(ranking.1)), "{}", ranking.0);
    }
    let csv = stdout(&top(&["likes", &last, "--csv", "--count", "2"]));
    assert_eq!(csv, "place,member,score,primary,second\n1,a,9.0,,\n2,c,5.0,,\n");

    let list = stdout(&world.tallyd(&["board", "list"]));
    let lines: Vec<Vec<&str>> = list.lines().skip(1).map(|line| line.split_whitespace().take(4).collect()).collect();
    let today = Period::containing(PeriodKind::Day, tallyd_base::runtime::clock::now(), &Calendar::UTC).to_string();
    assert_eq!(
        lines,
        [
            vec!["likes", &now, "open", "4"],
            vec!["likes", &last, "done", "4"],
            vec!["likes", "total", "open", "4"],
            vec!["users", &today, "open", "0"],
        ]
    );
    assert!(list.lines().nth(1).unwrap().contains("  in "), "{list}");
}

#[tokio::test]
async fn what_can_not_be_shown_is_said_and_is_a_mistake_of_usage() {
    let world = World::new("board_usage", BOARDS).await;
    for (arguments, said) in [
        (vec!["top", "film"], "no board is called \"film\"; configured boards: likes, users"),
        (vec!["top", "likes"], "likes has periods of several lengths (week, total): name a period"),
        (vec!["top", "likes", "2026-11"], "likes has no periods of the length month"),
        (vec!["top", "likes", "yesterday"], "is not a period"),
        (vec!["top", "users", "--count", "0"], "0 is not in 1..=100000"),
        (vec!["archive", "--period", "total", "--yes"], "the period total never ends, so tallyd does not archive it"),
    ] {
        let archive = arguments.first() == Some(&"archive");
        let before: &[&str] = if archive { &[] } else { &["board"] };
        let output = world.tallyd(&[before, arguments.as_slice()].concat());
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
}
