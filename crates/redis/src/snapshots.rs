//! Reads a board for its snapshot while clients write to the board, and restores a lost board.
//!
//! A mark beside the zset shows whether Redis has lost the board since the last snapshot began. The mark is missing on
//! an empty server, and on a server that was started from an old backup. The script that reads a page also checks the
//! mark (decision 0054).

use redis::{Pipeline, Value};
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_core::score::Rule;

use super::boards::{Changed, read_members};
use super::freezes::late_field;
use super::{
    BOARD_FILL, BOARD_FREEZE, BOARD_MARK, BOARD_MERGE, BOARD_RAISE, BOARD_SCAN, Cache, CacheError, Call,
    PIPELINE_COMMANDS_MAX, Result, text,
};

/// The key that marks a board as lost expires after this number of seconds. The daemon sets it again more often.
const LOST_S: u64 = 600;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    Live,
    Frozen { late_members: u64 },
}

/// A page of a board, or the reason why the page can't be read.
#[derive(Clone, Debug, PartialEq)]
pub enum Scanned<T> {
    Page(T),
    /// The mark is missing or has another number, so Redis has lost the board.
    Lost,
    Frozen,
    /// The zset has fewer members than expected: it was evicted or deleted.
    Shrunk,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScanPage {
    pub next: Option<String>,
    /// The members. Earlier pages can contain some of the same members.
    pub members: Vec<BoardMember>,
}

#[derive(Clone, Copy, Debug)]
pub struct Restoring<'a> {
    pub at: &'a BoardPeriod,
    pub tag: &'a str,
    pub run: u64,
}

impl Cache {
    pub async fn board_marks(&self, periods: &[BoardPeriod]) -> Result<Vec<Option<u64>>> {
        let marks = self.ask_each("look for the marks of boards", periods, |at| ("GET", self.mark(at))).await?;
        Ok(marks.iter().map(|mark| text(mark).and_then(|text| text.parse().ok())).collect())
    }

    pub async fn set_board_lost(&self, at: &BoardPeriod, mark: Option<u64>) -> Result<()> {
        let mut command = redis::cmd("SET");
        command.arg(self.keys.lost_board(&at.board, &at.period)).arg(mark_text(mark)).arg("EX").arg(LOST_S);
        self.answer("tell readers that a board is lost", command).await.map(drop)
    }

    pub async fn is_board_lost(&self, at: &BoardPeriod) -> Result<bool> {
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline.cmd("GET").arg(self.keys.lost_board(&at.board, &at.period));
        pipeline.cmd("GET").arg(self.mark(at));
        let answers = self.answers_of_type("look whether a board is lost", &pipeline).await?;
        let [lost, mark] = answers.as_slice() else { return Ok(false) };
        Ok(text(lost).is_some_and(|lost| lost == text(mark).unwrap_or_default()))
    }

    pub async fn board_members(&self, periods: &[BoardPeriod]) -> Result<Vec<u64>> {
        let counts = self.ask_each("count boards", periods, |at| ("ZCARD", self.live(at))).await?;
        let count = |answer: &Value| if let Value::Int(members) = answer { members.unsigned_abs() } else { 0 };
        Ok(counts.iter().map(count).collect())
    }

