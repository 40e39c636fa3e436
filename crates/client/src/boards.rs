//! Boards for the API side: adding to a member, and reading places, on all periods that now lies in.

use std::time::Duration;

use super::error::require;
use super::{Client, ClientError, OnBoard, Result, now};
use tallyd_core::board::Board;
use tallyd_core::model::BoardPeriod;
use tallyd_core::period::{Period, PeriodKind};
use tallyd_mysql::archive_rows::Archived;
use tallyd_redis::Call;
use tallyd_redis::boards::{Part, Zset};
use tallyd_redis::feed::{Gain, GainError};
use tallyd_redis::ranks::{Placed, Ranking};
use tallyd_redis::score::{Columns, Rule};

/// A member's place on a board, with its columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// From 1.
    pub place: u64,
    /// Any bytes.
    pub member: Vec<u8>,
    /// As the zset has it.
    pub score: f64,
    /// Its columns, where the board's `tie` packs them.
    pub columns: Option<Columns>,
}

/// A part of a board.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// How many members the board has in all.
    pub members: u64,
    /// The part, the first place first.
    pub entries: Vec<Entry>,
}

impl Client {
    /// Adds to one of a member's numbers, which `column` names as `score` of the board does, in all of its current periods.
    ///
    /// # Errors
    /// Redis is away; the board or the column is not in the configuration; a number no longer fits into its score.
    pub async fn add_to_board(&self, on: OnBoard<'_>, column: &str, delta: i64) -> Result<()> {
        let call = self.add_call(&on, column, delta)?;
        let added = self.cache.eval("add to a board", &[call]).await;
        added.map(drop).map_err(|source| ClientError::NotAdded { board: on.board.to_owned(), source })
    }

    pub(super) fn add_call(&self, on: &OnBoard<'_>, column: &str, delta: i64) -> Result<Call> {
        let OnBoard { board, member } = *on;
        Ok(self.cache.gain_call(&self.boards, Gain { board, member, column, delta, at: now() }, None)?)
    }

    /// A page of the current period: `count` members from place `from` (1 is the best) on.
    ///
    /// # Errors
    /// Redis is away, or there is no such board.
    pub async fn board_page(
        &self,
        (board, period): (&str, PeriodKind),
        from: u64,
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let after = after(from)?;
        let (at, rule) = self.current(board, period)?;
        self.read_part(&at, Part::Page { after, count }, rule, ranking).await
    }

    /// A member of the current period with up to `count` neighbours on each side; an empty page where it isn't on the
    /// board.
    ///
    /// # Errors
    /// Redis is away, or there is no such board.
    pub async fn board_around(
        &self,
        (board, period): (&str, PeriodKind),
        member: &[u8],
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let (at, rule) = self.current(board, period)?;
        self.read_part(&at, Part::Around { member, count }, rule, ranking).await
    }

    /// Those of `members` that are on the current period's board, placed among themselves: a friends' board, which costs
    /// one round trip and stores nothing.
    ///
    /// # Errors
    /// Redis is away, or there is no such board.
    pub async fn board_of(
        &self,
        (board, period): (&str, PeriodKind),
        members: &[Vec<u8>],
        ranking: Ranking,
    ) -> Result<Vec<Entry>> {
        let (at, rule) = self.current(board, period)?;
        let placed = self.cache.board_of(&at, members, ranking).await?;
        Ok(entries(placed, rule))
    }

    /// A page of any period, by its name: `2026-W46`. One that is archived comes from MySQL, any other from Redis; MySQL is
    /// asked which it is.
    ///
    /// # Errors
    /// A server is away, there is no such board, or its archive was pruned.
    pub async fn board_page_of(
        &self,
        (board, period): (&str, &str),
        from: u64,
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let after = after(from)?;
        let kind = period.parse::<Period>()?.kind();
        let rule = self.board(board, kind)?.rule();
        let at = BoardPeriod { board: board.to_owned(), period: period.to_owned() };
        let is_frozen = match self.store.read_archived(&at, after, count, ranking).await? {
            Archived::Page { members, placed } => return Ok(Page { members, entries: entries(placed, rule) }),
            Archived::Pruned => return Err(ClientError::Pruned(at)),
            Archived::Frozen => true,
            Archived::Absent => false,
        };
        let part = Part::Page { after, count };
        let read = self.cache.read_unarchived(&at, is_frozen, part, ranking).await?;
        let (members, placed) = read.ok_or(ClientError::Lost(at))?;
        Ok(Page { members, entries: entries(placed, rule) })
    }

    /// How long the current period of the board lasts; none for all time.
    ///
    /// # Errors
    /// There is no such board.
    pub fn board_ends_in(&self, board: &str, period: PeriodKind) -> Result<Option<Duration>> {
        let board = self.board(board, period)?;
        let (calendar, now) = (board.calendar().map_err(GainError::from)?, now());
        let ends = Period::containing(period, now, &calendar).end(&calendar);
        let left = Duration::from_micros((ends.0 - now.0).max(0).unsigned_abs());
        Ok(if period == PeriodKind::Total { None } else { Some(left) })
    }

    fn board(&self, name: &str, period: PeriodKind) -> Result<&Board> {
        let found = self.boards.iter().find(|board| board.name == name && board.period == period);
        found.ok_or_else(|| ClientError::NoBoard { board: name.to_owned(), period })
    }

    fn current(&self, name: &str, period: PeriodKind) -> Result<(BoardPeriod, Rule)> {
        let board = self.board(name, period)?;
        let current = Period::containing(period, now(), &board.calendar().map_err(GainError::from)?);
        Ok((BoardPeriod { board: name.to_owned(), period: current.to_string() }, board.rule()))
    }

    async fn read_part(&self, at: &BoardPeriod, part: Part<'_>, rule: Rule, ranking: Ranking) -> Result<Page> {
        let (members, placed) = self.cache.read_board(at, Zset::Live, part, ranking).await?;
        Ok(Page { members, entries: entries(placed, rule) })
    }
}

/// How many members are before a place.
fn after(place: u64) -> Result<u64> {
    require(place > 0, || "places begin with 1".to_owned())?;
    Ok(place - 1)
}

fn entries(placed: Vec<Placed>, rule: Rule) -> Vec<Entry> {
    let entry = |Placed { place, member, score }| Entry { place, member, score, columns: rule.columns(score) };
    placed.into_iter().map(entry).collect()
}
