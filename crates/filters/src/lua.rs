//! Bloom filters in Redis: builds new filters, replaces old filters, adds users, and deletes all
//! filters of all kinds and layouts (decision 0046).
//!
//! Every call that changes a filter contains the number of the run, or the expected shape (size and hash count) of the
//! filter. If the run or the shape is outdated, the call does nothing. So a call that arrives twice or late is
//! harmless.

use std::collections::BTreeSet;

use redis::{Pipeline, Value};
use tallyd_core::bloom::{self, Shape};
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Target, UserId};
use tallyd_redis::scan::read_scan;
use tallyd_redis::{Cache, CacheError, Call, Context, PIPELINE_COMMANDS_MAX, Result, Script, text};

static FILTER_BEGIN: Script = Script::new(include_str!("../lua/filter_begin.lua"));
static FILTER_EPOCH: Script = Script::new(include_str!("../lua/filter_epoch.lua"));
static FILTER_WRITE: Script = Script::new(include_str!("../lua/filter_write.lua"));
static FILTER_SWAP: Script = Script::new(include_str!("../lua/filter_swap.lua"));
static FILTER_FOLD: Script = Script::new(include_str!("../lua/filter_fold.lua"));

/// The maximum number of bytes that one call appends. The limit keeps Redis responsive.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// The number of pieces that are in flight at the same time.
const PIECES_AT_ONCE: usize = 8;

const FOLD_USERS: usize = 100;

const DROP_ACTION: &str = "delete all filters";

const SCAN_COUNT: u64 = 1_000;

#[derive(Clone, Debug)]
pub struct Built {
    pub run: u64,
    pub shape: Shape,
    pub expected: u64,
    pub false_positive: f64,
    pub users: u64,
    /// The number of users in the filter that were read from the recent clicks in Redis. Some of these users may also be
    /// counted in `users`.
    pub others: u64,
    pub epoch: u64,
}

/// From then on, scripts note users who like these targets beside the filter, until [`Cache::fold_filter`]. Returns
/// the count of targets, which is smaller only if a later run has begun.
pub(crate) async fn begin_filters(cache: &Cache, kinds: &KindNames, run: u64, targets: &[Target]) -> Result<usize> {
    let call = |target: &Target| {
        let [_, config, _] = cache.filter_keys(kinds, *target);
        Call::new(&FILTER_BEGIN, config).key(cache.next_filter_key(kinds, *target)).number(run)
    };
    let calls: Vec<Call> = targets.iter().map(call).collect();
    let answers = cache.eval("begin to build filters", &calls).await?;
    Ok(answers.iter().filter(|answer| **answer == Value::Int(1)).count())
}

/// Finds the users whose last remembered click on the target was a like, and calls `each` with every such user. The
/// newer hash of clicks is read first, because this hash can become the older hash between the two reads.
pub(crate) async fn recent_likers(
    cache: &Cache,
    kinds: &KindNames,
    target: Target,
    mut each: impl FnMut(UserId),
) -> Result<()> {
    const ACTION: &str = "read recent likes";
    let kind = kinds.get(target.kind).unwrap_or_default();
    let prefix = format!("{}:", target.id);
    for key in cache.keys.recent(kind, cache.keys.bucket(target)) {
        let scan = |cursor: &str| {
            let mut command = redis::cmd("HSCAN");
            command.arg(&key).arg(cursor).arg("MATCH").arg(format!("{prefix}*")).arg("COUNT").arg(SCAN_COUNT);
            command
        };
        let read = |parts: &[Value]| {
            for pair in parts.chunks(2) {
                let [field, click] = pair else { continue };
                let user = text(field).and_then(|field| field.strip_prefix(&prefix)?.parse().ok());
                if let (Some(user), Some(b'+')) = (user, text(click).and_then(|click| click.as_bytes().last())) {
                    each(UserId(user));
                }
            }
        };
        scan_all(cache, ACTION, scan, read).await?;
    }
    Ok(())
}

