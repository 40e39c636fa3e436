//! Who may change a board's closed periods, and Redis' own notes of which were frozen: they go back in time together with the zsets.

use redis::Value;

use super::boards::Changed;
use super::{BOARD_CLAIM, BOARD_NOTE, Cache, Call, Result, text, unexpected};

/// The field that the notes have from the beginning; no period is called so.
pub(super) const NOTES_BEGUN: &str = "-";

/// Periods whose notes are read at once.
const NOTES_PAGE: usize = 1_000;

/// What Redis has noted of a period's freeze. It goes back in time together with the zsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Note {
    /// It keeps no notes.
    #[default]
    Unknown,
    /// It was never frozen.
    Missing,
    /// It was, and was put back from its archive at that time, in microseconds; 0 where it never was.
    Frozen(i64),
}

impl Cache {
    /// Lets `run`, and no other one from now on, change the board's closed periods. Says whether Redis keeps notes of which were frozen.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn claim_board(&self, board: &str, run: u64) -> Result<bool> {
        const ACTION: &str = "claim a board";
        let call = Call::new(&BOARD_CLAIM, self.keys.board_claim(board)).key(self.keys.board_freezes(board));
        match self.change(ACTION, call.number(run)).await? {
            Changed::Done(noted) => Ok(noted == 1),
            other => Err(unexpected(ACTION, &Value::SimpleString(format!("{other:?}")))),
        }
    }

    /// Notes which periods were frozen, each with the time at which it was put back: begins the notes with these; or, where they are there, adds
    /// those that have no live zset.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn note_freezes(
        &self,
        board: &str,
        run: u64,
        are_there: bool,
        periods: &[(String, i64)],
    ) -> Result<Changed> {
        let call = Call::new(&BOARD_NOTE, self.keys.board_claim(board)).key(self.keys.board_freezes(board));
        let live = periods.iter().filter(|_| are_there).map(|(period, _)| self.keys.board(board, period));
        let call = live.fold(call, Call::key).number(run);
        let call = periods.iter().fold(call, |call, (period, restored)| call.arg(period).number(restored));
        self.change("note which boards were frozen", call).await
    }

    /// Those of the periods that Redis has noted otherwise, or not at all.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn noted_otherwise(&self, board: &str, periods: Vec<(String, i64)>) -> Result<Vec<(String, i64)>> {
        let mut otherwise = Vec::new();
        for piece in periods.chunks(NOTES_PAGE) {
            let mut command = redis::cmd("HMGET");
            command.arg(self.keys.board_freezes(board)).arg(piece.iter().map(|(period, _)| period).collect::<Vec<_>>());
            let answer = self.answer("read which boards were frozen", command).await?;
            let notes = answer.as_sequence().unwrap_or_default().iter().map(|note| text(note)?.parse::<i64>().ok());
            let pairs = piece.iter().zip(notes).filter(|((_, restored), note)| *note != Some(*restored));
            otherwise.extend(pairs.map(|(period, _)| period.clone()));
        }
        Ok(otherwise)
    }
}

/// What stands in the notes: whether they were begun, and the period's.
pub(super) fn read_note(answer: &Value) -> Note {
    match answer.as_sequence() {
        Some([Value::Nil, _]) | None => Note::Unknown,
        Some([_, note]) => text(note).and_then(|text| text.parse().ok()).map_or(Note::Missing, Note::Frozen),
        Some(_) => Note::Unknown,
    }
}
