//! Compares every row, every counter and every number in Redis with the clicks.

use std::collections::HashMap;

use anyhow::{Context, Result};
use futures_util::TryStreamExt;
use sqlx::Row;
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};

use crate::model::{Model, Pair, State, TARGETS};
use crate::play::Played;
use crate::servers::Servers;
use crate::traffic::{ARTICLE, Site, VIDEO, name};
use crate::week::Archived;

/// The maximum number of differences that are printed in words. Further differences are only counted.
const NAMED_MAX: usize = 5;

/// The numbers of pairs, likes and targets of one kind in one store.
#[derive(Default)]
pub struct View {
    /// The number of pairs of a user and a target, in the clicks or in the rows. Counters have no pairs.
    pub pairs: u64,
    /// The sum of all targets' likes.
    pub likes: i64,
    /// The number of targets that have at least one like.
    pub targets: u64,
    /// The number of pairs, or of targets, whose stored data is wrong according to the clicks.
    pub different: u64,
}

/// One kind of targets in all stores.
pub struct Compared {
    pub kind: Kind,
    pub clicked: View,
    pub rows: View,
    pub counters: View,
    pub redis: View,
    /// The number of counters of the kind that reconciles have changed.
    pub repairs: u64,
}

/// The result of the comparison.
pub struct Comparison {
    pub kinds: Vec<Compared>,
    pub dead_letters: u64,
    pub archived: Option<Archived>,
    /// The number of members with a wrong score on the all-time board.
    pub hall: Option<u64>,
    /// The first differences, in words.
    pub named: Vec<String>,
}

/// Reads all stores and compares them with the clicks.
pub async fn compare(site: &Site, servers: &Servers, played: &Played) -> Result<Comparison> {
    let (mut kinds, mut named) = (Vec::new(), Vec::new());
    for kind in [VIDEO, ARTICLE] {
        kinds.push(compare_kind(site, servers, kind, &mut named).await?);
    }
    let dead_letters: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM dead_letter")
        .fetch_one(&servers.mysql)
        .await
        .context("count the dead letters")?;
    let archived = match &played.week {
        Some(week) => Some(week.archived(servers).await?),
        None => None,
    };
    let hall = match &played.hall {
        Some(hall) => Some(hall.different(servers).await?),
        None => None,
    };
    Ok(Comparison { kinds, dead_letters: dead_letters.unsigned_abs(), archived, hall, named })
}

async fn compare_kind(site: &Site, servers: &Servers, kind: Kind, named: &mut Vec<String>) -> Result<Compared> {
    let rows = compare_rows(site, servers, kind, named).await?;
    let counters = compare_likes(site, kind, &mysql_likes(servers, kind).await?, "counter", named);
    let redis = compare_likes(site, kind, &servers.redis_likes(kind).await?, "Redis", named);
    let repairs: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM repair WHERE kind = ? AND outcome = 'done'")
        .bind(kind.0)
        .fetch_one(&servers.mysql)
        .await
        .context("count the repairs")?;
    Ok(Compared { kind, clicked: clicked(&site.model(), kind), rows, counters, redis, repairs: repairs.unsigned_abs() })
}

fn clicked(model: &Model, kind: Kind) -> View {
    let likes = model.likes.iter().filter(|(target, _)| target.kind == kind).map(|(_, likes)| *likes);
    View { pairs: model.pairs_of(kind), ..sums(likes) }
}

async fn compare_rows(site: &Site, servers: &Servers, kind: Kind, named: &mut Vec<String>) -> Result<View> {
    let mut view = View::default();
    let mut likes: HashMap<Target, i64> = HashMap::new();
    let mut found = 0;
    let mut rows = sqlx::query(
        "SELECT target_id, user_id, is_del, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED) \
         FROM like_record WHERE kind = ?",
    )
    .bind(kind.0)
    .fetch(&servers.mysql);
    while let Some(row) = rows.try_next().await.context("read like_record")? {
        let target = Target { kind, id: TargetId(row.try_get(0)?) };
        let pair = Pair { target, user: UserId(row.try_get(1)?) };
        let state = State { at: Micros(row.try_get(3)?), liked: !row.try_get::<bool, _>(2)? };
        view.pairs += 1;
        *likes.entry(target).or_default() += i64::from(state.liked);
        let clicked = site.model().pairs.get(&pair).copied();
        found += u64::from(clicked.is_some());
        if clicked != Some(state) {
            view.different += 1;
            name_difference(named, || {
                format!(
                    "like_record: the row of {} {} and user {} is {state:?}, but the last click was {clicked:?}",
                    name(kind),
                    target.id,
                    pair.user
                )
            });
        }
    }
    let missing = site.model().pairs_of(kind) - found;
    if missing > 0 {
        view.different += missing;
        name_difference(named, || format!("like_record: {missing} rows of {}s are missing", name(kind)));
    }
    Ok(View { pairs: view.pairs, different: view.different, ..sums(likes.into_values()) })
}

async fn mysql_likes(servers: &Servers, kind: Kind) -> Result<HashMap<u64, i64>> {
    sqlx::query("SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter WHERE kind = ? GROUP BY target_id")
        .bind(kind.0)
        .fetch_all(&servers.mysql)
        .await
        .context("read counter")?
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
}

fn compare_likes(site: &Site, kind: Kind, likes: &HashMap<u64, i64>, store: &str, named: &mut Vec<String>) -> View {
    let model = site.model();
    let mut view = sums(likes.values().copied());
    let last = u64::from(TARGETS);
    let unknown = likes.keys().copied().filter(|id| !(1..=last).contains(id));
    for id in (1..=last).chain(unknown) {
        let clicked = model.likes_of(Target { kind, id: TargetId(id) });
        let has = likes.get(&id).copied().unwrap_or_default();
        if has != clicked {
            view.different += 1;
            name_difference(named, || format!("{store}: {} {id} has {has} likes instead of {clicked}", name(kind)));
        }
    }
    view
}

fn sums(likes: impl Iterator<Item = i64>) -> View {
    likes.fold(View::default(), |view, likes| View {
        likes: view.likes + likes,
        targets: view.targets + u64::from(likes != 0),
        ..view
    })
}

fn name_difference(named: &mut Vec<String>, difference: impl FnOnce() -> String) {
    if named.len() < NAMED_MAX {
        named.push(difference());
    }
}
