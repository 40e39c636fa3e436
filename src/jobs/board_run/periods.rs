//! Decides which periods of the boards are closed and which are open, from the configuration and the time. Pure.

use std::collections::BTreeSet;
use std::iter;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Timestamp;

use tallyd_base::config::Board;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_core::period::{Calendar, Period, PeriodError, PeriodKind};
use tallyd_redis::score::Rule;

pub const MODE: &str = "closed";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    pub board: Option<String>,
    pub period: Option<String>,
    pub dry_run: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    #[error("no board is called \"{name}\"; configured boards: {known}")]
    UnknownBoard { name: String, known: String },
    #[error(transparent)]
    Period(#[from] PeriodError),
    #[error("the period total never ends, so tallyd does not archive it")]
    NeverEnds,
    #[error("{period} is a {kind}, but the requested boards have no periods of that length")]
    NoSuchBoard { period: String, kind: String },
    #[error("{at} is not closed: it ends at {end}, and the archiver waits for late writes until {closes}")]
    Open { at: BoardPeriod, end: String, closes: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::jobs) struct Candidate {
    pub at: BoardPeriod,
    pub expire_after: Option<Duration>,
    pub rule: Rule,
    pub top: u64,
}

#[derive(Clone, Debug)]
pub(in crate::jobs) struct Open {
    pub candidate: Candidate,
    pub closes: Micros,
}

impl Scope {
    /// Only a run in [`MODE`] replaces the next scheduled run.
    pub fn mode(&self) -> &'static str {
        match (self.dry_run, &self.board, &self.period) {
            (true, ..) => "dry-run",
            (false, None, None) => MODE,
            (false, ..) => "part",
        }
    }

    pub(in crate::jobs) fn blocks<'a>(&self, boards: &'a [Board]) -> Result<Vec<&'a Board>, ScopeError> {
        let kind = self.period.as_deref().map(str::parse::<Period>).transpose()?.map(Period::kind);
        if kind == Some(PeriodKind::Total) {
            return Err(ScopeError::NeverEnds);
        }
        let mut blocks: Vec<&Board> = boards.iter().filter(|board| self.has_board(&board.name)).collect();
        if let (Some(name), []) = (&self.board, blocks.as_slice()) {
            return Err(unknown(boards, name));
        }
        blocks.retain(|board| kind.is_none_or(|kind| kind == board.period));
        match (&self.period, kind) {
            (Some(period), Some(kind)) if blocks.is_empty() => {
                Err(ScopeError::NoSuchBoard { period: period.clone(), kind: kind.to_string() })
            }
            _ => Ok(blocks),
        }
    }

    /// Newest first. Only the time decides.
    pub(in crate::jobs) fn closed_of(&self, board: &Board, now: Micros) -> Result<Vec<Candidate>> {
        let calendar = calendar_of(board)?;
        if let Some(period) = &self.period {
            let period = period.parse().map_err(ScopeError::from)?;
            return Ok(vec![closed(board, period, &calendar, now)?]);
        }
        let closed = Period::closed(board.period, &calendar, board.archive_grace.0, now);
        Ok(closed.map(|period| candidate(board, period)).collect())
    }

    /// Also earlier periods whose grace time has not passed. None if the scope contains a period.
    pub(in crate::jobs) fn open_of(&self, board: &Board, now: Micros) -> Result<Vec<Open>> {
        if self.period.is_some() {
            return Ok(Vec::new());
        }
        let calendar = calendar_of(board)?;
        let open = open(board, &calendar, now);
        Ok(open.map(|(period, closes)| Open { candidate: candidate(board, period), closes }).collect())
    }

    pub(in crate::jobs) fn known(&self, boards: &[Board], at: BoardPeriod) -> Option<Candidate> {
        if !self.has_board(&at.board) || self.period.as_ref().is_some_and(|period| *period != at.period) {
            return None;
        }
        let kind = at.period.parse().ok().map(Period::kind);
        let board = boards.iter().find(|board| board.name == at.board && Some(board.period) == kind);
        let rule = board.map_or(Rule::PLAIN, Board::rule);
        Some(Candidate { at, expire_after: board.map(|board| board.expire_after.0), rule, top: board.map_or(0, top) })
    }

    pub(in crate::jobs) fn has_board(&self, name: &str) -> bool {
        self.board.as_ref().is_none_or(|wanted| wanted == name)
    }
}

