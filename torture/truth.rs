//! Reads the final contents of the stores, without the proxies.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result};
use redis::aio::MultiplexedConnection;
use sqlx::MySqlPool;
use tallyd_core::rules::Writes;
use tallyd_redis::Cache;
use tallyd_redis::keys::NO_TARGET;

use crate::checker::{Archive, LIKE, Letter, State, VIEW};
use crate::history::Micros;
use crate::site::Site;

type BoardAt = (String, String);

/// Reads everything.
///
/// # Errors
/// Fails if a server does not answer, or contains data of other programs.
pub async fn read(site: &Site) -> Result<State> {
    let mut state = State::default();
    read_rows(site.pool(), &mut state).await.context("read the tables")?;
    state.repairs = repairs(site).await.context("read the repairs")?;
    state.archives = archives(site.pool()).await.context("read the archives")?;
    state.letters = letters(site.pool()).await.context("read the dead letters")?;
    let (config, mut redis) = (site.admin_config(), site.stack.redis().await?);
    let keys = Cache::new(&config.redis, &config.metrics)?.keys;
    for kind in config.kinds.0.keys() {
        for bucket in 0..keys.buckets() {
            read_bucket(&mut redis, &keys.counters(kind, bucket), &mut state).await?;
        }
    }
    // The board `past` has members on many days.
    let live = format!("{}board:*", config.redis.key_prefix);
    let found: Vec<String> = redis::cmd("KEYS").arg(live).query_async(&mut redis).await?;
    for key in found {
        let Some((at, is_frozen)) = board_of(&key) else { continue };
        let kind: String = redis::cmd("TYPE").arg(&key).query_async(&mut redis).await?;
        if kind == "zset" {
            let scores: Vec<(u64, f64)> =
                redis::cmd("ZRANGE").arg(&key).arg(0).arg(-1).arg("WITHSCORES").query_async(&mut redis).await?;
            let scores = scores.into_iter().map(|(member, score)| (member, whole(score))).collect();
            let boards = if is_frozen { &mut state.frozen } else { &mut state.boards };
            boards.insert(at, scores);
        }
    }
    Ok(state)
}

/// The key is `PREFIX:board:{NAME}:PERIOD`, followed by `:frozen` if the period is closed.
fn board_of(key: &str) -> Option<(BoardAt, bool)> {
    let (_, rest) = key.split_once("board:{")?;
    let (name, period) = rest.split_once("}:")?;
    let at = |period: &str| (name.to_owned(), period.to_owned());
    match period.split_once(':') {
        None => Some((at(period), false)),
        Some((period, "frozen")) => Some((at(period), true)),
        Some(_) => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "scores are whole numbers, far below 2^53")]
fn whole(score: f64) -> i64 {
    score as i64
}

async fn read_rows(pool: &MySqlPool, state: &mut State) -> Result<()> {
    let rows: Vec<(u64, u64, bool, Micros)> = sqlx::query_as(
        "SELECT target_id, user_id, is_del, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED) FROM like_record",
    )
    .fetch_all(pool)
    .await?;
    state.rows = rows.into_iter().map(|(target, user, is_del, at)| ((target, user), (at, !is_del))).collect();
    let counters: Vec<(u64, u8, i64)> = sqlx::query_as(
        "SELECT target_id, metric, CAST(SUM(value) AS SIGNED) FROM counter GROUP BY kind, target_id, metric",
    )
    .fetch_all(pool)
    .await?;
    state.counters = counters.into_iter().map(|(target, metric, value)| ((target, metric), value)).collect();
    let ledger: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT CAST(at_s AS SIGNED), id FROM applied_event").fetch_all(pool).await?;
    let entry = |(at_s, id): (i64, Vec<u8>)| (at_s, <[u8; 16]>::try_from(id).expect("a BINARY(16)"));
    state.ledger = ledger.into_iter().map(entry).collect();
    let sets: Vec<(u64, u8, Micros, i64)> =
        sqlx::query_as("SELECT target_id, metric, at_us, value FROM number_set").fetch_all(pool).await?;
    state.sets = sets.into_iter().map(|(target, metric, at, value)| ((target, metric), (at, value))).collect();
    Ok(())
}

async fn repairs(site: &Site) -> Result<Vec<(u64, u8, Micros)>> {
    let all: Vec<(u64, u8, Micros)> = sqlx::query_as(
        "SELECT target_id, metric, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', repaired_at) AS SIGNED) FROM repair \
         WHERE store = 'redis' AND outcome = 'done'",
    )
    .fetch_all(site.pool())
    .await?;
    let by_daemons = |metric| metric == VIEW || (metric == LIKE && site.likes_by() == Writes::Daemon);
    Ok(all.into_iter().filter(|(_, metric, _)| by_daemons(*metric)).collect())
}

async fn archives(pool: &MySqlPool) -> Result<BTreeMap<BoardAt, Archive>> {
    let periods: Vec<(String, String, String)> =
        sqlx::query_as("SELECT board, period, state FROM leaderboard_period").fetch_all(pool).await?;
    let mut archives: BTreeMap<BoardAt, Archive> = BTreeMap::new();
    for (board, period, state) in periods {
        archives.insert((board, period), Archive { state, is_gapless: true, ..Archive::default() });
    }
    let rows: Vec<(String, String, u32, String, f64)> = sqlx::query_as(
        "SELECT board, period, place, CONVERT(member USING utf8mb4), score FROM leaderboard_archive \
         JOIN leaderboard_period USING (board, period, copy) ORDER BY board, period, place",
    )
    .fetch_all(pool)
    .await?;
    for (board, period, place, member, score) in rows {
        let archive = archives.entry((board, period)).or_default();
        archive.places.push((member.parse().context("a member that no user added")?, whole(score)));
        archive.is_gapless &= archive.places.len() == place as usize;
    }
    Ok(archives)
}

async fn letters(pool: &MySqlPool) -> Result<Vec<Letter>> {
    let rows: Vec<(Vec<u8>, String, bool)> =
        sqlx::query_as("SELECT body, reason, replayed_at IS NOT NULL FROM dead_letter").fetch_all(pool).await?;
    let letter = |(body, reason, is_replayed): (Vec<u8>, String, bool)| {
        let body = String::from_utf8_lossy(&body).into_owned();
        Letter { body, reason, is_replayed }
    };
    Ok(rows.into_iter().map(letter).collect())
}

async fn read_bucket(redis: &mut MultiplexedConnection, key: &str, state: &mut State) -> Result<()> {
    let fields: HashMap<String, String> = redis::cmd("HGETALL").arg(key).query_async(redis).await?;
    if fields.get("_").is_none_or(|loaded| loaded.starts_with('~')) {
        state.unloaded += 1;
    }
    for (field, values) in fields.iter().filter(|(field, _)| !field.starts_with(NO_TARGET)) {
        let target: u64 = field.parse().with_context(|| format!("{key} has a field {field}"))?;
        for (place, value) in values.split(',').enumerate() {
            let value: i64 = value.parse().with_context(|| format!("{key} {field} holds {values}"))?;
            if value != 0 {
                state.redis.insert((target, u8::try_from(place + 1)?), value);
            }
        }
    }
    Ok(())
}