/// Appends bytes to a filter that `run` is building. `from` is the number of bytes that the filter has so far.
/// Returns false if another run builds the filter now, or if an earlier part is missing.
pub(crate) async fn write_filter(
    cache: &Cache,
    kinds: &KindNames,
    run: u64,
    target: Target,
    from: u64,
    bytes: &[u8],
) -> Result<bool> {
    let [_, config, _] = cache.filter_keys(kinds, target);
    let next = cache.next_filter_key(kinds, target);
    let mut at = from;
    for pieces in bytes.chunks(PIECE_BYTES * PIECES_AT_ONCE) {
        let mut calls = Vec::with_capacity(PIECES_AT_ONCE);
        for piece in pieces.chunks(PIECE_BYTES) {
            let call = Call::new(&FILTER_WRITE, config.clone()).key(next.clone());
            calls.push(call.number(run).number(at).arg(piece));
            at += piece.len() as u64;
        }
        let answers = cache.eval("write a filter", &calls).await?;
        if answers.iter().any(|answer| *answer != Value::Int(1)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Replaces the old filter with the new one. Returns false and changes nothing if another run builds the filter, or
/// if Redis has lost a part of the filter.
pub(crate) async fn swap_filter(cache: &Cache, kinds: &KindNames, target: Target, built: &Built) -> Result<bool> {
    let [filter, config, added] = cache.filter_keys(kinds, target);
    let call = Call::new(&FILTER_SWAP, filter).key(config).key(added).key(cache.next_filter_key(kinds, target));
    let call = call.number(built.run).number(built.shape.size).number(built.shape.iterations).number(built.expected);
    let call = call.arg(bloom::java_double(built.false_positive)).number(built.users).number(built.epoch);
    let call = call.number(built.others);
    let answer = cache.eval("replace a filter", &[call]).await?.pop();
    Ok(answer == Some(Value::Int(1)))
}

/// Returns the number of users that wait no longer. `None` if the filter has another shape, is being built, or lost
/// a part.
pub(crate) async fn fold_filter(cache: &Cache, kinds: &KindNames, target: Target, shape: Shape) -> Result<Option<u64>> {
    const ACTION: &str = "add users to a filter";
    let [filter, config, added] = cache.filter_keys(kinds, target);
    let (mut cursor, mut folded) = ("0".to_owned(), 0);
    loop {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SSCAN").arg(&added).arg(&cursor).arg("COUNT").arg(SCAN_COUNT);
        let (next, members) = scanned(cache, ACTION, &pipeline).await?;
        let users: Vec<UserId> = members.iter().filter_map(|user| text(user)?.parse().ok().map(UserId)).collect();
        let call = |users: &[UserId]| {
            let call = Call::new(&FILTER_FOLD, filter.clone()).key(config.clone()).key(added.clone());
            let call = call.number(shape.size).number(shape.iterations);
            users.iter().fold(call, |call, user| shape.bits(*user).fold(call.number(user), Call::number))
        };
        let calls: Vec<Call> = users.chunks(FOLD_USERS).map(call).collect();
        for answer in cache.eval(ACTION, &calls).await? {
            let Value::Int(taken) = answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
            let Ok(taken) = u64::try_from(taken) else { return Ok(None) };
            folded += taken;
        }
        if next == "0" {
            return Ok(Some(folded));
        }
        cursor = next;
    }
}

/// Makes readers trust only the filters of this epoch, for the next `keep_s` seconds. Returns false if a later run
/// has already called this function.
pub(crate) async fn trust_filters(cache: &Cache, run: u64, epoch: u64, keep_s: u64) -> Result<bool> {
    let call = Call::new(&FILTER_EPOCH, cache.keys.filter_epoch()).number(run).number(epoch).number(keep_s);
    Ok(cache.eval("set which filters are trusted", &[call]).await?.pop() == Some(Value::Int(1)))
}

/// Deletes the keys of all filters and returns the count of keys. A dry run deletes nothing. The call first deletes
/// the epoch, so that readers stop trusting all filters.
pub(crate) async fn drop_all_filters(cache: &Cache, dry_run: bool) -> Result<u64> {
    let epoch = cache.keys.filter_epoch();
    let mut dropped = if dry_run { 0 } else { unlink(cache, std::slice::from_ref(&epoch)).await? };
    let mut counted = BTreeSet::new();
    let (pattern, mut next) = (cache.keys.filters(), cache.begin_scan().await?);
    while let Some(from) = next {
        let keys;
        (keys, next) = cache.scan_names(DROP_ACTION, &pattern, from).await?;
        match dry_run {
            true => counted.extend(keys),
            false => dropped += unlink(cache, &keys).await?,
        }
    }
    Ok(dropped + counted.len() as u64)
}

/// Deletes each key with a separate command, because on a Cluster the keys are in many slots.
async fn unlink(cache: &Cache, keys: &[String]) -> Result<u64> {
    let mut dropped = 0;
    for some in keys.chunks(PIPELINE_COMMANDS_MAX) {
        let mut pipeline = Pipeline::with_capacity(some.len());
        for key in some {
            pipeline.cmd("UNLINK").arg(key);
        }
        for answer in cache.run(DROP_ACTION, &pipeline).await? {
            dropped += u64::from(answer.context(DROP_ACTION)? == Value::Int(1));
        }
    }
    Ok(dropped)
}

async fn scan_all(
    cache: &Cache,
    action: &'static str,
    command: impl Fn(&str) -> redis::Cmd,
    mut read: impl FnMut(&[Value]),
) -> Result<()> {
    let mut cursor = "0".to_owned();
    loop {
        let mut pipeline = Pipeline::new();
        pipeline.add_command(command(&cursor));
        let (next, parts) = scanned(cache, action, &pipeline).await?;
        read(&parts);
        if next == "0" {
            return Ok(());
        }
        cursor = next;
    }
}

async fn scanned(cache: &Cache, action: &'static str, pipeline: &Pipeline) -> Result<(String, Vec<Value>)> {
    let answer = cache.run(action, pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
    let answer = answer.context(action)?;
    let (cursor, found) = read_scan(&answer).ok_or_else(|| CacheError::unexpected(action, &answer))?;
    Ok((cursor.to_owned(), found.to_vec()))
}
