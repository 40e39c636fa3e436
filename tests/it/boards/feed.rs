//! The outbox's additions to boards: one call of lua/board.lua changes many members, and each addition counts once.

use std::collections::BTreeMap;

use redis::AsyncCommands;
use tallyd_core::model::Micros;
use tallyd_redis::feed::{FeedCall, Gain, Place};
use tallyd_redis::refused::Refused;
use tallyd_redis::score::Packing;

use super::common::{Dice, World};

const BOARDS: &str = "[metrics]\nlike = 1\nview = 2\nshare = 4\n\
    [[board]]\nname = \"hot\"\nperiod = \"total\"\nscore = [\"share\", \"view\"]\ntie = \"second\"\n\
    [[board]]\nname = \"hot\"\nperiod = \"day\"\nscore = [\"share\", \"view\"]\ntie = \"second\"\n";

/// 2026-11-21 at 23:59:50 UTC.
const LATE: Micros = Micros(1_795_305_590_000_000);

/// The partition whose rows are added.
const PARTITION: u16 = 3;

struct Addition {
    place: Place,
    at: Micros,
    member: String,
    column: &'static str,
    delta: i64,
}

fn calls(world: &World, additions: &[Addition]) -> Vec<FeedCall> {
    let gains = additions.iter().map(|Addition { place, at, member, column, delta }| {
        let (member, column) = (member.as_bytes().into(), (*column).into());
        (*place, Gain { board: "hot", member, column, delta: *delta, at: *at })
    });
    world.cache.feed_calls(&world.config.boards, PARTITION, gains).unwrap()
}

async fn feed(world: &World, additions: &[Addition]) -> Refused {
    world.cache.feed(calls(world, additions)).await.unwrap()
}

/// Returns the numbers of shares and views of each member.
async fn on_board(world: &World, period: &str) -> BTreeMap<String, (u64, u64)> {
    let scores: BTreeMap<String, f64> =
        world.redis().await.zrange_withscores(world.cache.keys.board("hot", period), 0, -1).await.unwrap();
    let columns = |score| Packing::new(20).unpack(score).unwrap();
    scores.into_iter().map(|(member, score)| (member, (columns(score).primary, columns(score).low))).collect()
}

/// Returns 60 rows with up to 40 additions each. The last 30 rows were written on the next day.
fn rows(dice: &mut Dice) -> Vec<Vec<Addition>> {
    let mut row = |number: u64| -> Vec<Addition> {
        let mut addition = |place| Addition {
            place: (number, place),
            at: Micros(LATE.0 + if number > 30 { 20_000_000 } else { 0 }),
            member: dice.below(9).to_string(),
            column: ["share", "view"][dice.below(2) as usize],
            delta: 1 + dice.below(3).cast_signed(),
        };
        (1..=1 + number as usize % 40).map(&mut addition).collect()
    };
    (1..=60).map(&mut row).collect()
}

#[tokio::test]
async fn additions_that_are_sent_again_in_other_calls_count_once() {
    let world = World::new("board_feed", BOARDS).await;
    let mut dice = Dice::of_run(5);
    let rows = rows(&mut dice);
    let (mut total, mut days) = (BTreeMap::<String, (u64, u64)>::new(), [BTreeMap::new(), BTreeMap::new()]);
    for Addition { place, member, column, delta, .. } in rows.iter().flatten() {
        for board in [&mut total, &mut days[usize::from(place.0 > 30)]] {
            let of = board.entry(member.clone()).or_default();
            *if *column == "share" { &mut of.0 } else { &mut of.1 } += delta.unsigned_abs();
        }
    }
    // All rows before this index have arrived. The daemon starts each pass at such a row, and a pass can break off.
    let mut arrived = 0;
    while arrived < rows.len() {
        let from = dice.below(arrived as u64 + 1) as usize;
        let until = from + 1 + dice.below((rows.len() - from) as u64) as usize;
        let additions: Vec<Addition> =
            rows[from..until].iter().flatten().map(|it| Addition { member: it.member.clone(), ..*it }).collect();
        let mut calls = calls(&world, &additions);
        assert!(calls.len() <= additions.len() / 50 + 2, "{} calls for {} additions", calls.len(), additions.len());
        let is_broken_off = dice.below(2) == 0;
        if is_broken_off {
            calls.truncate(dice.below(calls.len() as u64) as usize);
        } else {
            arrived = arrived.max(until);
        }
        assert_eq!(world.cache.feed(calls).await.unwrap().additions, 0);
    }
    assert_eq!(on_board(&world, "total").await, total);
    assert_eq!([on_board(&world, "2026-11-21").await, on_board(&world, "2026-11-22").await], days);
}

fn views(deltas: &[i64]) -> Vec<Addition> {
    let addition = |(place, delta): (usize, &i64)| Addition {
        place: (7, place),
        at: LATE,
        member: place.to_string(),
        column: "view",
        delta: *delta,
    };
    (1..).zip(deltas).map(addition).collect()
}

#[tokio::test]
async fn a_call_adds_nothing_while_the_call_before_it_is_missing() {
    let world = World::new("board_feed_gap", BOARDS).await;
    let additions = views(&[1; 60]);
    let mut later = calls(&world, &additions);
    let first = later.remove(0);
    assert_eq!(later.len(), 1);
    let error = world.cache.feed(later).await.unwrap_err().to_string();
    assert_eq!(error, "add to a board");
    assert_eq!(on_board(&world, "total").await, BTreeMap::new());
    world.cache.feed(vec![first]).await.unwrap();
    assert_eq!(on_board(&world, "total").await.len(), 50);
    feed(&world, &additions).await;
    assert_eq!(on_board(&world, "total").await, (1..=60).map(|member| (member.to_string(), (0, 1))).collect());
}

#[tokio::test]
async fn a_score_that_is_full_does_not_stop_its_neighbours() {
    let world = World::new("board_feed_full", BOARDS).await;
    let refused = feed(&world, &views(&[1, 1 << 20, 3])).await;
    let error = refused.error.unwrap();
    assert!(error.contains("the second number of 2 in") && error.contains("no longer fits"), "{error}");
    assert_eq!(refused.additions, 1);
    let expected = BTreeMap::from([("1".to_owned(), (0, 1)), ("3".to_owned(), (0, 3))]);
    assert_eq!(on_board(&world, "total").await, expected);
    // The daemon does not repeat a refused addition.
    assert_eq!(feed(&world, &views(&[1, 1 << 20, 3])).await.additions, 0);
    assert_eq!(on_board(&world, "total").await, expected);
}

#[tokio::test]
async fn a_key_of_another_type_refuses_each_addition_of_a_call() {
    let world = World::new("board_feed_type", BOARDS).await;
    let () = world.redis().await.set(world.cache.keys.board("hot", "2026-11-21"), "text").await.unwrap();
    let refused = feed(&world, &views(&[1, 2, 3])).await;
    assert_eq!(refused.additions, 3);
    assert!(refused.error.unwrap().contains("WRONGTYPE"));
    assert_eq!(on_board(&world, "total").await, BTreeMap::new());
}
