//! Compares every row, every counter and every number in Redis with the clicks.

use std::collections::HashMap;

use anyhow::{Context, Result};
use futures_util::TryStreamExt;
use sqlx::Row;

use crate::model::{Model, Pair, State};
use crate::play::Played;
use crate::servers::Servers;
use crate::traffic::Site;
use crate::week::Archived;
use tallyd_core::model::Micros;

/// The maximum number of differences that are printed in words. Further differences are only counted.
const NAMED_MAX: usize = 5;

/// The numbers of pairs, likes and videos in one store.
#[derive(Default)]
pub struct View {
    /// The number of pairs of a user and a video, in the clicks or in the rows. Counters have no pairs.
    pub pairs: u64,
    /// The sum of all videos' likes.
    pub likes: i64,
    /// The number of videos that have at least one like.
    pub videos: u64,
    /// The number of pairs, or of videos, whose stored data is wrong according to the clicks.
    pub different: u64,
}

/// The result of the comparison.
pub struct Comparison {
    pub clicked: View,
    pub rows: View,
    pub counters: View,
    pub redis: View,
    pub dead_letters: u64,
    pub archived: Option<Archived>,
    /// The number of members with a wrong score on the all-time board.
    pub hall: Option<u64>,
    /// The first differences, in words.
    pub named: Vec<String>,
}

/// Reads all stores and compares them with the clicks.
pub async fn compare(site: &Site, servers: &Servers, played: &Played) -> Result<Comparison> {
    let mut named = Vec::new();
    let rows = compare_rows(site, servers, &mut named).await?;
    let counters = mysql_likes(servers).await?;
    let counters = compare_likes(site, &counters, "counter", &mut named);
    let redis = compare_likes(site, &servers.redis_likes().await?, "Redis", &mut named);
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
    let clicked = clicked(&site.model());
    Ok(Comparison { clicked, rows, counters, redis, dead_letters: dead_letters.unsigned_abs(), archived, hall, named })
}

fn clicked(model: &Model) -> View {
    View { pairs: model.pairs.len() as u64, ..sums(model.likes.iter().copied()) }
}

async fn compare_rows(site: &Site, servers: &Servers, named: &mut Vec<String>) -> Result<View> {
    let mut view = View::default();
    let mut likes: HashMap<u64, i64> = HashMap::new();
    let mut found = 0;
    let mut rows = sqlx::query(
        "SELECT target_id, user_id, is_del, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED) \
         FROM like_record",
    )
    .fetch(&servers.mysql);
    while let Some(row) = rows.try_next().await.context("read like_record")? {
        let pair = Pair { video: row.try_get(0)?, user: row.try_get(1)? };
        let state = State { at: Micros(row.try_get(3)?), liked: !row.try_get::<bool, _>(2)? };
        view.pairs += 1;
        *likes.entry(pair.video).or_default() += i64::from(state.liked);
        let clicked = site.model().pairs.get(&pair).copied();
        found += u64::from(clicked.is_some());
        if clicked != Some(state) {
            view.different += 1;
            name(named, || {
                format!(
                    "like_record: the row of video {} and user {} is {state:?}, but the last click was {clicked:?}",
                    pair.video, pair.user
                )
            });
        }
    }
    let missing = site.model().pairs.len() as u64 - found;
    if missing > 0 {
        view.different += missing;
        name(named, || format!("like_record: {missing} rows are missing"));
    }
    Ok(View { pairs: view.pairs, different: view.different, ..sums(likes.into_values()) })
}

async fn mysql_likes(servers: &Servers) -> Result<HashMap<u64, i64>> {
    sqlx::query("SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter GROUP BY target_id")
        .fetch_all(&servers.mysql)
        .await
        .context("read counter")?
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
}

fn compare_likes(site: &Site, likes: &HashMap<u64, i64>, store: &str, named: &mut Vec<String>) -> View {
    let model = site.model();
    let mut view = sums(likes.values().copied());
    let unknown = likes.keys().copied().filter(|video| *video >= model.likes.len() as u64);
    for video in (0..model.likes.len() as u64).chain(unknown) {
        let (has, clicked) = (likes.get(&video).copied().unwrap_or_default(), model.likes_of(video));
        if has != clicked {
            view.different += 1;
            name(named, || format!("{store}: video {video} has {has} likes instead of {clicked}"));
        }
    }
    view
}

fn sums(likes: impl Iterator<Item = i64>) -> View {
    likes.fold(View::default(), |view, likes| View {
        likes: view.likes + likes,
        videos: view.videos + u64::from(likes != 0),
        ..view
    })
}

fn name(named: &mut Vec<String>, difference: impl FnOnce() -> String) {
    if named.len() < NAMED_MAX {
        named.push(difference());
    }
}
