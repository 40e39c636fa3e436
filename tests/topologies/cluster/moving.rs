//! Hash slots move from one master to another while likes are counted.

use std::collections::BTreeMap;
use std::time::Duration;

use tallyd_core::model::UserId;
use tallyd_core::period::PeriodKind;
use tallyd_redis::ranks::Ranking;

use super::Stage;
use super::common::{Model, World, as_api, eventually, target};
use super::crowd::{Crowd, TARGETS};
use super::nodes::{MASTERS, Nodes};
use crate::common::scripts::Counted;

const BOARDS: &str = "[[board]]\nname = \"videos\"\nperiod = \"day\"\n[[board]]\nname = \"videos\"\nperiod = \"week\"\n\
    [[board]]\nname = \"videos\"\nperiod = \"total\"\n";

/// Begins to move the slot of `key`. Returns the slot and both nodes.
async fn begin_to_move(nodes: &Nodes, key: &str) -> (String, usize, usize) {
    let from = nodes.place_of(key).await;
    let to = (from + 1) % MASTERS;
    (begin_to_move_to(nodes, key, from, to).await, from, to)
}

/// Begins to move the slot of `key` to the node `to`.
pub(super) async fn begin_to_move_to(nodes: &Nodes, key: &str, from: usize, to: usize) -> String {
    let slot = nodes.slot_of(key).await.to_string();
    let (from_id, to_id) = (nodes.id(from).await, nodes.id(to).await);
    nodes.cluster(to, &["SETSLOT", &slot, "IMPORTING", &from_id]).await;
    nodes.cluster(from, &["SETSLOT", &slot, "MIGRATING", &to_id]).await;
    slot
}

/// Ends the move of a slot whose keys have all moved.
async fn end_to_move(nodes: &Nodes, (slot, from, to): (&str, usize, usize)) {
    let to_id = nodes.id(to).await;
    for place in [to, from, (from + 2) % MASTERS] {
        nodes.cluster(place, &["SETSLOT", slot, "NODE", &to_id]).await;
    }
}

