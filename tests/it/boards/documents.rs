//! Runs the examples of docs/boards.md unchanged: configuration, commands and statements.

use std::fs;
use std::path::Path;

use redis::AsyncCommands;
use sqlx::AssertSqlSafe;
use tallyd_core::period::{Period, PeriodKind};

use super::common::{World, stderr, stdout};
use crate::common::scripts::OnBoard;

/// Returns the code blocks of docs/boards.md that are marked with this language.
fn blocks(language: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/boards.md")).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let found: Vec<String> =
        blocks.filter_map(|block| block.strip_prefix(&format!("{language}\n"))).map(str::to_owned).collect();
    assert!(!found.is_empty(), "{language}");
    found
}

#[tokio::test]
async fn the_boards_of_the_documents_are_archived_saved_and_restored_by_their_commands() {
    let world = World::new("boards_documents", &blocks("toml").concat()).await;
    let client = world.api_server();
    for (member, likes) in [("7", 5), ("42", 9)] {
        let on = OnBoard { board: "videos", member: member.as_bytes() };
        client.add_to_board(on, "like", likes).await.unwrap();
        client.add_to_board(on, "comment", 1).await.unwrap();
    }
    // The page's example commands archive the week of this zset.
    let mut redis = world.redis().await;
    let closed = world.cache.keys.board("videos", "2026-W46");
    let () = redis.zadd(&closed, "7", 3 << 20).await.unwrap();

    let (live, mark) = (world.cache.keys.board("videos", "total"), world.cache.keys.board_mark("videos", "total"));
    let mut ran = Vec::new();
    for line in blocks("sh").iter().flat_map(|block| block.lines()) {
        let Some(arguments) = line.strip_prefix("tallyd ") else { continue };
        let is_lost = line == "tallyd board restore videos total --dry-run";
        if is_lost {
            let () = redis.del(&[&live, &mark, &world.cache.keys.board_freezes("videos")]).await.unwrap();
            client.add_to_board(OnBoard { board: "videos", member: b"7" }, "like", 1).await.unwrap();
            assert!(stdout(&world.tallyd(&["board", "list"])).contains(" lost "));
        }
        if line == "tallyd board restore videos 2026-W46" {
            sqlx::query("UPDATE leaderboard_period SET done_at = done_at - INTERVAL 40 DAY")
                .execute(&world.pool)
                .await
                .unwrap();
            assert!(world.tallyd(&["archive"]).status.success());
        }
        let mut arguments: Vec<&str> = arguments.split(' ').collect();
        // On a terminal this command asks.
        if arguments.contains(&"restore") {
            arguments.push("--yes");
        }
        let output = world.tallyd(&arguments);
        assert!(output.status.success(), "{line}: {}{}", stdout(&output), stderr(&output));
        ran.push((line.to_owned(), stdout(&output)));
    }
    for statement in blocks("sql") {
        let rows = sqlx::query(AssertSqlSafe(statement.clone())).fetch_all(&world.pool).await.unwrap();
        assert!(!rows.is_empty(), "{statement}");
    }
    let said = |line: &str| &ran.iter().rev().find(|(ran, _)| ran == line).unwrap().1;
    assert!(said("tallyd archive --dry-run").contains("videos 2026-W46: would be archived, 1 members"));
    assert!(said("tallyd archive").contains("videos 2026-W46: archived, 1 members"));
    assert!(said("tallyd board restore videos total --dry-run").contains("videos total: would be restored"));
    assert!(said("tallyd board restore videos total").contains("videos total: restored, 2 members, 1 added since"));
    assert!(said("tallyd board restore videos 2026-W46").contains("restored, 1 members"));
    let board: Vec<(String, f64)> = redis.zrevrange_withscores(&live, 0, -1).await.unwrap();
    let score = |likes: u64| f64::from(u32::try_from((likes << 20) + 1).unwrap());
    assert_eq!(board, [("42".to_owned(), score(9)), ("7".to_owned(), score(6))]);
    let saved: Vec<String> =
        sqlx::query_scalar("SELECT period FROM leaderboard_snapshot_period WHERE board = 'videos'")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    let calendar = world.config.boards[0].calendar(jiff::tz::db()).unwrap();
    let today = Period::containing(PeriodKind::Day, tallyd_base::runtime::clock::now(), &calendar).to_string();
    assert!(saved.contains(&"total".to_owned()) && saved.contains(&today), "{saved:?}");
}
