//! Adds amounts to members of boards. One call changes all periods that contain the addition's instant.

use redis::Value;
use tallyd_core::board::Board;
use tallyd_core::model::Micros;
use tallyd_core::period::Period;

use super::{BOARD, Cache, CacheError, Call};

/// An amount to add to a member of a board.
#[derive(Clone, Copy, Debug)]
pub struct Gain<'a> {
    pub board: &'a str,
    /// The member to add to.
    pub member: &'a [u8],
    /// The name of a column in the board's `score`. The call adds `delta` to this column.
    pub column: &'a str,
    pub delta: i64,
    /// The instant of the addition. The call changes all periods that contain this instant.
    pub at: Micros,
}

/// Identifies an addition in an outbox, so that a repeated or late call adds nothing twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Once {
    pub partition: u16,
    /// The row's number, and the addition's place in the row. The first place is 1.
    pub place: (u64, usize),
    /// The previous addition that was sent for the board, or `None` if that addition has certainly arrived.
    pub after: Option<(u64, usize)>,
}

/// The reason why an addition to a board is impossible with this configuration.
#[derive(Debug, thiserror::Error)]
pub enum GainError {
    /// No board has that name.
    #[error("no [[board]] is named {0}")]
    NoBoard(String),
    /// The board has no such column.
    #[error("[[board]] {board} has no column {column}: its columns are {}", .has.join(", "))]
    NoColumn {
        board: String,
        /// The requested column.
        column: String,
        /// The columns of the board.
        has: Vec<String>,
    },
    /// The board's time zone is unknown on this host.
    #[error(transparent)]
    Zone(#[from] jiff::Error),
}

impl Cache {
    /// Builds the call of lua/board.lua.
    ///
    /// # Errors
    /// Fails if `boards` has no such board, or if the board has no such column.
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

    /// Runs calls of lua/board.lua in order. Returns the errors of the calls that the script refused. A retry of such a
    /// call does not help.
    ///
    /// # Errors
    ///
    /// Redis failed to answer, or skipped some of the calls. The caller must send all calls again.
    pub async fn gain(&self, calls: &[Call]) -> super::Result<Vec<CacheError>> {
        const ACTION: &str = "add to a board";
        let (mut refused, mut missing) = (Vec::new(), None);
        for answer in self.eval_each(ACTION, calls).await? {
            match answer {
                // The script returns an integer if the addition before the call's addition is missing in Redis. The
                // script then adds nothing, and the caller must send both additions again.
                Ok(answer @ Value::Int(_)) => missing = Some(CacheError::unexpected(ACTION, &answer)),
                Ok(_) => {}
                Err(error) if error.is_for_ever() => refused.push(error),
                Err(error) => missing = Some(error),
            }
        }
        missing.map_or(Ok(refused), Err)
    }
}
