//! Reads boards.
//!
//! This machine's clock decides which period is the current period. A [`Ranking`] decides the places of members with
//! equal scores.

use std::sync::Arc;
use std::time::Duration;

use super::error::require;
use super::site::Known;
use super::{Client, ClientError, Result, now};
use tallyd_core::board::Board;
use tallyd_core::model::BoardPeriod;
use tallyd_core::period::{Period, PeriodKind};
use tallyd_mysql::archive_rows::Archived;
use tallyd_redis::boards::{Part, Zset};
use tallyd_redis::feed::GainError;
use tallyd_redis::ranks::{Placed, Ranking};
use tallyd_redis::score::{Columns, Rule};

/// A member and its place on a board.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The place, from 1.
    pub place: u64,
    /// The member's name, as passed to the call that added it. Any bytes.
    pub member: Vec<u8>,
    /// The score in Redis. If the board's `tie` packs two columns into a score, this score contains both columns.
    pub score: f64,
    /// The two columns of a packed score. `None` for a board whose `tie` is `member`.
    pub columns: Option<Columns>,
}

/// A part of a board.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// The number of members on the whole board.
    pub members: u64,
    /// The requested members, the best place first.
    pub entries: Vec<Entry>,
    /// Redis has lost this open board since its last snapshot, so members or points are missing until an operator restores
    /// it. A daemon finds this within ten seconds.
    pub is_lost: bool,
}

impl Client {
    /// Reads up to `count` members of the current period, starting at place `from`. The best place is 1.
    ///
    /// # Errors
    /// [`ClientError::NoBoard`]; [`ClientError::Invalid`] if `from` is 0; [`ClientError::Redis`].
    pub async fn board_page(
        &self,
        (board, period): (&str, PeriodKind),
        from: u64,
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let after = after(from)?;
        let (known, at, rule) = self.current_of(board, period).await?;
        read_part(&known, &at, Part::Page { after, count }, rule, ranking).await
    }

    /// Reads a member of the current period with up to `count` neighbours on each side. The page is empty if the member
    /// is not on the board.
    ///
    /// # Errors
    /// [`ClientError::NoBoard`]; [`ClientError::Redis`].
    pub async fn board_around(
        &self,
        (board, period): (&str, PeriodKind),
        member: &[u8],
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let (known, at, rule) = self.current_of(board, period).await?;
        read_part(&known, &at, Part::Around { member, count }, rule, ranking).await
    }

    /// Reads the `members` that are on the board of the current period, and ranks only these members. For example, this
    /// call makes a board of a user's friends in one round trip, and stores nothing.
    ///
    /// # Errors
    /// [`ClientError::NoBoard`]; [`ClientError::Redis`].
    pub async fn board_of(
        &self,
        (board, period): (&str, PeriodKind),
        members: &[Vec<u8>],
        ranking: Ranking,
    ) -> Result<Vec<Entry>> {
        let (known, at, rule) = self.current_of(board, period).await?;
        let placed = known.cache.board_of(&at, members, ranking).await?;
        Ok(entries(placed, rule))
    }

    /// Reads a page of any period by the period's name, for instance `2026-W46`. Works like [`Client::board_page`]. The
    /// call reads an archived period from MySQL, and any other period from Redis. Only for the current period it does
    /// not ask MySQL.
    ///
    /// # Errors
    /// Also [`ClientError::Period`], [`ClientError::Pruned`], [`ClientError::Lost`] and [`ClientError::MySql`].
    pub async fn board_page_of(
        &self,
        (board, period): (&str, &str),
        from: u64,
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let after = after(from)?;
        let (known, at, rule, is_open) = self.named(board, period).await?;
        let part = Part::Page { after, count };
        if is_open {
            return read_part(&known, &at, part, rule, ranking).await;
        }
        let is_frozen = match self.store.read_archived(&at, after, count, ranking).await? {
            Archived::Page { members, placed } => {
                return Ok(Page { members, entries: entries(placed, rule), is_lost: false });
            }
            Archived::Pruned => return Err(ClientError::Pruned(at)),
            Archived::Frozen => true,
            Archived::Absent => false,
        };
        read_unarchived(&known, at, is_frozen, part, rule, ranking).await
    }

