//! Runs crates/redis/lua/apply.lua on a real Redis, and checks its marks. A mark is the last outbox row that a bucket
//! includes.

use std::collections::BTreeSet;

use tallyd_core::model::{Addition, Kind, Metric};
use tallyd_core::outbox::{CORRECTIONS, OutboxOffsets};
use tallyd_redis::Cache;
use tallyd_redis::apply::Left;
use tallyd_redis::counters::Size;
use tallyd_redis::keys::KindNames;

use super::common::{Dice, World, target};
use super::{FORWARD, METRICS, Numbers, VIEW, in_redis};

fn add(id: u64, metric: Metric, delta: i64) -> Addition {
    Addition { target: target(id), metric, delta }
}

/// Adds rows of the outbox to Redis, as the daemon does.
async fn apply(world: &World, cache: &Cache, partition: u16, rows: &[(u64, Vec<Addition>)]) -> Left {
    let kinds = KindNames::new(&world.config.kinds);
    let mut applying = cache.applying(&kinds, partition, 0, rows);
    while !applying.is_done() {
        cache.apply_some(&mut applying).await.unwrap();
    }
    let applied = applying.ended();
    applied.failed.unwrap();
    assert_eq!(applied.behind, BTreeSet::new());
    applied.left
}

async fn marks(world: &World, id: u64) -> String {
    let names = KindNames::new(&world.config.kinds);
    let samples = world.cache.sample(&names, &[(target(id), VIEW)]).await.unwrap();
    samples[0].as_ref().unwrap().offsets.to_string()
}

async fn rows_once(name: &str, settings: &str) {
    let world = World::new(name, &format!("[redis]\nbucket_bits = 0\n{settings}\n{METRICS}")).await;
    let rows = [
        (1, vec![add(1, VIEW, 5), add(2, FORWARD, 7)]),
        (2, vec![add(1, VIEW, -5), add(1, FORWARD, 2), add(3, VIEW, 1)]),
        (4, vec![add(2, FORWARD, -9), add(3, VIEW, -1)]),
    ];
    apply(&world, &world.cache, 2, &rows[..1]).await;
    assert_eq!(marks(&world, 1).await, "2:1");
    // The same rows arrive again, in different parts.
    apply(&world, &world.cache, 2, &rows).await;
    apply(&world, &world.cache, 2, &rows[1..2]).await;
    apply(&world, &world.cache, 2, &rows[..1]).await;
    apply(&world, &world.cache, 2, &rows).await;
    let mut expected = Numbers::from([((1, 5), 2), ((2, 5), -2)]);
    assert_eq!(in_redis(&world, &world.cache, 3).await, expected);
    // Each partition has its own mark.
    apply(&world, &world.cache, 0, &[(9, vec![add(1, VIEW, 1)])]).await;
    apply(&world, &world.cache, 1, &[(3, vec![add(1, VIEW, 1)])]).await;
    apply(&world, &world.cache, CORRECTIONS, &[(1, vec![add(2, FORWARD, 3)])]).await;
    apply(&world, &world.cache, 6, &[(2, vec![add(1, VIEW, 1)])]).await;
    // The partitions of a map have much larger numbers than the partitions above. In this loop, the partitions 60,007
    // and 60,001 each send one row two times.
    for map in [60_007, 60_001, 60_007, 60_001] {
        apply(&world, &world.cache, map, &[(5, vec![add(1, VIEW, 1)])]).await;
    }
    expected = [((1, 3), 5), ((1, 5), 2), ((2, 5), 1)].into();
    assert_eq!(in_redis(&world, &world.cache, 3).await, expected);
    let sampled = OutboxOffsets::parse(&marks(&world, 1).await).unwrap();
    assert_eq!(sampled, OutboxOffsets::parse("0:9,1:3,2:4,6:2,60001:5,60007:5,65535:1").unwrap());
    let sizes = world.cache.bucket_sizes("video", &[VIEW, FORWARD], 0..1).await.unwrap();
    // Twelve fields of the bucket are not counters: `_o`, eight marks, `_m`, and two marks of maps. The field `_` is
    // missing.
    let (targets, numbers) = if world.cache.is_packed() { (2, 3) } else { (0, 0) };
    assert_eq!(sizes, [Size { fields: targets + 12, numbers }]);
}

#[tokio::test]
async fn a_row_that_comes_twice_or_late_is_added_once() {
    rows_once("outbox_rows", "").await;
}

#[tokio::test]
async fn a_row_that_comes_twice_or_late_is_added_once_in_other_layouts() {
    rows_once("outbox_rows_entity", "layout = \"entity\"").await;
    rows_once("outbox_rows_string", "layout = \"string\"").await;
}

