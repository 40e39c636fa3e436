//! Manages the claims to a board's closed periods, and Redis' notes about the freezes of these periods. If Redis loses
//! the zsets or goes back to an older state, the same happens to the notes (decision 0049).

use redis::Value;
use tallyd_core::model::{BoardPeriod, Freeze};

use super::{BOARD_CLAIM, Cache, CacheError, Call, Result, text};

/// The field with the generation, in the hash of a board's freeze notes. No period can have the name of this field.
pub(super) const GENERATION: &str = "-";

pub(super) fn late_field(period: &str) -> String {
    format!("{period}:late")
}

impl Cache {
    /// After this call, only `run` can change the board's closed periods. `frozen` are the periods that are frozen in
    /// MySQL: if Redis has lost the note of one, it is stored again.
    pub async fn claim_board(&self, board: &str, run: u64, frozen: &[(String, u64, u64)]) -> Result<u64> {
        const ACTION: &str = "claim a board";
        let call = Call::new(&BOARD_CLAIM, self.keys.board_claim(board)).key(self.keys.board_freezes(board));
        let call = frozen.iter().fold(call, |call, (period, ..)| call.key(self.keys.board(board, period)));
        let call = call.arg(self.claim(run)).number(run);
        let call = frozen.iter().fold(call, |call, (period, of, note)| call.arg(period).number(of).number(note));
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        number(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    pub async fn forget_freeze(&self, at: &BoardPeriod) -> Result<()> {
        let mut command = redis::cmd("HDEL");
        command.arg(self.keys.board_freezes(&at.board)).arg(&at.period).arg(late_field(&at.period));
        self.answer("forget the freeze of a board", command).await.map(drop)
    }

    /// A failover of MySQL can lose a run's number and assign it again. So the claim also contains a nonce.
    pub(super) fn claim(&self, run: u64) -> String {
        format!("{run}:{:016x}", self.nonce)
    }
}

/// Reads the notes of a period, and the number of moved late members. If no run has claimed the board in this data set
/// of Redis, the data set counts as newer than everything in MySQL.
pub(super) fn read_notes(answer: &Value) -> (Freeze, u64) {
    let [generation, note, late] = answer.as_sequence().unwrap_or_default() else { return (Freeze::UNCLAIMED, 0) };
    let freeze = |generation| Freeze { generation, note: number(note) };
    (number(generation).map_or(Freeze::UNCLAIMED, freeze), number(late).unwrap_or(0))
}

fn number(answer: &Value) -> Option<u64> {
    text(answer)?.parse().ok()
}
