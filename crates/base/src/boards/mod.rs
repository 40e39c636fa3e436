//! Shows boards to operators: the periods of each board with their states, and the first places of one period.
//!
//! An open period of a board is read from Redis, and an archived period from MySQL. `view` has the output types.

mod view;

use std::collections::BTreeMap;
use std::iter;

use anyhow::Result;

use crate::config::Board;
use tallyd_core::archive::{PeriodState, Snapshot};
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_core::period::{LOOK_BACK, Period, PeriodError, PeriodKind};
use tallyd_mysql::Store;
use tallyd_mysql::archive_rows::Archived;
use tallyd_redis::Cache;
use tallyd_redis::boards::Part;
use tallyd_redis::ranks::{Placed, Ranking};

pub use view::{BoardState, List, Listed, Row, Source, Top};

const LISTED_MAX: usize = 20;

/// Newest past periods that a list looks for in Redis if MySQL has no row.
const UNARCHIVED_LOOKED: usize = 20;

#[derive(Debug, thiserror::Error)]
pub enum NotShown {
    #[error("no board is called \"{name}\"; configured boards: {known}")]
    UnknownBoard { name: String, known: String },
    #[error(transparent)]
    Period(#[from] PeriodError),
    #[error(
        "{name} has periods of several lengths ({periods}): name a period, for example 2026-11-21, 2026-W47, 2026-11 \
         or total"
    )]
    NoPeriod { name: String, periods: String },
    #[error("{name} has no periods of the length {kind}")]
    NoSuchPeriod { name: String, kind: PeriodKind },
    #[error("{0}: the period's archive was deleted, because it was older than archive_keep")]
    Pruned(BoardPeriod),
    #[error("{0}: Redis lost the frozen zset of this period before the zset was archived")]
    Lost(BoardPeriod),
}

pub struct Boards<'a> {
    pub boards: &'a [Board],
    pub store: &'a Store,
    pub cache: &'a Cache,
}

pub type Saved = BTreeMap<BoardPeriod, Snapshot>;