#[tokio::test]
async fn rows_up_to_the_marks_of_a_load_are_never_added_to_its_buckets() {
    let world = World::new("outbox_load", &format!("[redis]\nbucket_bits = 1\n{METRICS}")).await;
    let ids: Vec<u64> = (1..20).collect();
    let there = |bucket| ids.iter().copied().find(|id| world.cache.keys.bucket(target(*id)) == bucket).unwrap();
    let (first, second) = (there(0), there(1));
    apply(&world, &world.cache, 0, &[(5, vec![add(first, VIEW, 5)])]).await;
    let outbox = OutboxOffsets::parse("0:3,2:7").unwrap();
    let lost = world.cache.begin_load(("video", Kind(1)), &[VIEW], 1, 0, 1_000, &outbox).await.unwrap();
    assert_eq!((marks(&world, first).await, marks(&world, second).await), ("0:5,2:7".to_owned(), "0:3,2:7".to_owned()));
    assert_eq!(lost.values, [((target(first), VIEW), 5)].into());
    // These rows arrive late. MySQL committed these rows before the load, so the sums that the load read from MySQL
    // already include the rows.
    let late = [add(first, VIEW, 100), add(second, VIEW, 100)].to_vec();
    apply(&world, &world.cache, 2, &[(7, late.clone())]).await;
    apply(&world, &world.cache, 0, &[(3, late)]).await;
    apply(&world, &world.cache, 0, &[(4, vec![add(first, VIEW, 10), add(second, VIEW, 10)])]).await;
    let redis = in_redis(&world, &world.cache, 20).await;
    assert_eq!(redis, [((first, 3), 5), ((second, 3), 10)].into());
    assert_eq!(world.cache.end_load("video", 1, 0..2).await.unwrap(), 2);
    let again = world.cache.begin_load(("video", Kind(1)), &[VIEW], 2, 0, 1_000, &outbox).await.unwrap();
    assert_eq!(again.buckets().count(), 0);
    // When Redis loses a bucket, it loses the marks together with the counters.
    let mut redis = world.redis().await;
    let _: i64 = redis::cmd("DEL").arg(world.cache.keys.counters("video", 0)).query_async(&mut redis).await.unwrap();
    assert_eq!((marks(&world, first).await, marks(&world, second).await), (String::new(), "0:4,2:7".to_owned()));
    apply(&world, &world.cache, 0, &[(6, vec![add(first, VIEW, 1)])]).await;
    let found = in_redis(&world, &world.cache, 20).await;
    assert_eq!(found, [((first, 3), 1), ((second, 3), 10)].into());
}

#[tokio::test]
async fn what_is_no_number_is_left_alone_and_its_neighbours_are_added() {
    let world = World::new("outbox_hand", &format!("[redis]\nbucket_bits = 0\n{METRICS}")).await;
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("video", 0);
    for (id, text) in [(1, "x"), (2, "1,,2"), (3, "1e3"), (4, "7,8")] {
        let _: i64 = redis::cmd("HSET").arg(&key).arg(id).arg(text).query_async(&mut redis).await.unwrap();
    }
    let row = (1..=5).map(|id| add(id, VIEW, 1)).chain([add(6, Metric(99), 2)]).collect();
    let left = apply(&world, &world.cache, 0, &[(1, row)]).await;
    assert_eq!(left, Left { no_numbers: 3, ..Left::default() });
    let texts: Vec<String> = redis::cmd("HMGET").arg(&key).arg(&[1, 2, 3, 4, 5]).query_async(&mut redis).await.unwrap();
    assert_eq!(texts, ["x", "1,,2", "1e3", "7,8,1", "0,0,1"]);
    let of_nobody =
        Addition { target: tallyd_core::model::Target { kind: Kind(99), ..target(1) }, metric: VIEW, delta: 1 };
    let left = apply(&world, &world.cache, 0, &[(2, vec![of_nobody])]).await;
    assert_eq!(left, Left { unknown: 1, ..Left::default() });
}

