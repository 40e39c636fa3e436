//! Who may change a board's closed periods, and what Redis knows of their freezes. That goes back in time, or is lost, together with the zsets.

use redis::Value;
use tallyd_core::model::Freeze;

use super::{BOARD_CLAIM, Cache, CacheError, Call, Result, text};

/// The field of the notes that holds the generation; no period is called so.
pub(super) const GENERATION: &str = "-";

/// The field of the notes that counts what was moved into the frozen zset of that period.
pub(super) fn late_field(period: &str) -> String {
    format!("{period}:late")
}

impl Cache {
    /// Lets `run`, and no other one from now on, change the board's closed periods; gives [`Freeze::generation`]. Notes again which of the `frozen`
    /// periods (each with MySQL's generation and note) were frozen, where Redis has gone back to before it had them.
    pub async fn claim_board(&self, board: &str, run: u64, frozen: &[(String, u64, u64)]) -> Result<u64> {
        const ACTION: &str = "claim a board";
        let call = Call::new(&BOARD_CLAIM, self.keys.board_claim(board)).key(self.keys.board_freezes(board));
        let call = frozen.iter().fold(call, |call, (period, ..)| call.key(self.keys.board(board, period)));
        let call = call.arg(self.claim(run)).number(run);
        let call = frozen.iter().fold(call, |call, (period, of, note)| call.arg(period).number(of).number(note));
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        number(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    /// What a claim is: MySQL may give a run's number away again after a failover that lost it, and two processes must not both have the claim.
    pub(super) fn claim(&self, run: u64) -> String {
        format!("{run}:{:016x}", self.nonce)
    }
}

/// What is noted of a period, and how many late members were moved. Data that no run has claimed yet is newer than all that MySQL knows.
pub(super) fn read_notes(answer: &Value) -> (Freeze, u64) {
    let [generation, note, late] = answer.as_sequence().unwrap_or_default() else { return (Freeze::UNCLAIMED, 0) };
    let freeze = |generation| Freeze { generation, note: number(note) };
    (number(generation).map_or(Freeze::UNCLAIMED, freeze), number(late).unwrap_or(0))
}

fn number(answer: &Value) -> Option<u64> {
    text(answer)?.parse().ok()
}