    async fn ask_each(
        &self,
        action: &'static str,
        periods: &[BoardPeriod],
        command: impl Fn(&BoardPeriod) -> (&'static str, String),
    ) -> Result<Vec<Value>> {
        let mut found = Vec::with_capacity(periods.len());
        for piece in periods.chunks(PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for at in piece {
                let (name, key) = command(at);
                pipeline.cmd(name).arg(key);
            }
            found.extend(self.answers_of_type(action, &pipeline).await?);
        }
        Ok(found)
    }

    /// `None` stands for a missing mark. `pages` have raised the board's scores before: if Redis lacks one of them, the
    /// result is [`Changed::Lost`].
    pub async fn mark_board(
        &self,
        at: &BoardPeriod,
        run: u64,
        former: Option<u64>,
        new: Option<u64>,
        pages: Option<u64>,
    ) -> Result<Changed> {
        let call = self.claimed(&BOARD_MARK, at, run, [self.mark(at), self.live(at)]);
        let call = if pages.is_some() { call.key(self.raised(at)) } else { call };
        let call = call.arg(mark_text(former)).arg(mark_text(new)).number(pages.unwrap_or(0));
        self.change("mark a board", call).await
    }

    pub async fn board_scores(&self, at: &BoardPeriod, members: &[BoardMember]) -> Result<Vec<Option<f64>>> {
        const ACTION: &str = "look for members of a board";
        if members.is_empty() {
            return Ok(Vec::new());
        }
        let mut command = redis::cmd("ZMSCORE");
        command.arg(self.live(at));
        for member in members {
            command.arg(&member.member);
        }
        let answer = self.answer(ACTION, command).await?;
        scores(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    /// Returns about `count` members of a live board that has the mark `run` and at least `members_min` members. Each
    /// member that exists during the whole scan is on at least one page.
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
        scanned(answer, scan_page).map_err(|answer| CacheError::unexpected(ACTION, &answer))
    }

    /// The board must meet the conditions of [`Cache::scan_board`].
    pub async fn scan_members(
        &self,
        at: &BoardPeriod,
        run: u64,
        members_min: u64,
        members: &[BoardMember],
    ) -> Result<Scanned<Vec<Option<f64>>>> {
        const ACTION: &str = "look for members of a board";
        if members.is_empty() {
            return Ok(Scanned::Page(Vec::new()));
        }
        let call = self.scan_call(at, run, members_min).arg("have");
        let call = members.iter().fold(call, |call, member| call.arg(&member.member));
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        scanned(answer, scores).map_err(|answer| CacheError::unexpected(ACTION, &answer))
    }

    /// Whether the restored zset is complete, and whether a restore was interrupted after it began to move members.
    /// Then only the restored zset contains them.
    pub async fn is_restoring(&self, at: &BoardPeriod, tag: &str) -> Result<(bool, bool)> {
        let key = self.keys.restored_board(&at.board, &at.period, tag);
        let mut command = redis::cmd("TTL");
        command.arg(key);
        let ttl = self.answer("look for the zset of a restore", command).await?;
        Ok((ttl != Value::Int(-2), ttl == Value::Int(-1)))
    }

    /// Adds members to the zset that is being filled, and returns the zset's count of members. If `members` is empty,
    /// the call deletes the zset, so that the filling can start again.
    pub async fn fill_board(&self, to: Restoring<'_>, members: &[BoardMember]) -> Result<Changed> {
        let call = self.claimed(&BOARD_FILL, to.at, to.run, [self.filling(to.at)]);
        self.change("fill a board", members.iter().fold(call, with_member)).await
    }

    /// Records that the filled zset is complete. If it does not have `members` members, the result is [`Changed::Lost`].
    pub async fn end_filling(&self, to: Restoring<'_>, members: u64) -> Result<Changed> {
        let call = self.claimed(&BOARD_FREEZE, to.at, to.run, [self.filling(to.at), self.restored(to)]);
        self.change("end the filling of a board", call.number(members)).await
    }

    /// Renames the restored zset to the key of the frozen zset, and stores the run's number in Redis. Returns zero if a
    /// frozen zset exists.
    pub async fn put_frozen(&self, to: Restoring<'_>) -> Result<Changed> {
        let call = self.freeze_call(to.at, self.restored(to)).arg(self.claim(to.run)).arg(&to.at.period).number(to.run);
        self.change("restore a frozen board", call).await
    }

    /// Moves what clients added since the loss into the restored zset. When nothing remains, it becomes the live zset
    /// and gets `mark`.
    pub async fn put_live(&self, to: Restoring<'_>, members_max: usize, rule: Rule, mark: u64) -> Result<Changed> {
        let keys = [self.live(to.at), self.restored(to), self.mark(to.at)];
        let call = self.claimed(&BOARD_MERGE, to.at, to.run, keys).number(members_max).arg(rule.name());
        self.change("restore a board", call.number(rule.packing.low_bits()).number(mark)).await
    }

    /// A member gets the score in `members` if it is higher. `pages_before` must have arrived. The first page of a zset
    /// and the last page of a frozen zset are empty.
    pub async fn raise_board(
        &self,
        (at, raised): (&BoardPeriod, Raised),
        run: u64,
        pages_before: u64,
        members: &[BoardMember],
    ) -> Result<Changed> {
        let call = Call::new(&BOARD_RAISE, self.keys.board_claim(&at.board));
        let call = match raised {
            Raised::Live => call.key(self.live(at)).key(self.raised(at)).key(self.frozen(at)),
            Raised::Frozen { .. } => {
                call.key(self.frozen(at)).key(self.raised(at)).key(self.keys.board_freezes(&at.board))
            }
        };
        let call = call.arg(self.claim(run)).number(pages_before);
        let call = match raised {
            Raised::Live => call.arg("").arg(""),
            Raised::Frozen { late_members } => call.arg(late_field(&at.period)).number(late_members),
        };
        self.change("raise a board", members.iter().fold(call, with_member)).await
    }

    fn scan_call(&self, at: &BoardPeriod, run: u64, members_min: u64) -> Call {
        let call = Call::new(&BOARD_SCAN, self.mark(at)).key(self.live(at)).key(self.frozen(at));
        call.number(run).number(members_min)
    }

    fn filling(&self, at: &BoardPeriod) -> String {
        self.keys.filling_board(&at.board, &at.period)
    }

    fn restored(&self, to: Restoring<'_>) -> String {
        self.keys.restored_board(&to.at.board, &to.at.period, to.tag)
    }
}

fn mark_text(mark: Option<u64>) -> String {
    mark.map(|mark| mark.to_string()).unwrap_or_default()
}

/// Appends the member's score and name to the arguments of `call`. The score is written with the fewest digits that
/// parse to exactly the same number.
fn with_member(call: Call, member: &BoardMember) -> Call {
    call.number(format_args!("{:e}", member.score)).arg(&member.member)
}

pub(super) fn scanned<T>(
    answer: Value,
    read: impl FnOnce(&Value) -> Option<T>,
) -> std::result::Result<Scanned<T>, Value> {
    match answer {
        Value::Int(-1) => Ok(Scanned::Lost),
        Value::Int(-2) => Ok(Scanned::Frozen),
        Value::Int(-3) => Ok(Scanned::Shrunk),
        answer => read(&answer).map(Scanned::Page).ok_or(answer),
    }
}

pub(super) fn scan_page(answer: &Value) -> Option<ScanPage> {
    let Value::Array(parts) = answer else { return None };
    let [next, members] = parts.as_slice() else { return None };
    let next = text(next).filter(|next| *next != "0").map(str::to_owned);
    Some(ScanPage { next, members: read_members(members)? })
}

pub(super) fn scores(answer: &Value) -> Option<Vec<Option<f64>>> {
    let Value::Array(scores) = answer else { return None };
    Some(scores.iter().map(|score| text(score)?.parse().ok()).collect())
}