/// Damages a bucket in several ways. Another bucket must get its numbers.
async fn damaged_buckets(name: &str, settings: &str) {
    let world = World::new(name, &format!("[redis]\nbucket_bits = 1\n{settings}\n{METRICS}")).await;
    let mut redis = world.redis().await;
    let there = |bucket| (1..).find(|id| world.cache.keys.bucket(target(*id)) == bucket).unwrap();
    let (damaged, other) = (there(0), there(1));
    let key = world.cache.keys.counters("video", 0);
    let mark = |text: &str| redis::cmd("HSET").arg(&key).arg("_0").arg(text).to_owned();
    let list = redis::cmd("RPUSH").arg(&key).arg("a hand").to_owned();
    let mut rows = Vec::new();
    for damage in [list, mark("-5"), mark(&format!("1{}", "0".repeat(20)))] {
        rows.push((1 + rows.len() as u64, vec![add(damaged, VIEW, 7), add(other, VIEW, 1)]));
        let _: i64 = redis::cmd("DEL").arg(&key).query_async(&mut redis).await.unwrap();
        let _: i64 = damage.query_async(&mut redis).await.unwrap();
        let left = apply(&world, &world.cache, 0, &rows).await;
        assert_eq!(left, Left { no_buckets: 1, ..Left::default() });
    }
    let _: i64 = redis::cmd("DEL").arg(&key).query_async(&mut redis).await.unwrap();
    if !world.cache.is_packed() {
        let number = world.cache.keys.place("video", target(damaged), VIEW).key;
        let _: i64 = redis::cmd("RPUSH").arg(&number).arg("a hand").query_async(&mut redis).await.unwrap();
        assert_eq!(apply(&world, &world.cache, 0, &rows).await, Left { no_numbers: 1, ..Left::default() });
        let _: i64 = redis::cmd("DEL").arg(&number).query_async(&mut redis).await.unwrap();
    }
    let numbers = in_redis(&world, &world.cache, damaged.max(other)).await;
    assert_eq!(numbers, [((other, VIEW.0), 3)].into());
}

#[tokio::test]
async fn a_bucket_that_a_hand_damaged_holds_up_no_other_bucket() {
    damaged_buckets("outbox_damaged", "").await;
    damaged_buckets("outbox_damaged_entity", "layout = \"entity\"").await;
    damaged_buckets("outbox_damaged_string", "layout = \"string\"").await;
}

async fn largest_numbers(name: &str, settings: &str) {
    const MAX: i64 = (1 << 53) - 1;
    let world = World::new(name, &format!("[redis]\nbucket_bits = 0\n{settings}\n{METRICS}")).await;
    let (mut dice, mut value, mut number) = (Dice::of_run(53), 0, 0);
    let mut values = vec![-MAX, MAX, MAX - 1, -MAX + 1, 3, MAX, -2, -MAX];
    values.extend((0..100).map(|_| i64::try_from(dice.below(1 << 54)).unwrap() - MAX));
    for next in values {
        number += 1;
        // Target 1 has only one counter. Target 2 has two counters.
        let row = vec![add(1, VIEW, next - value), add(2, VIEW, 1), add(2, FORWARD, next - value)];
        apply(&world, &world.cache, 0, &[(number, row)]).await;
        value = next;
        let of_two = i64::try_from(number).unwrap();
        let mut expected = Numbers::from([((1, 3), value), ((2, 3), of_two), ((2, 5), value)]);
        expected.retain(|_, value| *value != 0);
        assert_eq!(in_redis(&world, &world.cache, 2).await, expected);
    }
}

#[tokio::test]
async fn differences_beyond_what_a_double_holds_are_exact() {
    largest_numbers("outbox_large", "").await;
    largest_numbers("outbox_large_string", "layout = \"string\"").await;
}

#[tokio::test]
async fn a_bucket_of_thousands_is_added_whole() {
    let world = World::new("outbox_thousands", &format!("[redis]\nbucket_bits = 0\n{METRICS}")).await;
    let rows: Vec<(u64, Vec<Addition>)> =
        (1..=9).map(|row| (row, (1..=5_000).map(|id| add(id, VIEW, 1 + (id % 3).cast_signed())).collect())).collect();
    apply(&world, &world.cache, 0, &rows).await;
    apply(&world, &world.cache, 0, &rows).await;
    let expected: Numbers = (1..=5_000_u64).map(|id| ((id, 3), 9 * (1 + (id % 3).cast_signed()))).collect();
    assert_eq!(in_redis(&world, &world.cache, 5_000).await, expected);
}

/// Makes rows with up to five additions each, to random targets out of sixty.
fn some_rows(dice: &mut Dice, count: u64) -> Vec<(u64, Vec<Addition>)> {
    let addition = |dice: &mut Dice| {
        let metric = if dice.percent(70) { VIEW } else { FORWARD };
        add(1 + dice.below(60), metric, dice.below(9).cast_signed() - 4)
    };
    (1..=count).map(|row| (3 * row, (0..dice.below(6)).map(|_| addition(dice)).collect())).collect()
}

fn sums(rows: &[(u64, Vec<Addition>)]) -> Numbers {
    let mut sums = Numbers::new();
    for addition in rows.iter().flat_map(|(_, additions)| additions) {
        *sums.entry((addition.target.id.0, addition.metric.0)).or_default() += addition.delta;
    }
    sums.retain(|_, sum| *sum != 0);
    sums
}

