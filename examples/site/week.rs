//! Shows the archive of a closed week. The demo fills the board of last week, so a viewer need not wait for Sunday
//! night.

use std::collections::HashMap;

use anyhow::{Context, Result};
use sqlx::Row;
use tallyd_core::period::{Calendar, Period, PeriodKind};

use crate::dice::Dice;
use crate::servers::Servers;

/// The board of the rule for videos: each like adds to the video's score.
const BOARD: &str = "videos";

/// The number of members of the board.
const MEMBERS: u64 = 3_000;

/// The first place of the board has about this many likes, the second place half as many, the third place a third.
const FIRST: u64 = 40_000;

/// The board as it was when it closed.
pub struct Week {
    /// `2026-W46`.
    pub period: String,
    pub scores: HashMap<String, u64>,
}

/// The result of comparing the archive with the board.
pub struct Archived {
    /// The count of rows in MySQL.
    pub rows: usize,
    /// The count of members of the frozen zset in Redis.
    pub zset: usize,
    /// Whether MySQL says that the archive is copied and verified.
    pub done: bool,
    /// The number of differences between MySQL's rows, the zset in Redis, and the scores that the demo wrote.
    pub different: usize,
}

impl Week {
    /// Fills last week's zset in one command, so the archiver sees either all members or none.
    pub async fn close(servers: &Servers) -> Result<Self> {
        let now = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC);
        let period = now.previous().context("there is no week before this one")?.to_string();
        let mut dice = Dice::new(u64::from(u16::MAX));
        let scores: HashMap<String, u64> =
            (1..=MEMBERS).map(|place| (place.to_string(), FIRST / place + dice.below(9) + 1)).collect();
        let mut fill = redis::cmd("ZADD");
        fill.arg(servers.keys.board(BOARD, &period));
        for (member, score) in &scores {
            fill.arg(score).arg(member);
        }
        let () = fill.query_async(&mut servers.redis.clone()).await.context("fill last week's board")?;
        Ok(Self { period, scores })
    }

    /// Compares MySQL's rows, the zset in Redis, and the scores that the demo wrote.
    pub async fn archived(&self, servers: &Servers) -> Result<Archived> {
        let zset = self.zset(servers).await?;
        let rows = sqlx::query(
            "SELECT place, CAST(member AS CHAR), CAST(score AS DOUBLE) FROM leaderboard_archive \
             JOIN leaderboard_period USING (board, period, copy) WHERE board = ? AND period = ? ORDER BY place",
        );
        let rows = rows.bind(BOARD).bind(&self.period).fetch_all(&servers.mysql).await.context("read the archive")?;
        let mut different = rows.len().abs_diff(zset.len()) + rows.len().abs_diff(self.scores.len());
        for ((place, row), ranked) in (1_u32..).zip(&rows).zip(&zset) {
            let archived: (String, f64) = (row.try_get(1)?, row.try_get(2)?);
            let filled = self.scores.get(&archived.0).map(|score| *score as f64);
            let equal = row.try_get::<u32, _>(0)? == place && archived == *ranked && filled == Some(archived.1);
            different += usize::from(!equal);
        }
        Ok(Archived { rows: rows.len(), zset: zset.len(), done: self.is_done(servers).await?, different })
    }

    /// Returns whether the archiver has copied and verified the week.
    pub async fn is_done(&self, servers: &Servers) -> Result<bool> {
        let state = sqlx::query_scalar("SELECT state FROM leaderboard_period WHERE board = ? AND period = ?");
        let state: Option<String> =
            state.bind(BOARD).bind(&self.period).fetch_optional(&servers.mysql).await.context("read the periods")?;
        Ok(state.as_deref() == Some("done"))
    }

    /// Returns the frozen zset, the highest score first.
    async fn zset(&self, servers: &Servers) -> Result<Vec<(String, f64)>> {
        let mut range = redis::cmd("ZRANGE");
        range.arg(servers.keys.frozen_board(BOARD, &self.period)).arg(&[0, -1]).arg("REV").arg("WITHSCORES");
        range.query_async(&mut servers.redis.clone()).await.context("read the frozen board")
    }
}

/// Returns the seconds until a period's frozen zset expires, or `None` if it has no expiry.
pub async fn expires_s(servers: &Servers, period: &str) -> Result<Option<u64>> {
    let mut ttl = redis::cmd("TTL");
    ttl.arg(servers.keys.frozen_board(BOARD, period));
    let seconds: i64 = ttl.query_async(&mut servers.redis.clone()).await.context("ask when the board expires")?;
    Ok(u64::try_from(seconds).ok())
}
