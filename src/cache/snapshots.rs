//! Boards between Redis and their snapshots: read while they are written to, and put back.
//!
//! A mark beside the zset tells whether Redis has lost the board since the last snapshot began: an empty server, and one that was
//! started from an old backup, don't have it. Every page is read in one script with the mark.

use redis::{Pipeline, Value};

use super::boards::{Changed, read_members};
use super::score::Rule;
use super::{
    BOARD_FILL, BOARD_FREEZE, BOARD_MARK, BOARD_MERGE, BOARD_SCAN, Cache, Call, PIPELINE_COMMANDS_MAX, Result, text,
    unexpected,
};
use crate::model::{BoardMember, BoardPeriod};

/// What a page of a board is, or why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum Scanned<T> {
    /// The page.
    Page(T),
    /// The mark is another one or gone: Redis has lost the board.
    Lost,
    /// The period was frozen.
    Frozen,
    /// The zset has fewer members than it must have: it was evicted, or deleted.
    Shrunk,
}

/// Some of a board, and where the rest begins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScanPage {
    /// Where to go on; none at the end.
    pub next: Option<String>,
    /// Some members, perhaps some that were read before.
    pub members: Vec<BoardMember>,
}

/// Which zsets of a restore are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreKeys {
    /// The mark of the board's last snapshot.
    pub mark: Option<u64>,
    /// An earlier restore was interrupted after the whole was there.
    pub restored: bool,
}

