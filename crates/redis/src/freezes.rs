//! The claims to a board's closed periods, and Redis' notes about their freezes. The notes go back in time, or are
//! lost, together with the zsets.

use redis::Value;
use tallyd_core::model::Freeze;

use super::{BOARD_CLAIM, Cache, CacheError, Call, Result, text};

/// The field of the notes that holds the generation. No period has this name.
pub(super) const GENERATION: &str = "-";

/// The field of the notes that counts the members that were moved into the frozen zset of that period.
pub(super) fn late_field(period: &str) -> String {
    format!("{period}:late")
}

impl Cache {
    /// Allows only `run` to change the board's closed periods from now on. Returns [`Freeze::generation`]. If Redis has
    /// gone back to before it had a period, its freeze is noted again. `frozen` has the frozen periods, each with
    /// MySQL's generation and note.
    pub async fn claim_board(&self, board: &str, run: u64, frozen: &[(String, u64, u64)]) -> Result<u64> {
        const ACTION: &str = "claim a board";
        let call = Call::new(&BOARD_CLAIM, self.keys.board_claim(board)).key(self.keys.board_freezes(board));
        let call = frozen.iter().fold(call, |call, (period, ..)| call.key(self.keys.board(board, period)));
        let call = call.arg(self.claim(run)).number(run);
        let call = frozen.iter().fold(call, |call, (period, of, note)| call.arg(period).number(of).number(note));
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        number(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    /// The text of a claim. After a failover that lost a run's number, MySQL may assign that number again. Two
    /// processes must not both have the claim, so it includes a nonce.
    pub(super) fn claim(&self, run: u64) -> String {
        format!("{run}:{:016x}", self.nonce)
    }
}

/// Reads the notes of a period, and how many late members were moved. Data that no run has claimed yet is newer than
/// all that MySQL knows.
pub(super) fn read_notes(answer: &Value) -> (Freeze, u64) {
    let [generation, note, late] = answer.as_sequence().unwrap_or_default() else { return (Freeze::UNCLAIMED, 0) };
    let freeze = |generation| Freeze { generation, note: number(note) };
    (number(generation).map_or(Freeze::UNCLAIMED, freeze), number(late).unwrap_or(0))
}

fn number(answer: &Value) -> Option<u64> {
    text(answer)?.parse().ok()
}
