//! lua/board.lua and the Rust code pack the same two columns into the same score.

use std::collections::BTreeMap;

use redis::AsyncCommands;
use serde::Deserialize;
use tallyd_connect::fate::Fate;
use tallyd_core::model::BoardPeriod;
use tallyd_redis::boards::Changed;
use tallyd_redis::score::{Columns, Packing, Rule, Tie};

use super::common::{Dice, World};

#[derive(Deserialize)]
struct Vector {
    low_bits: u32,
    primary: String,
    low: String,
    /// The expected score, or `None` if the call must fail.
    score: Option<String>,
}

/// Calls lua/board.lua with a single key. Returns the member's new score, or the error.
async fn add(
    redis: &mut redis::aio::MultiplexedConnection,
    key: &str,
    deltas: (i64, i64),
    rule: (&str, u32),
    time: (i64, i64),
) -> Result<String, String> {
    let script = redis::Script::new(include_str!("../../../lua/board.lua"));
    let mut call = script.key(key);
    call.arg("m").arg(deltas.0).arg(deltas.1).arg(rule.0).arg(rule.1).arg(time.0).arg(time.1);
    let answer: Result<Vec<String>, _> = call.invoke_async(redis).await;
    answer.map(|scores| scores[0].clone()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn lua_and_rust_pack_the_shared_vectors_the_same_way() {
    let world = World::new("score_vectors", "").await;
    let mut redis = world.redis().await;
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../../vectors/scores.json")).unwrap();
    for (number, Vector { low_bits, primary, low, score }) in vectors.iter().enumerate() {
        let columns = Columns { primary: primary.parse().unwrap(), low: low.parse().unwrap() };
        let packed = Packing::new(*low_bits).pack(columns).ok();
        assert_eq!(packed, score.as_ref().map(|score| score.parse().unwrap()), "{primary}, {low}");
        if let Some(packed) = packed {
            assert_eq!(Packing::new(*low_bits).unpack(packed), Some(columns));
        }
        let key = format!("{}:board:{{v}}:{number}", world.name);
        let deltas = (primary.parse().unwrap(), low.parse().unwrap());
        match add(&mut redis, &key, deltas, ("second", *low_bits), (0, 0)).await {
            Ok(lua) => assert_eq!(Some(&lua), score.as_ref(), "{primary}, {low}"),
            Err(error) => {
                assert!(score.is_none(), "{error}");
                assert!(error.contains(&format!("of m in {key} no longer fits")), "{error}");
                assert!(!redis.exists::<_, bool>(&key).await.unwrap(), "a failed call must not create the key");
            }
        }
    }
}

#[tokio::test]
async fn any_additions_end_as_the_two_columns_say() {
    let world = World::new("score_random", "").await;
    let mut redis = world.redis().await;
    let mut dice = Dice::of_run(11);
    let key = format!("{}:board:{{v}}:r", world.name);
    let mut model: Option<(i64, i64)> = None;
    for _ in 0..400 {
        let deltas = (dice.below(2_001) as i64 - 900, dice.below(400_001) as i64 - 150_000);
        let (primary, second) = model.unwrap_or_default();
        let (primary, second) = ((primary + deltas.0).max(0), (second + deltas.1).max(0));
        let answer = add(&mut redis, &key, deltas, ("second", 20), (0, 0)).await;
        match answer {
            Ok(score) if (primary, second) == (0, 0) => {
                assert_eq!(score, "0");
                model = None;
            }
            Ok(score) => {
                let columns = Packing::new(20).unpack(score.parse().unwrap()).unwrap();
                assert_eq!((columns.primary as i64, columns.low as i64), (primary, second));
                model = Some((primary, second));
            }
            Err(error) => assert!(second >= 1 << 20, "{error}: {primary}, {second}"),
        }
    }
}

#[tokio::test]
async fn of_two_equals_the_one_who_got_there_first_is_ahead() {
    let world = World::new("score_earliest", "").await;
    let mut redis = world.redis().await;
    let key = format!("{}:board:{{v}}:e", world.name);
    let now = world.cache.now().await.unwrap().0 / 1_000_000;
    let left = |score: String| Packing::new(20).unpack(score.parse().unwrap()).unwrap();
    let first = left(add(&mut redis, &key, (5, 0), ("earliest", 20), (now + 1_000, 1)).await.unwrap());
    assert!(first.primary == 5 && (990..=1_000).contains(&first.low), "{first:?}");
    // The score contains the time from the addition to the end of the period. For the second addition, this time is
    // shorter than for the first addition.
    let later = left(add(&mut redis, &key, (1, 0), ("earliest", 20), (now + 900, 1)).await.unwrap());
    assert!(later.primary == 6 && (890..=900).contains(&later.low), "{later:?}");
    let untouched = left(add(&mut redis, &key, (0, 0), ("earliest", 20), (now + 500, 1)).await.unwrap());
    assert_eq!(untouched, later, "an addition of zero must not change the member's time");
    let late = left(add(&mut redis, &key, (1, 0), ("earliest", 20), (now - 5, 1)).await.unwrap());
    assert_eq!((late.primary, late.low), (7, 0), "after the end of the period the time must be zero");
    let far = left(add(&mut redis, &key, (1, 0), ("earliest", 20), (now + (1 << 30), 1)).await.unwrap());
    assert_eq!(far.low, (1 << 20) - 1, "a longer time must become the greatest time that fits 20 bits");
    assert_eq!(add(&mut redis, &key, (-9, 0), ("earliest", 20), (now, 1)).await.unwrap(), "0");
    assert!(!redis.exists::<_, bool>(&key).await.unwrap());
    assert!(add(&mut redis, &key, (1, 0), ("latest", 20), (0, 1)).await.unwrap_err().contains("is none of"));
    let () = redis.zadd(&key, "m", 500).await.unwrap();
    let foreign = add(&mut redis, &key, (1, 0), ("earliest", 20), (now, 1)).await.unwrap_err();
    assert!(foreign.contains("was not made by this tie"), "{foreign}");
    let () = redis.zadd(&key, "m", 0.5).await.unwrap();
    assert!(add(&mut redis, &key, (1, 0), ("second", 20), (0, 0)).await.unwrap_err().contains("was not made by"));
}

#[tokio::test]
async fn an_addition_that_does_not_fit_one_zset_changes_none() {
    let world = World::new("score_all", "").await;
    let mut redis = world.redis().await;
    let keys = [format!("{}:board:{{v}}:a", world.name), format!("{}:board:{{v}}:b", world.name)];
    let script = redis::Script::new(include_str!("../../../lua/board.lua"));
    let mut call = script.key(&keys[0]);
    call.key(&keys[1]).arg("m").arg(5).arg(300).arg("second");
    // The second column has 20 bits in the first zset and 8 bits in the second zset.
    call.arg(20).arg(0).arg(0).arg(8).arg(0).arg(0);
    let error = call.invoke_async::<Vec<String>>(&mut redis).await.unwrap_err().to_string();
    assert!(error.contains(&format!("the second number of m in {} no longer fits", keys[1])), "{error}");
    for key in &keys {
        assert!(!redis.exists::<_, bool>(key).await.unwrap());
    }
}

#[tokio::test]
async fn what_comes_late_is_added_column_by_column() {
    let world = World::new("score_merge", "").await;
    let mut redis = world.redis().await;
    let at = |period: &str| BoardPeriod { board: "likes".to_owned(), period: period.to_owned() };
    let pack = |primary, low| Packing::new(20).pack(Columns { primary, low }).unwrap();
    let merged = async |redis: &mut redis::aio::MultiplexedConnection, period: &str, tie| {
        let (live, frozen) = (world.cache.keys.board("likes", period), world.cache.keys.frozen_board("likes", period));
        for (key, member, score) in
            [(&frozen, "a", pack(5, 900_000)), (&live, "a", pack(2, 100_000)), (&live, "b", pack(1, 7))]
        {
            let () = redis.zadd(key, member, score).await.unwrap();
        }
        world.cache.claim_board("likes", 1, &[]).await.unwrap();
        let rule = Rule { tie, packing: Packing::new(20) };
        assert_eq!(world.cache.merge_late(&at(period), 1, 10, rule).await.unwrap(), Changed::Done(2));
        let scores: BTreeMap<String, f64> =
            redis.zrange_withscores(&frozen, 0, -1).await.map(BTreeMap::from_iter::<Vec<(String, f64)>>).unwrap();
        scores.into_values().map(|score| rule.columns(score).unwrap()).collect::<Vec<_>>()
    };
    let columns = |primary, low| Columns { primary, low };
    assert_eq!(merged(&mut redis, "2026-W01", Tie::Second).await, [columns(7, 1_000_000), columns(1, 7)]);
    assert_eq!(merged(&mut redis, "2026-W02", Tie::Earliest).await, [columns(7, 100_000), columns(1, 7)]);
    // The frozen zset has a plain score, from before the board had a tie-breaker. The merge must not unpack this score.
    let (live, frozen) =
        (world.cache.keys.board("likes", "2026-W04"), world.cache.keys.frozen_board("likes", "2026-W04"));
    let () = redis.zadd(&frozen, "a", 500).await.unwrap();
    let () = redis.zadd(&live, "a", pack(1, 7)).await.unwrap();
    let rule = Rule { tie: Tie::Earliest, packing: Packing::new(20) };
    let error = world.cache.merge_late(&at("2026-W04"), 1, 10, rule).await.unwrap_err();
    assert!(format!("{:#}", anyhow::Error::from(error)).contains("was not made by the board's tie"));
    // If the sum of two scores doesn't fit, the merge changes neither score. The error names the score.
    let (live, frozen) =
        (world.cache.keys.board("likes", "2026-W03"), world.cache.keys.frozen_board("likes", "2026-W03"));
    let () = redis.zadd(&frozen, "a", pack(5, 1_000_000)).await.unwrap();
    let () = redis.zadd(&live, "a", pack(2, 100_000)).await.unwrap();
    let () = redis.zadd(&live, "b", pack(3, 1)).await.unwrap();
    let rule = Rule { tie: Tie::Second, packing: Packing::new(20) };
    let moved = world.cache.merge_late(&at("2026-W03"), 1, 10, rule).await.unwrap();
    assert_eq!(moved, Changed::Done(1), "such a member holds no other one up");
    let error = world.cache.merge_late(&at("2026-W03"), 1, 10, rule).await.unwrap_err();
    assert_eq!(error.fate(), Fate::Item, "the other boards continue");
    assert!(format!("{:#}", anyhow::Error::from(error)).contains("no longer holds what came late"));
    assert_eq!(redis.zscore::<_, _, f64>(&live, "a").await.unwrap(), pack(2, 100_000));
}