impl Cache {
    /// The marks of the periods' last snapshots, in their order; none where Redis has lost the board.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn board_marks(&self, periods: &[BoardPeriod]) -> Result<Vec<Option<u64>>> {
        let mut found = Vec::with_capacity(periods.len());
        for piece in periods.chunks(PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for at in piece {
                pipeline.cmd("GET").arg(self.mark(at));
            }
            let answers = self.answers("look for the marks of boards", &pipeline).await?;
            found.extend(answers.iter().map(|answer| text(answer).and_then(|text| text.parse().ok())));
        }
        Ok(found)
    }

    /// Marks a board with the number of the snapshot that begins. `former` is the mark that it must have; none where there was no
    /// snapshot before.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn mark_board(&self, at: &BoardPeriod, former: Option<u64>, run: u64) -> Result<Changed> {
        let call = Call::new(&BOARD_MARK, self.mark(at)).key(self.live(at));
        let call = call.arg(former.map(|former| former.to_string()).unwrap_or_default()).number(run);
        self.change("mark a board", call).await
    }

    /// Forgets the mark of a board whose snapshot is deleted.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn unmark_board(&self, at: &BoardPeriod) -> Result<()> {
        let mut command = redis::cmd("UNLINK");
        command.arg(self.mark(at));
        self.answer("forget the mark of a board", command).await.map(drop)
    }

    /// About `count` members of a live board that has the mark `run` and at least `members_min` members. Each member that is there
    /// all the time is on some page.
    ///
    /// # Errors
    /// Redis is away, or the key holds something else.
    pub async fn scan_board(
        &self,
        at: &BoardPeriod,
        run: u64,
        members_min: u64,
        from: Option<&str>,
        count: usize,
    ) -> Result<Scanned<ScanPage>> {
        const ACTION: &str = "read a board for its snapshot";
        let call = self.scan_call(at, run, members_min).arg("scan").arg(from.unwrap_or("0")).number(count);
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        scanned(answer, |answer| {
            let Value::Array(mut parts) = answer else { return None };
            let next = text(parts.first()?)?.to_owned();
            parts.remove(0);
            let members = read_members(&Value::Array(parts))?;
            Some(ScanPage { next: Some(next).filter(|next| next != "0"), members })
        })
        .map_err(|answer| unexpected(ACTION, &answer))
    }

    /// Which of `members` a live board has, under the same conditions.
    ///
    /// # Errors
    /// Redis is away, or the key holds something else.
    pub async fn board_has(
        &self,
        at: &BoardPeriod,
        run: u64,
        members_min: u64,
        members: &[BoardMember],
    ) -> Result<Scanned<Vec<bool>>> {
        const ACTION: &str = "look for members of a board";
        if members.is_empty() {
            return Ok(Scanned::Page(Vec::new()));
        }
        let call = self.scan_call(at, run, members_min).arg("have");
        let call = members.iter().fold(call, |call, member| call.arg(&member.member));
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        scanned(answer, |answer| {
            let Value::Array(scores) = answer else { return None };
            Some(scores.iter().map(|score| *score != Value::Nil).collect())
        })
        .map_err(|answer| unexpected(ACTION, &answer))
    }

    /// The period's mark, and whether an interrupted restore has left the whole of it.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn restore_keys(&self, at: &BoardPeriod) -> Result<RestoreKeys> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("GET").arg(self.mark(at));
        pipeline.cmd("EXISTS").arg(self.restored(at));
        let answers = self.answers("look for what a restore has left", &pipeline).await?;
        let mark = answers.first().and_then(text).and_then(|mark| mark.parse().ok());
        Ok(RestoreKeys { mark, restored: answers.last() == Some(&Value::Int(1)) })
    }

    /// Adds members to the zset that is being filled, and says how many it has; with none begins it anew.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn fill_board(&self, at: &BoardPeriod, run: u64, members: &[BoardMember]) -> Result<Changed> {
        let call = self.claimed(&BOARD_FILL, at).key(self.filling(at)).number(run);
        // The shortest digits that give back the very same number.
        let with =
            |call: Call, member: &BoardMember| call.number(format_args!("{:e}", member.score)).arg(&member.member);
        self.change("fill a board", members.iter().fold(call, with)).await
    }

    /// Notes that the zset that was filled is the whole of it.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn end_filling(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        let call = self.claimed(&BOARD_FREEZE, at).key(self.filling(at)).key(self.restored(at)).number(run);
        self.change("end the filling of a board", call).await
    }

    /// Puts the restored zset where the frozen one was. Zero times where that is there.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn put_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        let call = self.claimed(&BOARD_FREEZE, at).key(self.restored(at)).key(self.frozen(at)).number(run);
        self.change("put a frozen board back", call).await
    }

    /// Moves at most `members_max` members of the live zset, those that were added since it was lost, into the restored one, and puts
    /// that in its place once nothing is left. It gets `mark`.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn put_live(
        &self,
        at: &BoardPeriod,
        run: u64,
        members_max: usize,
        rule: Rule,
        mark: u64,
    ) -> Result<Changed> {
        let call = self.claimed(&BOARD_MERGE, at).key(self.live(at)).key(self.restored(at)).key(self.mark(at));
        let call = call.number(run).number(members_max).arg(rule.name()).number(rule.packing.low_bits()).number(mark);
        self.change("put a board back", call).await
    }

    fn scan_call(&self, at: &BoardPeriod, run: u64, members_min: u64) -> Call {
        let call = Call::new(&BOARD_SCAN, self.mark(at)).key(self.live(at)).key(self.frozen(at));
        call.number(run).number(members_min)
    }

    fn filling(&self, at: &BoardPeriod) -> String {
        self.keys.filling_board(&at.board, &at.period)
    }

    fn restored(&self, at: &BoardPeriod) -> String {
        self.keys.restored_board(&at.board, &at.period)
    }
}

/// What lua/board_scan.lua returns; the answer itself where it is something else.
fn scanned<T>(answer: Value, read: impl FnOnce(Value) -> Option<T>) -> std::result::Result<Scanned<T>, Value> {
    match answer {
        Value::Int(-1) => Ok(Scanned::Lost),
        Value::Int(-2) => Ok(Scanned::Frozen),
        Value::Int(-3) => Ok(Scanned::Shrunk),
        answer => read(answer.clone()).map(Scanned::Page).ok_or(answer),
    }
}