    /// Reads a member with neighbours, in any period that is not archived, by the period's name. The call works like
    /// [`Client::board_around`].
    ///
    /// # Errors
    /// Also [`ClientError::Period`], [`ClientError::Archived`], [`ClientError::Pruned`], [`ClientError::Lost`] and
    /// [`ClientError::MySql`].
    pub async fn board_around_of(
        &self,
        (board, period): (&str, &str),
        member: &[u8],
        count: u64,
        ranking: Ranking,
    ) -> Result<Page> {
        let (known, at, rule, is_open) = self.named(board, period).await?;
        let part = Part::Around { member, count };
        if is_open {
            return read_part(&known, &at, part, rule, ranking).await;
        }
        let is_frozen = match self.store.read_archived(&at, 0, 1, ranking).await? {
            Archived::Page { .. } => return Err(ClientError::Archived(at)),
            Archived::Pruned => return Err(ClientError::Pruned(at)),
            Archived::Frozen => true,
            Archived::Absent => false,
        };
        read_unarchived(&known, at, is_frozen, part, rule, ranking).await
    }

    /// Returns the name of the current period of a board.
    ///
    /// # Errors
    /// [`ClientError::NoBoard`]; [`ClientError::NoCard`].
    pub async fn board_period(&self, board: &str, period: PeriodKind) -> Result<String> {
        Ok(self.current_of(board, period).await?.1.period)
    }

    /// Returns the time until the current period of the board ends. Returns `None` for a board of all time.
    ///
    /// # Errors
    /// [`ClientError::NoBoard`]; [`ClientError::NoCard`].
    pub async fn board_ends_in(&self, board: &str, period: PeriodKind) -> Result<Option<Duration>> {
        let (_, board) = self.board(board, period).await?;
        let (calendar, now) = (board.calendar(jiff::tz::db()).map_err(GainError::from)?, now());
        let ends = Period::containing(period, now, &calendar).end(&calendar);
        let left = Duration::from_micros((ends.0 - now.0).max(0).unsigned_abs());
        Ok(if period == PeriodKind::Total { None } else { Some(left) })
    }

    async fn board(&self, name: &str, period: PeriodKind) -> Result<(Arc<Known>, Board)> {
        let find = |known: &Known| {
            known.site.boards.iter().find(|board| board.name == name && board.period == period).cloned()
        };
        let mut known = self.sites.current().await;
        let mut found = find(&known);
        if found.is_none() {
            known = self.sites.refreshed().await;
            found = find(&known);
        }
        match found {
            Some(board) => Ok((known, board)),
            None if known.site.is_known => Err(ClientError::NoBoard { board: name.to_owned(), period }),
            None => Err(ClientError::NoCard),
        }
    }

    async fn current_of(&self, name: &str, period: PeriodKind) -> Result<(Arc<Known>, BoardPeriod, Rule)> {
        let (known, board) = self.board(name, period).await?;
        let current = current(&board)?;
        Ok((known, BoardPeriod { board: name.to_owned(), period: current.to_string() }, board.rule()))
    }

    async fn named(&self, name: &str, period: &str) -> Result<(Arc<Known>, BoardPeriod, Rule, bool)> {
        let named: Period = period.parse()?;
        let (known, board) = self.board(name, named.kind()).await?;
        let at = BoardPeriod { board: name.to_owned(), period: period.to_owned() };
        Ok((known, at, board.rule(), current(&board)? == named))
    }
}

fn current(board: &Board) -> Result<Period> {
    let calendar = board.calendar(jiff::tz::db()).map_err(GainError::from)?;
    Ok(Period::containing(board.period, now(), &calendar))
}

async fn read_part(known: &Known, at: &BoardPeriod, part: Part<'_>, rule: Rule, ranking: Ranking) -> Result<Page> {
    let (read, is_lost) =
        tokio::try_join!(known.cache.read_board(at, Zset::Live, part, ranking), known.cache.is_board_lost(at))?;
    Ok(Page { members: read.0, entries: entries(read.1, rule), is_lost })
}

async fn read_unarchived(
    known: &Known,
    at: BoardPeriod,
    is_frozen: bool,
    part: Part<'_>,
    rule: Rule,
    ranking: Ranking,
) -> Result<Page> {
    let (read, is_lost) =
        tokio::try_join!(known.cache.read_unarchived(&at, is_frozen, part, ranking), known.cache.is_board_lost(&at))?;
    let (members, placed) = read.ok_or(ClientError::Lost(at))?;
    Ok(Page { members, entries: entries(placed, rule), is_lost })
}

fn after(place: u64) -> Result<u64> {
    require(place > 0, || "places begin at 1".to_owned())?;
    Ok(place - 1)
}

fn entries(placed: Vec<Placed>, rule: Rule) -> Vec<Entry> {
    let entry = |Placed { place, member, score }| Entry { place, member, score, columns: rule.columns(score) };
    placed.into_iter().map(entry).collect()
}
