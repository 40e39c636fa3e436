//! Adding to a board: one call for all periods that an instant lies in.

use redis::Value;
use tallyd_core::board::Board;
use tallyd_core::model::Micros;
use tallyd_core::period::Period;

use super::{BOARD, Cache, CacheError, Call};

/// What is added to a member of a board.
#[derive(Clone, Copy, Debug)]
pub struct Gain<'a> {
    pub board: &'a str,
    /// Who gains.
    pub member: &'a [u8],
    /// Which of its numbers: a name of the board's `score`.
    pub column: &'a str,
    pub delta: i64,
    /// When: in the periods that this lies in.
    pub at: Micros,
}

/// Which addition of an outbox it is: a call that comes twice, or late, adds nothing twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Once {
    pub partition: u16,
    /// The row's number, and its place in the row, from 1.
    pub place: (u64, usize),
    /// The same of what was sent for the board before it, unless that has come already.
    pub after: Option<(u64, usize)>,
}

/// Why nothing can be added to a board: the configuration would have to be another one.
#[derive(Debug, thiserror::Error)]
pub enum GainError {
    /// There is no such board.
    #[error("no [[board]] is named {0}")]
    NoBoard(String),
    /// The board has no such column.
    #[error("[[board]] {board} has no column {column}: it has {}", .has.join(", "))]
    NoColumn {
        board: String,
        /// What was asked for.
        column: String,
        /// The columns that it has.
        has: Vec<String>,
    },
    /// The board's time zone is not known here.
    #[error(transparent)]
    Zone(#[from] jiff::Error),
}

impl Cache {
    /// The call of lua/board.lua that adds it.
    ///
    /// # Errors
    /// The board, or the column, is not among `boards`.
    pub fn gain_call(&self, boards: &[Board], gain: Gain<'_>, once: Option<Once>) -> Result<Call, GainError> {
        let Gain { board: name, member, column, delta, at } = gain;
        let missing = || GainError::NoBoard(name.to_owned());
        let boards: Vec<&Board> = boards.iter().filter(|board| board.name == name).collect();
        let first = boards.first().ok_or_else(missing)?;
        let (primary, second) = match first.score.iter().position(|name| name == column) {
            Some(0) => (delta, 0),
            Some(_) => (0, delta),
            None => {
                let (board, column) = (name.to_owned(), column.to_owned());
                return Err(GainError::NoColumn { board, column, has: first.score.clone() });
            }
        };
        let mut call: Option<Call> = None;
        let mut packings = Vec::with_capacity(boards.len());
        for board in &boards {
            let calendar = board.calendar(jiff::tz::db())?;
            let period = Period::containing(board.period, at, &calendar);
            let key = self.keys.board(&board.name, &period.to_string());
            call = Some(match call {
                Some(call) => call.key(key),
                None => Call::new(&BOARD, key),
            });
            packings.push((board.rule().packing.low_bits(), period.time_ends_s(&calendar), board.period.step_s()));
        }
        let call = call.ok_or_else(missing)?;
        let call = if once.is_some() { call.key(self.keys.board_added(name)) } else { call };
        let call = call.arg(member).number(primary).number(second).arg(first.rule().name());
        let with = |call: Call, (bits, ends_s, step_s)| call.number(bits).number(ends_s).number(step_s);
        let call = packings.into_iter().fold(call, with);
        Ok(match once {
            None => call,
            Some(Once { partition, place, after }) => {
                let after = after.map_or_else(String::new, |(number, place)| format!("{number}:{place}"));
                call.arg("once").number(partition).number(place.0).number(place.1).arg(after)
            }
        })
    }

    /// Makes such calls in their order; gives why some could not be made, which no later try would change.
    ///
    /// # Errors
    /// Redis is away, or took some of them: all must be sent again.
    pub async fn gain(&self, calls: &[Call]) -> super::Result<Vec<CacheError>> {
        const ACTION: &str = "add to a board";
        let (mut refused, mut missing) = (Vec::new(), None);
        for answer in self.eval_each(ACTION, calls).await? {
            match answer {
                // What comes before it was not taken: it is sent again with that.
                Ok(answer @ Value::Int(_)) => missing = Some(CacheError::unexpected(ACTION, &answer)),
                Ok(_) => {}
                Err(error) if error.is_for_ever() => refused.push(error),
                Err(error) => missing = Some(error),
            }
        }
        missing.map_or(Ok(refused), Err)
    }
}