/// Moves the slot of `key` to another node, one key after another. After each moved key except the last, waits until
/// Redis redirects a like or asks the client to retry.
async fn move_slot(nodes: &Nodes, world: &World, key: &str) {
    let (slot, from, to) = begin_to_move(nodes, key).await;
    let mut keys: Vec<String> =
        redis::from_redis_value(nodes.cluster(from, &["GETKEYSINSLOT", &slot, "1000"]).await).unwrap();
    // Redis returns the keys in any order. The test moves `key` first, because every like needs this key. A like may
    // not need all of the other keys.
    keys.sort_by_key(|found| found != key);
    assert!(keys.iter().any(|found| found == key) && keys.iter().all(|key| key.starts_with(&world.name)), "{keys:?}");
    for (place, moved) in keys.iter().enumerate() {
        nodes.migrate(from, to, moved).await;
        if place + 1 < keys.len() {
            // Now the board's zsets are on two nodes, so a like can't change all zsets.
            let (again, asked) = (nodes.errors(from, "TRYAGAIN").await, nodes.errors(from, "ASK").await);
            eventually("Redis asks the client to retry a like, or redirects the like", || async {
                // If a like needs only keys that have moved, Redis redirects the like.
                nodes.errors(from, "TRYAGAIN").await > again || (place > 0 && nodes.errors(from, "ASK").await > asked)
            })
            .await;
        }
    }
    let asked = nodes.errors(from, "ASK").await;
    eventually("likes are redirected with ASK", || async { nodes.errors(from, "ASK").await >= asked + 3 }).await;
    let moved = nodes.errors(from, "MOVED").await;
    end_to_move(nodes, (&slot, from, to)).await;
    eventually("a like is redirected with MOVED", || async { nodes.errors(from, "MOVED").await > moved }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_are_counted_once_each_while_slots_move_and_nodes_forget_the_scripts() {
    let stage = Stage::new("cluster_moving", &as_api(BOARDS), &[]).await;
    let crowd = Crowd::new(stage.nodes.api_server(&stage.world), true);
    let (keys, world) = (&stage.world.cache.keys, &stage.world);
    let board = keys.board("videos", "total");
    eventually("the board must be in Redis", || async {
        stage.world.cache.ping().await.is_ok() && has_board(&stage).await
    })
    .await;
    for bucket in [0, 5, 10, 15] {
        move_slot(&stage.nodes, world, &keys.counters("video", bucket)).await;
        // A reconcile scans all buckets on all nodes.
        assert_eq!(world.report(&["reconcile"])["repaired"], 0);
    }
    move_slot(&stage.nodes, world, &board).await;
    for _ in 0..20 {
        for place in 0..MASTERS {
            let before = stage.nodes.errors(place, "NOSCRIPT").await;
            let flush =
                redis::cmd("SCRIPT").arg("FLUSH").query_async::<()>(&mut stage.nodes.connect(place).await).await;
            flush.unwrap();
            eventually("a script is unknown", || async { stage.nodes.errors(place, "NOSCRIPT").await > before }).await;
        }
    }
    let liked = crowd.stop().await.into_iter().map(|liked| liked.unwrap().counted().unwrap());
    let (mut model, mut scores) = (Model::default(), BTreeMap::<Vec<u8>, u64>::new());
    for Counted { event, boards_failed, .. } in liked {
        model.apply(&event);
        if boards_failed == 0 {
            *scores.entry(event.target.id.to_string().into_bytes()).or_default() += 1;
        }
    }
    for period in [PeriodKind::Day, PeriodKind::Week, PeriodKind::Total] {
        let page = stage.client.board_page(("videos", period), 1, 10_000, Ranking::Ordinal).await.unwrap();
        let shown: BTreeMap<_, _> = page.entries.into_iter().map(|entry| (entry.member, entry.score as u64)).collect();
        assert_eq!(shown, scores, "{period}");
    }
    stage.close(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_click_while_its_slot_moves_hides_no_newer_click() {
    let stage = Stage::new("cluster_clicks", &as_api(""), &[]).await;
    let (nodes, keys, mut model) = (&stage.nodes, &stage.world.cache.keys, Model::default());
    let bucket = keys.bucket(target(42));
    let (counters, [recent, _]) = (keys.counters("video", bucket), keys.recent("video", bucket));
    stage.like(&[(target(42), UserId(1), true)], &mut model).await;
    let (slot, from, to) = begin_to_move(nodes, &counters).await;
    // After this move, the counter is on the new node, but the recent clicks are still on the old node. So the client
    // counts a like with a call that needs only the counter's key.
    nodes.migrate(from, to, &counters).await;
    let ahead = tallyd_base::runtime::clock::now().after(Duration::from_secs(60));
    let mut redis = nodes.connect(from).await;
    let newer: i64 =
        redis::cmd("HSET").arg(&recent).arg("42:7").arg(format!("{ahead}-")).query_async(&mut redis).await.unwrap();
    assert_eq!(newer, 1);
    stage.like(&[(target(42), UserId(7), true), (target(42), UserId(8), true)], &mut model).await;
    let clicks: [Option<String>; 2] =
        redis::cmd("HMGET").arg(&recent).arg(&["42:7", "42:8"]).query_async(&mut redis).await.unwrap();
    assert_eq!(clicks[0], Some(format!("{ahead}-")));
    assert!(clicks[1].as_ref().is_some_and(|click| click.ends_with('+')), "{clicks:?}");
    // If Redis makes a new key for recent clicks, this key must have an expiry, too.
    let () = redis::cmd("UNLINK").arg(&recent).query_async(&mut redis).await.unwrap();
    stage.like(&[(target(42), UserId(9), true)], &mut model).await;
    end_to_move(nodes, (&slot, from, to)).await;
    let ttl: i64 = redis::cmd("TTL").arg(&recent).query_async(&mut nodes.connect(to).await).await.unwrap();
    assert!(ttl > 0, "{ttl}");
    stage.close(&model).await;
}

async fn has_board(stage: &Stage) -> bool {
    let page = stage.client.board_page(("videos", PeriodKind::Total), 1, 1, Ranking::Ordinal).await.unwrap();
    page.members == TARGETS
}
