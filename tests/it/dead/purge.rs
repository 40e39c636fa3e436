//! Deletes dead letters.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;
use tallyd_core::event::Reason;

use super::{assert_exits, film, ids, letter, open, put};
use crate::common::{World, stderr};

/// Adds dead letters with the ids 1 to `count` to the table. Every second letter is replayed, every fourth letter has
/// another reason, and the first half of the letters is old.
async fn fill(world: &World, count: u64) {
    let now = tallyd_base::runtime::clock::now();
    let letters: Vec<_> = (1..=count)
        .map(|id| {
            let reason = if id % 4 == 0 { Reason::AtTooOld } else { Reason::UnknownKind };
            let age = if id <= count / 2 { 40 * 86_400 } else { 60 };
            letter(&film(id, 1), reason, now.before(Duration::from_secs(age)))
        })
        .collect();
    put(world, &letters).await;
    let sql = "UPDATE dead_letter SET replayed_at = NOW(6) WHERE id % 2 = 0";
    sqlx::query(sql).execute(&world.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_never_replayed_is_deleted_only_by_number_or_with_open() {
    let world = World::new("dead_purge", "").await;
    fill(&world, 16).await;
    let purge = |arguments: &[&str]| world.report(&[&["dead", "purge", "--yes"], arguments].concat());
    let report = |dry_run: bool, deleted: u64, open_left: u64| json!({ "dry_run": dry_run, "deleted": deleted, "open_left": open_left, "stopped": false });

    assert_eq!(purge(&["--older-than", "30d", "--dry-run"]), report(true, 4, 4));
    assert_eq!(purge(&["--older-than", "30d", "--open", "--dry-run"]), report(true, 8, 0));
    assert_eq!(purge(&["1", "2", "2", "--dry-run"]), report(true, 2, 0));
    assert_eq!(ids(&world).await.len(), 16);

    assert_eq!(purge(&["--older-than", "30d", "--reason", "at-too-old"]), report(false, 2, 0));
    let output = world.tallyd(&["dead", "purge", "--yes", "--older-than", "30d"]);
    assert_exits(&output, 0, "2 dead letters deleted\n4 more were never replayed and are kept: --open");
    assert_eq!(purge(&["1", "3", "3"]), report(false, 2, 0));
    assert_eq!(purge(&["--reason", "unknown-kind", "--older-than", "30d", "--open"]), report(false, 2, 0));
    let left: Vec<u64> = ids(&world).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(left, (9..=16).collect::<Vec<_>>());
    assert_eq!(purge(&["--replayed"]), report(false, 4, 4));
    assert_eq!(open(&world).await, 4);
    assert_eq!(ids(&world).await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_that_is_killed_is_gone_on_with() {
    let world = World::new("dead_purge_killed", "").await;
    fill(&world, 1_000).await;
    let killed = world
        .command()
        .args(["dead", "purge", "--yes", "--replayed"])
        .env("TALLYD_FAULT_POINT", "dead:deleted")
        .output()
        .unwrap();
    assert!(stderr(&killed).contains("fault-point"), "{}", stderr(&killed));
    assert_eq!(ids(&world).await.len(), 900, "one statement must delete a hundred letters");
    assert_exits(&world.tallyd(&["dead", "purge", "--yes", "--replayed"]), 0, "400 dead letters deleted");
    assert_eq!((open(&world).await, ids(&world).await.len()), (500, 500));
}

/// Runs a command in a terminal, and types `answers`.
fn on_a_terminal(world: &World, arguments: &str, answers: &str) -> std::process::Output {
    let (program, config) = (env!("CARGO_BIN_EXE_tallyd"), world.config_path());
    let line = format!("{program} --config {} {arguments}", config.display());
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(answers.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_it_is_asked_first() {
    let world = World::new("dead_purge_asked", "").await;
    fill(&world, 8).await;
    let question = "delete 6 dead letters, 4 of which were never replayed\r\nway back: none\r\ncontinue? [y/N]";
    for answer in ["n\n", "\n", "what\n"] {
        let output = on_a_terminal(&world, "dead purge --reason unknown-kind --open", answer);
        assert_exits(&output, 1, question);
        assert_exits(&output, 1, "nothing was changed");
    }
    assert_eq!(ids(&world).await.len(), 8);
    let output = on_a_terminal(&world, "dead purge --reason unknown-kind --open", "y\n");
    assert_exits(&output, 0, "6 dead letters deleted");
    let output = on_a_terminal(&world, "dead purge --replayed --yes", "");
    assert_exits(&output, 0, "2 dead letters deleted");
    assert_eq!(ids(&world).await, []);
}
