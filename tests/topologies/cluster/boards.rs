//! Tests on a Redis Cluster that a client reads the places of friends, and that a run archives or restores boards.

use std::collections::BTreeSet;

use futures_util::{StreamExt, stream};
use redis::Value;
use sqlx::Row;
use tallyd::jobs::archive::{Archiver, Outcome, Report, Scope};
use tallyd_base::jobs::run::{self, RunOptions};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::progress::ProgressSink;
use tallyd_base::servers::Servers;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_core::period::PeriodKind;
use tallyd_redis::ranks::Ranking;
use tokio_util::sync::CancellationToken;

use super::AT_ONCE;
use super::common::{Dice, World};
use super::nodes::Nodes;
use crate::common::scripts::OnBoard;

const BOARDS: &str =
    "[[board]]\nname = \"videos\"\nperiod = \"week\"\n[[board]]\nname = \"videos\"\nperiod = \"total\"\n";

/// 2026-11-21T12:00:00Z, a Saturday in week 47.
const NOW: Micros = Micros(1_795_262_400_000_000);

/// Computes the place of each member separately. In a competition ranking, the place depends on the number of members
/// with higher scores. In a dense ranking, it depends on the number of different higher scores.
fn placed(board: &[(Vec<u8>, u64)], ranking: Ranking) -> Vec<(u64, Vec<u8>, u64)> {
    let mut board = board.to_vec();
    board.sort_unstable_by(|a, b| (b.1, &b.0).cmp(&(a.1, &a.0)));
    let place = |index: usize, score: u64| {
        let higher = board.iter().map(|(_, other)| *other).filter(|other| *other > score);
        1 + match ranking {
            Ranking::Ordinal => index,
            Ranking::Competition => higher.count(),
            Ranking::Dense => higher.collect::<BTreeSet<_>>().len(),
        } as u64
    };
    board.iter().enumerate().map(|(index, (member, score))| (place(index, *score), member.clone(), *score)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_friends_on_a_cluster_are_placed_among_themselves() {
    let nodes = Nodes::start().await;
    let world = World::new("cluster_friends", &nodes.settings(BOARDS)).await;
    let client = nodes.api_server(&world);
    let mut dice = Dice::of_run(3);
    let scores: Vec<(Vec<u8>, u64)> =
        (0..1_500).map(|id| (format!("m{id}").into_bytes(), 1 + dice.below(40))).collect();
    let add = |(member, score): &(Vec<u8>, u64)| {
        let (client, member, score) = (&client, member.clone(), *score as i64);
        async move {
            client.add_to_board(OnBoard { board: "videos", member: &member }, "like", score).await.unwrap();
        }
    };
    stream::iter(&scores).map(add).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    // Two thirds of the friends are members of the board.
    let among: Vec<(Vec<u8>, u64)> = scores.into_iter().step_by(2).collect();
    let nobody = (0..250).map(|id| format!("nobody{id}").into_bytes());
    let friends: Vec<Vec<u8>> = among.iter().map(|(member, _)| member.clone()).chain(nobody).collect();
    assert_eq!(friends.len(), 1_000);
    for ranking in [Ranking::Ordinal, Ranking::Competition, Ranking::Dense] {
        for period in [PeriodKind::Week, PeriodKind::Total] {
            let entries = client.board_of(("videos", period), &friends, ranking).await.unwrap();
            let shown: Vec<_> =
                entries.into_iter().map(|entry| (entry.place, entry.member, entry.score as u64)).collect();
            assert_eq!(shown, placed(&among, ranking), "{ranking:?}, {period}");
        }
    }
}

async fn archive(world: &World, servers: &Servers, now: Micros) -> Report {
    let mut archiver = Archiver::new(&world.config, Scope::default());
    archiver.now = Some(now);
    let (options, stop) = (RunOptions::default(), CancellationToken::new());
    match run::once(servers, &world.config, &archiver, options, ProgressSink::Log, &stop).await.unwrap() {
        Ran::Ended(report) => report,
        Ran::Held { owner, .. } => panic!("held by {owner}"),
    }
}

async fn archived(world: &World) -> Vec<(Vec<u8>, u64)> {
    let sql = "SELECT member, score FROM leaderboard_archive WHERE period = '2026-W46' ORDER BY place";
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get::<f64, _>(1) as u64)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_board_on_a_cluster_is_archived_merged_with_what_came_late_and_ended() {
    let nodes = Nodes::start().await;
    let settings = format!("[archive]\npage_members = 100\n{BOARDS}");
    let world = World::new("cluster_archive", &nodes.settings(&settings)).await;
    let servers = Servers::new(&world.config).unwrap();
    let at = BoardPeriod { board: "videos".to_owned(), period: "2026-W46".to_owned() };
    let key = world.cache.keys.board(&at.board, &at.period);
    let mut board: Vec<(Vec<u8>, u64)> = (0..3_000).map(|id| (format!("m{id}").into_bytes(), 1 + id % 17)).collect();
    let mut add = redis::cmd("ZADD");
    add.arg(&key);
    for (member, score) in &board {
        add.arg(score).arg(member);
    }
    nodes.command(&add).await;
    let ranked = |board: &[(Vec<u8>, u64)]| -> Vec<(Vec<u8>, u64)> {
        placed(board, Ranking::Ordinal).into_iter().map(|(_, member, score)| (member, score)).collect()
    };

    let report = archive(&world, &servers, NOW).await;
    assert_eq!(report.periods.iter().map(|period| period.outcome).collect::<Vec<_>>(), [Outcome::Archived]);
    assert!(archived(&world).await == ranked(&board), "the archive must be equal to the board");
    for (member, score) in board.iter_mut().step_by(7) {
        nodes.command(redis::cmd("ZINCRBY").arg(&key).arg(100).arg(member.as_slice())).await;
        *score += 100;
    }
    archive(&world, &servers, NOW).await;
    assert!(archived(&world).await == ranked(&board), "the archive must have the late additions");
    let report = archive(&world, &servers, NOW.after(std::time::Duration::from_secs(31 * 86_400))).await;
    assert!(report.periods.iter().any(|period| period.outcome == Outcome::Ended), "{report:#}");
    for key in [&key, &world.cache.keys.frozen_board(&at.board, &at.period)] {
        assert_eq!(nodes.command(redis::cmd("EXISTS").arg(key)).await, Value::Int(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_board_that_a_cluster_lost_is_restored_with_what_was_added_since() {
    let nodes = Nodes::start().await;
    let world = World::new("cluster_restore", &nodes.settings(BOARDS)).await;
    let client = nodes.api_server(&world);
    let add = async |member: &[u8], likes| {
        client.add_to_board(OnBoard { board: "videos", member }, "like", likes).await.unwrap();
    };
    for id in 0..300_i64 {
        add(format!("m{id}").as_bytes(), 1 + id % 17).await;
    }
    let total = world.cache.keys.board("videos", "total");
    let before = nodes.command(redis::cmd("ZRANGE").arg(&total).arg(0).arg(-1).arg("WITHSCORES")).await;
    assert!(world.tallyd(&["board", "snapshot"]).status.success());
    for key in [&total, &world.cache.keys.board_mark("videos", "total")] {
        nodes.command(redis::cmd("DEL").arg(key)).await;
    }
    add(b"new", 1).await;
    assert!(world.tallyd(&["board", "restore", "videos", "total", "--yes"]).status.success());
    assert_eq!(nodes.command(redis::cmd("ZREM").arg(&total).arg("new")).await, Value::Int(1));
    assert_eq!(nodes.command(redis::cmd("ZRANGE").arg(&total).arg(0).arg(-1).arg("WITHSCORES")).await, before);
}
