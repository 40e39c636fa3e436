//! Adds amounts to members of boards. One call changes all periods that contain the addition's instant.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use redis::Value;
use tallyd_core::board::Board;
use tallyd_core::model::Micros;
use tallyd_core::period::Period;

use super::refused::{CallOutcome, Refused, read_each};
use super::{BOARD, Cache, CacheError, Call, text};

/// Additions per call. With this limit, the script blocks other commands for only a fraction of a millisecond.
const CALL_ADDITIONS_MAX: u64 = 50;

#[derive(Clone, Debug)]
pub struct Gain<'a> {
    pub board: &'a str,
    pub member: Cow<'a, [u8]>,
    /// The name of a column in the board's `score`. The call adds `delta` to this column.
    pub column: Cow<'a, str>,
    pub delta: i64,
    /// The instant of the addition. The call changes all periods that contain this instant.
    pub at: Micros,
}

/// The place of an addition in an outbox: the row's number, and the addition's place in the row. The first place is 1.
pub type Place = (u64, usize);

/// A call that makes several additions of an outbox to a board. A repeated or late call adds nothing twice.
pub struct FeedCall {
    call: Call,
    additions: u64,
}

struct OpenCall {
    call: FeedCall,
    keys: Vec<String>,
    last: Place,
}

struct Zsets<'a> {
    keys: Vec<String>,
    board: &'a Board,
    numbers: Vec<(u32, i64, i64)>,
}

#[derive(Debug, thiserror::Error)]
pub enum GainError {
    #[error("no [[board]] is named {0}")]
    NoBoard(String),
    #[error("[[board]] {board} has no column {column}: its columns are {}", .has.join(", "))]
    NoColumn { board: String, column: String, has: Vec<String> },
    #[error(transparent)]
    Zone(#[from] jiff::Error),
}

impl Cache {
    pub fn gain_call(&self, boards: &[Board], gain: &Gain<'_>) -> Result<Call, GainError> {
        let zsets = self.zsets(boards, gain.board, gain.at)?;
        let (primary, second) = zsets.deltas(gain)?;
        Ok(zsets.begin(None, &gain.member, &primary.to_string(), &second.to_string()))
    }

    /// Builds the calls that make a partition's additions. The additions must be in the order of their places.
    pub fn feed_calls<'a>(
        &self,
        boards: &[Board],
        partition: u16,
        additions: impl Iterator<Item = (Place, Gain<'a>)>,
    ) -> Result<Vec<FeedCall>, GainError> {
        let (mut calls, mut open) = (Vec::new(), BTreeMap::<&str, OpenCall>::new());
        // All additions of a row have the same instant, so the periods are computed once for each row and board.
        let mut zsets_at = BTreeMap::new();
        for (place, gain) in additions {
            let zsets = match zsets_at.entry((gain.board, gain.at)) {
                Entry::Vacant(vacant) => vacant.insert(self.zsets(boards, gain.board, gain.at)?),
                Entry::Occupied(known) => known.into_mut(),
            };
            let (primary, second) = zsets.deltas(&gain)?;
            let former = open.remove(gain.board);
            let after = former.as_ref().map(|former| former.last);
            let fits = |former: &OpenCall| former.keys == zsets.keys && former.call.additions < CALL_ADDITIONS_MAX;
            let (FeedCall { call, additions }, keys) = match former {
                Some(former) if fits(&former) => (former.call, former.keys),
                former => {
                    calls.extend(former.map(|former| former.call));
                    let call = zsets.begin(Some(self.keys.board_added(gain.board)), b"", "", "");
                    let after = after.map_or_else(String::new, |(number, place)| format!("{number}:{place}"));
                    let call = call.arg("once").number(partition).arg(after);
                    (FeedCall { call, additions: 0 }, zsets.keys.clone())
                }
            };
            let call = call.number(place.0).number(place.1).arg(&gain.member).number(primary).number(second);
            let call = FeedCall { call, additions: additions + 1 };
            open.insert(gain.board, OpenCall { call, keys, last: place });
        }
        calls.extend(open.into_values().map(|open| open.call));
        Ok(calls)
    }

    fn zsets<'a>(&self, boards: &'a [Board], name: &str, at: Micros) -> Result<Zsets<'a>, GainError> {
        let boards: Vec<&Board> = boards.iter().filter(|board| board.name == name).collect();
        let board = *boards.first().ok_or_else(|| GainError::NoBoard(name.to_owned()))?;
        let (mut keys, mut numbers) = (Vec::with_capacity(boards.len()), Vec::with_capacity(boards.len()));
        for board in &boards {
            let calendar = board.calendar(jiff::tz::db())?;
            let period = Period::containing(board.period, at, &calendar);
            keys.push(self.keys.board(name, &period.to_string()));
            numbers.push((board.rule().packing.low_bits(), period.time_ends_s(&calendar), board.period.step_s()));
        }
        Ok(Zsets { keys, board, numbers })
    }

    /// Runs calls of [`Self::feed_calls`] in order. Returns the additions that the script refused.
    ///
    /// # Errors
    /// Redis failed to answer, or skipped some of the calls. The caller must send all calls again.
    pub async fn feed(&self, calls: Vec<FeedCall>) -> super::Result<Refused> {
        const ACTION: &str = "add to a board";
        let (calls, additions): (Vec<Call>, Vec<u64>) = calls.into_iter().map(|it| (it.call, it.additions)).unzip();
        let mut refused = Refused::default();
        let read = |place: usize, outcome| {
            match outcome {
                CallOutcome::Answered(Value::Array(errors)) => {
                    errors.iter().for_each(|error| refused.note(1, text(error).unwrap_or_default()));
                }
                // The script returns an integer if the addition before the call's additions is missing in Redis. The
                // script then adds nothing, and the caller must send both calls again.
                CallOutcome::Answered(answer) => return Err(CacheError::unexpected(ACTION, &answer)),
                CallOutcome::Refused(error) => {
                    refused.note_call(additions.get(place).copied().unwrap_or_default(), &error)
                }
                CallOutcome::Failed => {}
            }
            Ok(())
        };
        read_each(self.eval_each(ACTION, &calls).await?, read)?;
        Ok(refused)
    }
}

impl Zsets<'_> {
    fn deltas(&self, gain: &Gain<'_>) -> Result<(i64, i64), GainError> {
        match self.board.score.iter().position(|name| *name == gain.column) {
            Some(0) => Ok((gain.delta, 0)),
            Some(_) => Ok((0, gain.delta)),
            None => {
                let (board, column) = (gain.board.to_owned(), gain.column.to_string());
                Err(GainError::NoColumn { board, column, has: self.board.score.clone() })
            }
        }
    }

    fn begin(&self, added: Option<String>, member: &[u8], primary: &str, second: &str) -> Call {
        let mut keys = self.keys.iter().cloned().chain(added);
        let call = Call::new(&BOARD, keys.next().unwrap_or_default());
        let call = keys.fold(call, Call::key).arg(member).arg(primary).arg(second).arg(self.board.rule().name());
        let with = |call: Call, (bits, ends_s, step_s)| call.number(bits).number(ends_s).number(step_s);
        self.numbers.iter().copied().fold(call, with)
    }
}
