//! Describes boards for operators, as text and as JSON. Pure.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use tallyd_core::archive::PeriodState;
use tallyd_redis::ranks::Placed;
use tallyd_redis::score::Rule;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BoardState {
    Open,
    Lost,
    Closed,
    Frozen,
    Done,
    Ended,
    Pruned,
}

impl BoardState {
    pub fn text(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Lost => "lost",
            Self::Closed => "closed",
            Self::Frozen => "frozen",
            Self::Done => "done",
            Self::Ended => "ended",
            Self::Pruned => "pruned",
        }
    }
}

impl From<PeriodState> for BoardState {
    fn from(state: PeriodState) -> Self {
        match state {
            PeriodState::Frozen => Self::Frozen,
            PeriodState::Done => Self::Done,
            PeriodState::Ended => Self::Ended,
            PeriodState::Pruned => Self::Pruned,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    pub board: String,
    pub period: String,
    pub state: BoardState,
    /// From Redis until the period is archived, and after that from MySQL.
    pub members: u64,
    /// `None` if the period has ended or never ends.
    pub ends_in_s: Option<u64>,
    /// `None` while the period is open, or if it ended more than `LOOK_BACK` periods ago.
    pub ended_s_ago: Option<u64>,
    /// `None` without a snapshot, or if the period is archived.
    pub saved_s_ago: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct List(pub Vec<Listed>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Redis,
    MySql,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Top {
    pub board: String,
    pub period: String,
    pub from: Source,
    pub entries: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The first place is 1.
    pub place: u64,
    /// Bytes that are not UTF-8 are replaced.
    pub member: String,
    pub score: f64,
    /// Decides the rank. `None` unless the board's `tie` packs two values into each score.
    pub primary: Option<u64>,
    /// Decides between members of equal rank.
    pub second: Option<u64>,
}

impl Row {
    pub(super) fn new(placed: Placed, rule: Rule) -> Self {
        let columns = rule.columns(placed.score);
        Self {
            place: placed.place,
            member: String::from_utf8_lossy(&placed.member).into_owned(),
            score: placed.score,
            primary: columns.map(|columns| columns.primary),
            second: columns.map(|columns| columns.low),
        }
    }
}

impl Top {
    pub fn to_csv(&self) -> Result<String> {
        let mut csv = csv::Writer::from_writer(Vec::new());
        for row in &self.entries {
            csv.serialize(row)?;
        }
        Ok(String::from_utf8(csv.into_inner()?)?)
    }
}

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
            let state = state.text();
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
        let from = match self.from {
            Source::Redis => "Redis",
            Source::MySql => "MySQL",
        };
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
    fn programs_read_the_same_names_as_people() {
        use BoardState::{Closed, Done, Ended, Frozen, Lost, Open, Pruned};
        for state in [Open, Lost, Closed, Frozen, Done, Ended, Pruned] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.text());
        }
        for (source, name) in [(Source::Redis, "redis"), (Source::MySql, "mysql")] {
            assert_eq!(serde_json::to_value(source).unwrap(), name);
        }
    }

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
        let open = listed("2026-W47", BoardState::Open, Some(97_200), Some(240));
        let list = List(vec![open, listed("2026-W46", BoardState::Done, None, None)]);
        assert_eq!(
            list.to_string(),
            "BOARD                PERIOD       STATE         MEMBERS  ENDS            SNAPSHOT\n\
             likes                2026-W47     open             1234  in 1 d 3 h      4 min ago\n\
             likes                2026-W46     done             1234"
        );
        let row = Row { place: 1, member: "a,b".to_owned(), score: 5.0, primary: None, second: None };
        let top =
            Top { board: "likes".to_owned(), period: "total".to_owned(), from: Source::MySql, entries: vec![row] };
        assert_eq!(top.to_string(), "likes total, from MySQL\n       1  a,b                                 5");
        assert_eq!(top.to_csv().unwrap(), "place,member,score,primary,second\n1,\"a,b\",5.0,,\n");
    }
}