/// Two daemons read the same rows and add the rows to Redis. Some daemons are killed before they have added all rows,
/// and some of their calls run late.
#[tokio::test]
async fn passes_that_overlap_break_off_or_run_late_add_rows_once() {
    let world = World::new("outbox_overlap", &format!("[redis]\nbucket_bits = 4\n{METRICS}")).await;
    let kinds = KindNames::new(&world.config.kinds);
    let mut dice = Dice::of_run(5);
    let mut expected = Numbers::new();
    for partition in 0..6 {
        let rows = some_rows(&mut dice, 80);
        sums(&rows).into_iter().for_each(|(of, sum)| *expected.entry(of).or_default() += sum);
        let (mut added, mut late) = ([0; 2], Vec::new());
        while added[0] < rows.len() || added[1] < rows.len() {
            let daemon = dice.below(2) as usize;
            let from = added[daemon];
            let until = rows.len().min(from + 1 + dice.below(12) as usize);
            let after = from.checked_sub(1).map_or(0, |last| rows[last].0);
            let mut pass = world.cache.applying(&kinds, partition, after, &rows[from..until]);
            if dice.percent(30) {
                late.push(pass);
                continue;
            }
            while !pass.is_done() {
                world.cache.apply_some(&mut pass).await.unwrap();
                if dice.percent(20) {
                    break;
                }
            }
            if pass.is_done() {
                let applied = pass.ended();
                applied.failed.unwrap();
                assert_eq!(applied.left, Left::default());
                added[daemon] = until;
            }
            if dice.percent(30)
                && let Some(mut pass) = late.pop()
            {
                world.cache.apply_some(&mut pass).await.unwrap();
            }
        }
        for mut pass in late {
            world.cache.apply_some(&mut pass).await.unwrap();
        }
        expected.retain(|_, sum| *sum != 0);
        assert_eq!(in_redis(&world, &world.cache, 60).await, expected, "partition {partition}");
    }
}

#[tokio::test]
async fn a_bucket_with_some_rows_of_a_pass_gets_the_others_alone() {
    let world = World::new("outbox_partly", &format!("[redis]\nbucket_bits = 0\n{METRICS}")).await;
    let rows =
        [(5, vec![add(1, VIEW, 1)]), (6, vec![add(1, VIEW, 10), add(2, FORWARD, -3)]), (8, vec![add(1, VIEW, 100)])];
    apply(&world, &world.cache, 0, &rows[..1]).await;
    assert_eq!(apply(&world, &world.cache, 0, &rows).await, Left::default());
    assert_eq!(in_redis(&world, &world.cache, 2).await, [((1, 3), 111), ((2, 5), -3)].into());
    // After a restore of MySQL, row 8 is missing, although the mark is at row 8. So the daemon can't know which rows
    // the bucket includes.
    let left = apply(&world, &world.cache, 0, &[(7, vec![add(1, VIEW, 7)]), (9, vec![add(1, VIEW, 1_000)])]).await;
    assert_eq!(left, Left { unknown_marks: 1, ..Left::default() });
    assert_eq!(in_redis(&world, &world.cache, 2).await, [((1, 3), 1_111), ((2, 5), -3)].into());
    // The first addition makes its counter negative, and the last addition makes a counter with sixteen digits.
    let huge = [(10, vec![add(1, VIEW, -2_000), add(2, FORWARD, 3), add(3, VIEW, 4_000_000_000_000_000)])];
    apply(&world, &world.cache, 0, &huge).await;
    assert_eq!(in_redis(&world, &world.cache, 3).await, [((1, 3), -889), ((3, 3), 4_000_000_000_000_000)].into());
}

#[tokio::test]
async fn a_load_raises_the_marks_of_maps_and_keeps_what_is_higher() {
    let world = World::new("outbox_map_marks", &format!("[redis]\nbucket_bits = 0\n{METRICS}")).await;
    for (map, row) in [(60_001, 9), (60_002, 3)] {
        apply(&world, &world.cache, map, &[(row, vec![add(1, VIEW, 1)])]).await;
    }
    let read = OutboxOffsets::parse("1:4,60001:5,60002:8,60099:7,65535:2").unwrap();
    world.cache.begin_load(("video", Kind(1)), &[VIEW], 7, 0, 1_000, &read).await.unwrap();
    assert_eq!(marks(&world, 1).await, "1:4,60001:9,60002:8,60099:7,65535:2");
    // The load includes row 7, so only row 8 is added.
    apply(&world, &world.cache, 60_099, &[(7, vec![add(1, VIEW, 1)]), (8, vec![add(1, VIEW, 1)])]).await;
    assert_eq!(in_redis(&world, &world.cache, 1).await, Numbers::from([((1, 3), 3)]));
}
