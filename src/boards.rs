//! Boards as an operator sees them: which periods there are and how far each is, and the best of one, from wherever it
//! is: Redis while it is open, MySQL once it is archived.

use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::cache::Cache;
use crate::cache::boards::{Part, Zset};
use crate::cache::ranks::{Before, Placed, Ranking, place};
use crate::cache::score::Rule;
use crate::config::Board;
use crate::model::{BoardMember, BoardPeriod, Micros};
use crate::store::Store;
use crate::store::boards::{PeriodRow, PeriodState};
use crate::store::snapshots::Snapshot;
use tallyd_core::period::{LOOK_BACK, Period, PeriodKind};

/// Periods of a board that are listed from MySQL at most.
const LISTED_MAX: usize = 20;

/// Periods before the current one that are looked for in Redis, where MySQL doesn't know them yet.
const UNARCHIVED_LOOKED: usize = 20;

/// A board can't be shown: a mistake of the caller.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotShown(String);

/// One period of a board.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// The board.
    pub board: String,
    /// The period.
    pub period: String,
    /// `open`: it is written to; `lost`: Redis has lost it since its snapshot; `closed`: its end is over, and it waits for the
    /// archive; `frozen`: it is being archived; `done`: archived, and in Redis for a while; `ended`: archived, and gone from Redis;
    /// `pruned`: its archive is deleted.
    pub state: &'static str,
    /// Its members: in Redis until it is archived, in MySQL after that.
    pub members: u64,
    /// Seconds until it ends; none where it has, or never will.
    pub ends_in_s: Option<u64>,
    /// Seconds since it ended; none while it is open, and of one too old to be told.
    pub ended_s_ago: Option<u64>,
    /// Seconds since its last snapshot; none where it has none, or is archived.
    pub saved_s_ago: Option<u64>,
}

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct List(pub Vec<Listed>);

/// The best of a board.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Top {
    /// The board.
    pub board: String,
    /// The period.
    pub period: String,
    /// Where it was read: `redis` or `mysql`.
    pub from: &'static str,
    /// The first place first.
    pub entries: Vec<Row>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// From 1.
    pub place: u64,
    /// As text; what is no UTF-8 in it is replaced.
    pub member: String,
    /// As the zset has it.
    pub score: f64,
    /// What is ranked by, where the board's `tie` packs two numbers into its scores.
    pub primary: Option<u64>,
    /// What decides between equals, there.
    pub second: Option<u64>,
}

/// The configured boards and where they are.
pub struct Boards<'a> {
    /// As configured.
    pub boards: &'a [Board],
    /// MySQL.
    pub store: &'a Store,
    /// Redis.
    pub cache: &'a Cache,
}

/// The snapshots that there are.
pub type Saved = BTreeMap<BoardPeriod, Snapshot>;