pub(in crate::jobs) fn candidate_named(boards: &[Board], name: &str, period: &str) -> Result<Candidate, ScopeError> {
    let period: Period = period.parse()?;
    if boards.iter().all(|board| board.name != name) {
        return Err(unknown(boards, name));
    }
    let board = boards.iter().find(|board| board.name == name && board.period == period.kind());
    let board =
        board.ok_or_else(|| ScopeError::NoSuchBoard { period: period.to_string(), kind: period.kind().to_string() })?;
    Ok(candidate(board, period))
}

fn calendar_of(board: &Board) -> Result<Calendar> {
    board.calendar(jiff::tz::db()).with_context(|| format!("read the time zone of {}", board.name))
}

fn candidate(board: &Board, period: Period) -> Candidate {
    let at = BoardPeriod { board: board.name.clone(), period: period.to_string() };
    Candidate { at, expire_after: Some(board.expire_after.0), rule: board.rule(), top: top(board) }
}

fn unknown(boards: &[Board], name: &str) -> ScopeError {
    let known: BTreeSet<&str> = boards.iter().map(|board| board.name.as_str()).collect();
    let known = if known.is_empty() { "none".to_owned() } else { Vec::from_iter(known).join(", ") };
    ScopeError::UnknownBoard { name: name.to_owned(), known }
}

fn top(board: &Board) -> u64 {
    if board.archive_top == 0 { u64::MAX } else { board.archive_top.into() }
}

fn closed(board: &Board, period: Period, calendar: &Calendar, now: Micros) -> Result<Candidate, ScopeError> {
    let candidate = candidate(board, period);
    let closes = closes(board, period, calendar);
    if closes > now {
        let at = candidate.at;
        return Err(ScopeError::Open { at, end: instant(period.end(calendar)), closes: instant(closes) });
    }
    Ok(candidate)
}

fn open(board: &Board, calendar: &Calendar, now: Micros) -> impl Iterator<Item = (Period, Micros)> {
    iter::successors(Some(Period::containing(board.period, now, calendar)), |period| period.previous())
        .map(|period| (period, closes(board, period, calendar)))
        .take_while(move |(_, closes)| *closes > now)
}

fn closes(board: &Board, period: Period, calendar: &Calendar) -> Micros {
    period.end(calendar).after(board.archive_grace.0)
}