impl Boards<'_> {
    pub async fn list(&self, now: Micros) -> Result<List> {
        let (saved, mut list) = (self.saved().await?, List::default());
        for board in self.boards {
            list.0.extend(self.list_of(board, &saved, now).await?);
        }
        Ok(list)
    }

    pub async fn saved(&self) -> Result<Saved> {
        Ok(self.store.snapshots().await?.into_iter().collect())
    }

    pub async fn list_of(&self, board: &Board, saved: &Saved, now: Micros) -> Result<Vec<Listed>> {
        let calendar = board.calendar(jiff::tz::db())?;
        let period = Period::containing(board.period, now, &calendar);
        let mut open = self.in_redis(&board.name, period, BoardState::Open, saved, now).await?;
        let left = (period.end(&calendar).0 - now.0).max(0).unsigned_abs() / 1_000_000;
        open.ends_in_s = if board.period == PeriodKind::Total { None } else { Some(left) };
        let mut listed = vec![open];
        listed.extend(self.closed(board, period, saved, now).await?);
        Ok(listed)
    }

    async fn in_redis(
        &self,
        board: &str,
        period: Period,
        state: BoardState,
        saved: &Saved,
        now: Micros,
    ) -> Result<Listed> {
        let at = BoardPeriod { board: board.to_owned(), period: period.to_string() };
        let (members, _) = self.cache.count_board(&at).await?;
        let mark = self.cache.board_marks(std::slice::from_ref(&at)).await?.pop().flatten();
        let snapshot = saved.get(&at).filter(|snapshot| snapshot.taken_at.is_some());
        let is_lost = snapshot.is_some_and(|snapshot| !snapshot.is_marked(mark));
        let state = if is_lost { BoardState::Lost } else { state };
        let taken_at = snapshot.and_then(|snapshot| snapshot.taken_at);
        let saved_s_ago = taken_at.map(|taken_at| (now.0 - taken_at.0).max(0).unsigned_abs() / 1_000_000);
        Ok(Listed {
            board: at.board,
            period: at.period,
            state,
            members,
            ends_in_s: None,
            ended_s_ago: None,
            saved_s_ago,
        })
    }

    async fn closed(&self, board: &Board, current: Period, saved: &Saved, now: Micros) -> Result<Vec<Listed>> {
        let rows = self.store.board_periods(&board.name, board.period.like(), LOOK_BACK).await?;
        let calendar = board.calendar(jiff::tz::db())?;
        let ended_s_ago = |period: Period| (now.0 - period.end(&calendar).0).max(0).unsigned_abs() / 1_000_000;
        let mut listed = Vec::new();
        let previous = iter::successors(current.previous(), |period| period.previous()).take(UNARCHIVED_LOOKED);
        for period in previous.filter(|period| rows.iter().all(|(at, _)| at.period != period.to_string())) {
            let mut closed = self.in_redis(&board.name, period, BoardState::Closed, saved, now).await?;
            closed.ended_s_ago = Some(ended_s_ago(period));
            if closed.members > 0 || closed.saved_s_ago.is_some() {
                listed.push(closed);
            }
        }
        for (at, row) in rows.into_iter().take(LISTED_MAX) {
            let members = match row.state {
                PeriodState::Frozen => self.cache.count_board(&at).await?.1,
                PeriodState::Done | PeriodState::Ended | PeriodState::Pruned => row.tally.members,
            };
            let BoardPeriod { board, period } = at;
            let mut before = iter::successors(current.previous(), |period| period.previous()).take(LOOK_BACK);
            let ended_s_ago = before.find(|other| other.to_string() == period).map(ended_s_ago);
            let state = row.state.into();
            listed.push(Listed { board, period, state, members, ends_in_s: None, ended_s_ago, saved_s_ago: None });
        }
        Ok(listed)
    }

    /// `period` is required if the board has several period lengths, else it can be `None` for the current period.
    pub async fn top(
        &self,
        name: &str,
        period: Option<&str>,
        count: u64,
        ranking: Ranking,
        now: Micros,
    ) -> Result<Top> {
        let board = self.find(name, period)?;
        let period = match period {
            Some(period) => period.to_owned(),
            None => Period::containing(board.period, now, &board.calendar(jiff::tz::db())?).to_string(),
        };
        let at = BoardPeriod { board: name.to_owned(), period };
        let (from, placed) = self.read(&at, count, ranking).await?;
        let rule = board.rule();
        let entries = placed.into_iter().map(|placed| Row::new(placed, rule)).collect();
        Ok(Top { board: at.board, period: at.period, from, entries })
    }

    async fn read(&self, at: &BoardPeriod, count: u64, ranking: Ranking) -> Result<(Source, Vec<Placed>)> {
        let is_frozen = match self.store.read_archived(at, 0, count, ranking).await? {
            Archived::Page { placed, .. } => return Ok((Source::MySql, placed)),
            Archived::Pruned => return Err(NotShown::Pruned(at.clone()).into()),
            Archived::Frozen => true,
            Archived::Absent => false,
        };
        let part = Part::Page { after: 0, count };
        let read = self.cache.read_unarchived(at, is_frozen, part, ranking).await?;
        let (_, placed) = read.ok_or_else(|| NotShown::Lost(at.clone()))?;
        Ok((Source::Redis, placed))
    }

    fn find(&self, name: &str, period: Option<&str>) -> Result<&Board> {
        let named: Vec<&Board> = self.boards.iter().filter(|board| board.name == name).collect();
        let kind = period.map(|period| period.parse().map(Period::kind)).transpose().map_err(NotShown::from)?;
        match (named.as_slice(), kind) {
            ([], _) => {
                let mut known: Vec<&str> = self.boards.iter().map(|board| board.name.as_str()).collect();
                known.dedup();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(NotShown::UnknownBoard { name: name.to_owned(), known }.into())
            }
            ([board], None) => Ok(board),
            (_, None) => {
                let periods: Vec<String> = named.iter().map(|board| board.period.to_string()).collect();
                Err(NotShown::NoPeriod { name: name.to_owned(), periods: periods.join(", ") }.into())
            }
            (_, Some(kind)) => {
                let board = named.into_iter().find(|board| board.period == kind);
                board.ok_or_else(|| NotShown::NoSuchPeriod { name: name.to_owned(), kind }.into())
            }
        }
    }
}