impl Boards<'_> {
    /// Each board's current period, then those that MySQL knows, newest first.
    ///
    /// # Errors
    /// A server is away.
    pub async fn list(&self, now: Micros) -> Result<List> {
        let (saved, mut list) = (self.saved().await?, List::default());
        for board in self.boards {
            list.0.extend(self.list_of(board, &saved, now).await?);
        }
        Ok(list)
    }

    /// All snapshots, for [`Self::list_of`].
    ///
    /// # Errors
    /// MySQL is away.
    pub async fn saved(&self) -> Result<Saved> {
        Ok(self.store.snapshots().await?.into_iter().collect())
    }

    /// The same of one board.
    ///
    /// # Errors
    /// A server is away.
    pub async fn list_of(&self, board: &Board, saved: &Saved, now: Micros) -> Result<Vec<Listed>> {
        let calendar = board.calendar()?;
        let period = Period::containing(board.period, now, &calendar);
        let mut open = self.in_redis(&board.name, period, "open", saved, now).await?;
        let left = (period.end(&calendar).0 - now.0).max(0).unsigned_abs() / 1_000_000;
        open.ends_in_s = if board.period == PeriodKind::Total { None } else { Some(left) };
        let mut listed = vec![open];
        listed.extend(self.closed(board, period, saved, now).await?);
        Ok(listed)
    }

    /// A period that is not archived.
    async fn in_redis(
        &self,
        board: &str,
        period: Period,
        state: &'static str,
        saved: &Saved,
        now: Micros,
    ) -> Result<Listed> {
        let at = BoardPeriod { board: board.to_owned(), period: period.to_string() };
        let (members, _) = self.cache.count_board(&at).await?;
        let mark = self.cache.board_marks(std::slice::from_ref(&at)).await?.pop().flatten();
        let snapshot = saved.get(&at).filter(|snapshot| snapshot.taken_at.is_some());
        let is_lost = snapshot.is_some_and(|snapshot| !snapshot.is_marked(mark));
        let state = if is_lost { "lost" } else { state };
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

    /// Those before the current period, newest first.
    async fn closed(&self, board: &Board, current: Period, saved: &Saved, now: Micros) -> Result<Vec<Listed>> {
        let rows = self.store.board_periods(&board.name, board.period.like(), LOOK_BACK).await?;
        let calendar = board.calendar()?;
        let ended_s_ago = |period: Period| (now.0 - period.end(&calendar).0).max(0).unsigned_abs() / 1_000_000;
        let mut listed = Vec::new();
        let previous = iter::successors(current.previous(), |period| period.previous()).take(UNARCHIVED_LOOKED);
        for period in previous.filter(|period| rows.iter().all(|(at, _)| at.period != period.to_string())) {
            let mut closed = self.in_redis(&board.name, period, "closed", saved, now).await?;
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
            let (BoardPeriod { board, period }, state) = (at, row.state.text());
            let mut before = iter::successors(current.previous(), |period| period.previous()).take(LOOK_BACK);
            let ended_s_ago = before.find(|other| other.to_string() == period).map(ended_s_ago);
            listed.push(Listed { board, period, state, members, ends_in_s: None, ended_s_ago, saved_s_ago: None });
        }
        Ok(listed)
    }

    /// The first `count` places of a board; of its current period where none is named. Where the configuration has the
    /// board for several lengths of period, one must be.
    ///
    /// # Errors
    /// [`NotShown`]; a server is away.
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
            None => Period::containing(board.period, now, &board.calendar()?).to_string(),
        };
        let at = BoardPeriod { board: name.to_owned(), period };
        let Read { from, placed, .. } = read(self.store, self.cache, &at, 0, count, ranking).await?;
        let rule = board.rule();
        let entries = placed.into_iter().map(|placed| row(placed, rule)).collect();
        Ok(Top { board: at.board, period: at.period, from, entries })
    }

    fn find(&self, name: &str, period: Option<&str>) -> Result<&Board> {
        let named: Vec<&Board> = self.boards.iter().filter(|board| board.name == name).collect();
        let kind = period.map(|period| period.parse().map(Period::kind)).transpose();
        let kind = kind.map_err(|error| NotShown(format!("{error}")))?;
        match (named.as_slice(), kind) {
            ([], _) => {
                let mut known: Vec<&str> = self.boards.iter().map(|board| board.name.as_str()).collect();
                known.dedup();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(NotShown(format!("no board is called \"{name}\": the configuration has {known}")).into())
            }
            ([board], None) => Ok(board),
            (_, None) => {
                let periods: Vec<String> = named.iter().map(|board| board.period.to_string()).collect();
                let wish = "name a period, for instance 2026-11-21, 2026-W47, 2026-11 or total";
                Err(NotShown(format!("{name} has boards by {}: {wish}", periods.join(", "))).into())
            }
            (_, Some(kind)) => {
                let board = named.into_iter().find(|board| board.period == kind);
                board.ok_or_else(|| NotShown(format!("{name} has no board by {kind}")).into())
            }
        }
    }
}

/// A page of a period, from wherever it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Read {
    /// `redis` or `mysql`.
    pub from: &'static str,
    /// Members in all.
    pub members: u64,
    /// The page.
    pub placed: Vec<Placed>,
}