pub(in crate::jobs) fn instant(at: Micros) -> String {
    Timestamp::from_second(at.0.div_euclid(1_000_000)).unwrap_or(Timestamp::MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boards() -> Vec<Board> {
        let board = |name: &str, period: &str, zone: &str| {
            let names = format!("[[board]]\nname = \"{name}\"\nperiod = \"{period}\"\ntime_zone = \"{zone}\"");
            format!("{names}\narchive_grace = \"1h\"\nexpire_after = \"1m\"\n")
        };
        let shanghai = ["week", "day"].map(|period| board("likes", period, "Asia/Shanghai")).concat();
        tallyd_base::config::parse(&(shanghai + &board("posts", "week", "UTC")), "test", []).unwrap().boards
    }

    fn at(text: &str) -> Micros {
        Micros(text.parse::<Timestamp>().unwrap().as_microsecond())
    }

    fn scope(board: Option<&str>, period: Option<&str>) -> Scope {
        Scope { board: board.map(str::to_owned), period: period.map(str::to_owned), dry_run: false }
    }

    fn found(scope: &Scope, now: &str) -> Result<Vec<String>, String> {
        let (boards, text) = (boards(), |error: anyhow::Error| format!("{error:#}"));
        let blocks = scope.blocks(&boards).map_err(|error| text(error.into()))?;
        let closed: Result<Vec<_>> = blocks.into_iter().map(|block| scope.closed_of(block, at(now))).collect();
        Ok(closed.map_err(text)?.iter().flatten().map(|candidate| candidate.at.to_string()).collect())
    }

    #[test]
    fn every_closed_period_of_every_board_is_looked_at() {
        // In Shanghai week 46 ended at 16:00 UTC on Sunday, 15 November.
        let all = found(&Scope::default(), "2026-11-15T17:00:00Z").unwrap();
        assert_eq!(all.len(), 60 + 400 + 60);
        assert_eq!([&all[0], &all[60], &all[460]], ["likes 2026-W46", "likes 2026-11-15", "posts 2026-W45"]);
        let likes = found(&scope(Some("likes"), None), "2026-11-15T17:00:00Z").unwrap();
        assert_eq!(likes, all[..460]);
    }

    #[test]
    fn one_period_is_looked_at_in_every_board_that_has_it() {
        let now = "2026-11-20T00:00:00Z";
        assert_eq!(found(&scope(None, Some("2026-W46")), now).unwrap(), ["likes 2026-W46", "posts 2026-W46"]);
        assert_eq!(found(&scope(Some("likes"), Some("2026-11-18")), now).unwrap(), ["likes 2026-11-18"]);
        assert_eq!(found(&scope(None, Some("2001-W01")), now).unwrap(), ["likes 2001-W01", "posts 2001-W01"]);
    }

    #[test]
    fn mistakes_are_reported() {
        let now = "2026-11-15T16:59:59Z";
        for (scope, expected) in [
            (scope(Some("like"), None), "no board is called \"like\"; configured boards: likes, posts"),
            (scope(None, Some("2026-W60")), "\"2026-W60\" is not a period"),
            (scope(Some("posts"), Some("2026-11-18")), "2026-11-18 is a day, but the requested boards have no periods"),
            (
                scope(Some("likes"), Some("2026-W46")),
                "likes 2026-W46 is not closed: it ends at 2026-11-15T16:00:00Z, and the archiver waits for late writes until \
                 2026-11-15T17:00:00Z",
            ),
        ] {
            let error = found(&scope, now).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn only_a_run_over_everything_makes_up_for_what_is_due() {
        assert_eq!(Scope::default().mode(), MODE);
        assert_eq!(Scope { dry_run: true, ..Scope::default() }.mode(), "dry-run");
        assert_eq!(scope(Some("likes"), None).mode(), "part");
        assert_eq!(scope(None, Some("2026-W46")).mode(), "part");
    }

    #[test]
    fn open_periods_are_those_that_may_still_be_written_to() {
        let (scope, boards, now) = (scope(Some("likes"), None), boards(), at("2026-11-15T16:30:00Z"));
        let blocks = scope.blocks(&boards).unwrap();
        let all: Vec<Open> = blocks.iter().flat_map(|block| scope.open_of(block, now).unwrap()).collect();
        let open: Vec<String> =
            all.iter().map(|open| format!("{} {}", open.candidate.at, instant(open.closes))).collect();
        assert_eq!(
            open,
            [
                "likes 2026-W47 2026-11-22T17:00:00Z",
                "likes 2026-W46 2026-11-15T17:00:00Z",
                "likes 2026-11-16 2026-11-16T17:00:00Z",
                "likes 2026-11-15 2026-11-15T17:00:00Z",
            ]
        );
        let mut closed = blocks.iter().flat_map(|block| scope.closed_of(block, now).unwrap());
        assert_eq!(closed.find(|closed| all.iter().any(|open| open.candidate == *closed)), None);
    }

    #[test]
    fn a_period_of_mysql_gets_its_boards_rules() {
        let known = |board: &str, period: &str| {
            let at = BoardPeriod { board: board.to_owned(), period: period.to_owned() };
            Scope::default().known(&boards(), at).unwrap().expire_after
        };
        assert_eq!(known("likes", "2026-W46"), Some(Duration::from_secs(60)));
        assert_eq!(known("posts", "2026-11-18"), None);
        assert_eq!(known("gone", "2026-W46"), None);
        assert_eq!(known("likes", "total"), None);
        let at = BoardPeriod { board: "posts".to_owned(), period: "2026-W46".to_owned() };
        assert_eq!(scope(Some("likes"), None).known(&boards(), at.clone()), None);
        assert_eq!(scope(None, Some("2026-W45")).known(&boards(), at), None);
    }
}