/// Reads `count` members after the first `after`. Archived rows are whole from "done" on; before that the zset is.
///
/// # Errors
/// [`NotShown`]; a server is away.
pub(crate) async fn read(
    store: &Store,
    cache: &Cache,
    at: &BoardPeriod,
    after: u64,
    count: u64,
    ranking: Ranking,
) -> Result<Read> {
    let zset = match store.board_period(at).await? {
        Some(row) if row.state == PeriodState::Pruned => {
            return Err(NotShown(format!("{at}: its archive is deleted, archive_keep is over")).into());
        }
        // Also while late writes are copied beside it.
        Some(PeriodRow { copy: Some(copy), tally, .. }) => {
            let rows = store.archived_page(at, copy, after, usize::try_from(count).unwrap_or(usize::MAX)).await?;
            let page: Vec<BoardMember> = rows.into_iter().map(|(_, member)| member).collect();
            let mut before = Before { members: after, ..Before::default() };
            if let (Some(first), 1.., Ranking::Competition | Ranking::Dense) = (page.first(), after, ranking) {
                (before.higher, before.distinct) = store.archived_before(at, copy, after, first.score).await?;
            }
            return Ok(Read { from: "mysql", members: tally.members, placed: place(ranking, before, page) });
        }
        row => {
            let keys = cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
            // One that was frozen a moment ago may not be noted yet.
            let zset = if row.is_some() || (keys.frozen && !keys.live) { Zset::Frozen } else { Zset::ConfigHandle };
            if row.is_some() && !keys.frozen {
                return Err(NotShown(format!("{at}: Redis lost its frozen zset before it was archived")).into());
            }
            zset
        }
    };
    let (members, placed) = cache.read_board(at, zset, Part::Page { after, count }, ranking).await?;
    Ok(Read { from: "redis", members, placed })
}

fn row(placed: Placed, rule: Rule) -> Row {
    let columns = rule.columns(placed.score);
    Row {
        place: placed.place,
        member: String::from_utf8_lossy(&placed.member).into_owned(),
        score: placed.score,
        primary: columns.map(|columns| columns.primary),
        second: columns.map(|columns| columns.low),
    }
}

impl Top {
    /// As comma-separated values with a header.
    ///
    /// # Errors
    /// Never, in memory.
    pub fn to_csv(&self) -> Result<String> {
        let mut csv = csv::Writer::from_writer(Vec::new());
        for row in &self.entries {
            csv.serialize(row)?;
        }
        Ok(String::from_utf8(csv.into_inner()?)?)
    }
}

/// `2 d 3 h`, `3 h 10 min`, `9 min`.
fn spoken(time: Duration) -> String {
    let minutes = time.as_secs() / 60;
    match (minutes / 1_440, minutes / 60 % 24, minutes % 60) {
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no [[board]] is configured");
        }
        write!(f, "{:<20} {:<12} {:<8} {:>12}  {:<14}  SNAPSHOT", "BOARD", "PERIOD", "STATE", "MEMBERS", "ENDS")?;
        for Listed { board, period, state, members, ends_in_s, saved_s_ago, .. } in &self.0 {
            let time = |seconds: &u64| spoken(Duration::from_secs(*seconds));
            let ends = ends_in_s.as_ref().map_or_else(String::new, |seconds| format!("in {}", time(seconds)));
            let saved = saved_s_ago.as_ref().map_or_else(String::new, |seconds| format!("{} ago", time(seconds)));
            let line = format!("{board:<20} {period:<12} {state:<8} {members:>12}  {ends:<14}  {saved}");
            write!(f, "\n{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl fmt::Display for Top {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = if self.from == "redis" { "Redis" } else { "MySQL" };
        write!(f, "{} {}, from {from}", self.board, self.period)?;
        for Row { place, member, score, primary, second } in &self.entries {
            match (primary, second) {
                (Some(primary), Some(second)) => write!(f, "\n{place:>8}  {member:<24} {primary:>12} {second:>12}")?,
                _ => write!(f, "\n{place:>8}  {member:<24} {score:>12}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_and_a_top_read_as_tables() {
        let listed = |period: &str, state, ends_in_s, saved_s_ago| Listed {
            board: "likes".to_owned(),
            period: period.to_owned(),
            state,
            members: 1_234,
            ends_in_s,
            ended_s_ago: None,
            saved_s_ago,
        };
        let open = listed("2026-W47", "open", Some(97_200), Some(240));
        let list = List(vec![open, listed("2026-W46", "done", None, None)]);
        assert_eq!(
            list.to_string(),
            "BOARD                PERIOD       STATE         MEMBERS  ENDS            SNAPSHOT\n\
             likes                2026-W47     open             1234  in 1 d 3 h      4 min ago\n\
             likes                2026-W46     done             1234"
        );
        let row = Row { place: 1, member: "a,b".to_owned(), score: 5.0, primary: None, second: None };
        let top = Top { board: "likes".to_owned(), period: "total".to_owned(), from: "mysql", entries: vec![row] };
        assert_eq!(top.to_string(), "likes total, from MySQL\n       1  a,b                                 5");
        assert_eq!(top.to_csv().unwrap(), "place,member,score,primary,second\n1,\"a,b\",5.0,,\n");
    }
}
