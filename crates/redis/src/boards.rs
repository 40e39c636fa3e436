//! Boards in Redis. The archiver freezes the zset of a closed period, merges late members into this zset, reads the
//! zset in rank order, and finally deletes the zset (decision 0048).
//!
//! Every call that changes a closed period contains the number of the archiver's run. The script refuses the call
//! unless this run has the board's claim (the exclusive right to change the board's closed periods). So a late call
//! changes nothing, and a run changes nothing after another run has claimed the board. If Redis was flushed, the claim
//! is missing, and the script refuses all calls until a run claims the board again.
//!
//! Never use DEL, ZUNIONSTORE, or RENAME onto an existing key: on a large zset, each of these commands blocks all other
//! clients.

use std::time::Duration;

use redis::{Cmd, Pipeline, Value};
use tallyd_core::archive::BoardKeys;
use tallyd_core::model::{BoardMember, BoardPeriod, Freeze};
use tallyd_core::ranks::{self, Before, Placed, Ranking};
use tallyd_core::score::Rule;

use super::freezes::{GENERATION, late_field, read_notes};
use super::{
    BOARD_END, BOARD_FREEZE, BOARD_MERGE, BOARD_READ, BOARD_STAY, Cache, CacheError, Call, Context,
    PIPELINE_COMMANDS_MAX, Result, text,
};

/// The result of changing a closed period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// The period was changed. The value is the number of changes, or the number of members.
    Done(u64),
    /// The call should change a zset, but this zset does not exist. Nothing was changed.
    Absent,
    /// Another run has claimed the board, or Redis has lost the claim. Nothing was changed.
    Refused,
    /// Redis has lost the mark of the board's snapshot, or the effect of an earlier call of [`Cache::raise_board`].
    /// Nothing was changed.
    Lost,
    /// The members were moved, and the restored zset is now the live zset. The value is the number of moved members.
    Put(u64),
}

/// When the daemon counts the distinct scores of a zset, one call reads this number of members.
const DISTINCT_PAGE: u64 = 1_000;

/// The zset to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zset {
    /// The zset that clients write to.
    Live,
    /// The zset that is archived.
    Frozen,
}

/// The part of a board to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// The `count` members that follow the first `after` members.
    Page {
        /// How many members are skipped.
        after: u64,
        /// The maximum number of members to read.
        count: u64,
    },
    /// A member and its neighbours.
    Around {
        member: &'a [u8],
        /// The maximum number of neighbours to read on each side.
        count: u64,
    },
}

impl Cache {
    /// Returns the existing zsets of each period, in the order of `periods`.
    pub async fn find_boards(&self, periods: &[BoardPeriod]) -> Result<Vec<BoardKeys>> {
        let mut found = Vec::with_capacity(periods.len());
        for piece in periods.chunks(PIPELINE_COMMANDS_MAX / 3) {
            let mut pipeline = Pipeline::with_capacity(piece.len() * 3);
            for at in piece {
                pipeline.cmd("EXISTS").arg(self.live(at));
                pipeline.cmd("EXISTS").arg(self.frozen(at));
                let notes = pipeline.cmd("HMGET").arg(self.keys.board_freezes(&at.board));
                notes.arg(GENERATION).arg(&at.period).arg(late_field(&at.period));
            }
            let answers = self.answers_of_type("look for boards", &pipeline).await?;
            found.extend(answers.chunks_exact(3).map(|three| {
                let (freeze, late_members) = three.last().map_or((Freeze::UNCLAIMED, 0), read_notes);
                BoardKeys {
                    live: three.first() == Some(&Value::Int(1)),
                    frozen: three.get(1) == Some(&Value::Int(1)),
                    freeze,
                    late_members,
                }
            }));
        }
        Ok(found)
    }

    /// Moves the live zset to its frozen key, so that clients no longer write to this zset. Also stores a note about
    /// the freeze. Returns zero if a frozen zset already exists. If the board's scores were raised before, `pages` is
    /// the number of pages that raised them. If Redis lacks one of these pages, the result is [`Changed::Lost`].
    ///
    /// # Errors
    /// Redis failed to answer. The call may have run.
    pub async fn freeze_board(&self, at: &BoardPeriod, run: u64, note: u64, pages: Option<u64>) -> Result<Changed> {
        let call = self.freeze_call(at, self.live(at));
        let call = if pages.is_some() { call.key(self.raised(at)) } else { call };
        let call = call.arg(self.claim(run)).arg(&at.period).number(note).number(pages.unwrap_or(0));
        self.change("freeze a board", call).await
    }

    pub(super) fn freeze_call(&self, at: &BoardPeriod, zset: String) -> Call {
        let call = Call::new(&BOARD_FREEZE, self.keys.board_claim(&at.board)).key(zset);
        call.key(self.frozen(at)).key(self.keys.board_freezes(&at.board))
    }

    /// Moves at most `members_max` late members into the frozen zset. A late member's score is added to the member's
    /// score in the frozen zset.
    ///
    /// # Errors
    /// Redis failed to answer. The call may have run.
    pub async fn merge_late(&self, at: &BoardPeriod, run: u64, members_max: usize, rule: Rule) -> Result<Changed> {
        let keys = [self.live(at), self.frozen(at), self.keys.board_freezes(&at.board)];
        let call = self.claimed(&BOARD_MERGE, at, run, keys).number(members_max).arg(rule.name());
        let call = call.number(rule.packing.low_bits()).arg(late_field(&at.period));
        self.change("merge late members of a board", call).await
    }

    /// Removes the expiry of the frozen zset, so the zset stays until a call deletes it.
    ///
    /// # Errors
    /// Redis failed to answer. The call may have run.
    pub async fn keep_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        self.change("keep a frozen board", self.claimed(&BOARD_STAY, at, run, [self.frozen(at)]).number(0)).await
    }

    /// Lets the frozen zset expire after `stay` (at least a second).
    ///
    /// # Errors
    /// Redis failed to answer. The call may have run.
    pub async fn expire_frozen(&self, at: &BoardPeriod, run: u64, stay: Duration) -> Result<Changed> {
        let call = self.claimed(&BOARD_STAY, at, run, [self.frozen(at)]);
        self.change("expire a frozen board", call.number(stay.as_secs().max(1))).await
    }

    /// Deletes the frozen zset. If late members exist in the live zset, the call deletes nothing and returns zero.
    ///
    /// # Errors
    /// Redis failed to answer. The call may have run.
    pub async fn end_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        let call = self.claimed(&BOARD_END, at, run, [self.live(at), self.frozen(at)]);
        self.change("delete a frozen board", call).await
    }

    /// Returns the count of members in the live zset and in the frozen zset.
    pub async fn count_board(&self, at: &BoardPeriod) -> Result<(u64, u64)> {
        const ACTION: &str = "count a board";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("ZCARD").arg(self.live(at));
        pipeline.cmd("ZCARD").arg(self.frozen(at));
        let answers = self.answers(ACTION, &pipeline).await?;
        match answers.as_slice() {
            [Value::Int(live), Value::Int(frozen)] => Ok((live.unsigned_abs(), frozen.unsigned_abs())),
            _ => Err(CacheError::unexpected(ACTION, &Value::Array(answers))),
        }
    }

    /// Returns members of the frozen zset, highest score first, from the rank `from` (0 is the first rank). If members
    /// have equal scores, Redis sorts these members by their bytes, the greatest member first.
    ///
    /// # Errors
    /// Redis failed to answer, or the key is not a zset.
    pub async fn frozen_page(&self, at: &BoardPeriod, from: u64, members: usize) -> Result<Vec<BoardMember>> {
        const ACTION: &str = "read a frozen board";
        let last = from.saturating_add(members as u64).saturating_sub(1);
        let mut command = redis::cmd("ZRANGE");
        command.arg(self.frozen(at)).arg(from).arg(last).arg("REV").arg("WITHSCORES");
        let answer = self.answer(ACTION, command).await?;
        read_members(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    /// Returns a part of a board at one instant, and how many members the board has. For [`Ranking::Dense`], the call
    /// needs one more round trip for each thousand members above this part.
    ///
    /// # Errors
    /// Redis failed to answer, or the key is not a zset.
    pub async fn read_board(
        &self,
        at: &BoardPeriod,
        zset: Zset,
        part: Part<'_>,
        ranking: Ranking,
    ) -> Result<(u64, Vec<Placed>)> {
        const ACTION: &str = "read a board";
        let key = match zset {
            Zset::Live => self.live(at),
            Zset::Frozen => self.frozen(at),
        };
        let call = Call::new(&BOARD_READ, key.clone());
        let call = match part {
            Part::Page { after, count } => call.arg("page").number(after).number(count),
            Part::Around { member, count } => call.arg("around").arg(member).number(count),
        };
        let answer = self.eval(ACTION, &[call]).await?.pop().unwrap_or(Value::Nil);
        let (members, mut before, page) = read_part(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))?;
        if ranking == Ranking::Dense
            && let Some(first) = page.first()
        {
            before.distinct = self.count_distinct(&key, before.members, first.score).await?;
        }
        Ok((members, ranks::place(ranking, before, page)))
    }

    /// Reads a board whose period is not archived in MySQL. Returns how many members the board has, and the members in
    /// `part`. `is_frozen` is MySQL's record of whether the period is frozen. Returns `None` if `is_frozen` is true and
    /// Redis has lost the frozen zset.
    pub async fn read_unarchived(
        &self,
        at: &BoardPeriod,
        is_frozen: bool,
        part: Part<'_>,
        ranking: Ranking,
    ) -> Result<Option<(u64, Vec<Placed>)>> {
        let keys = self.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
        if is_frozen && !keys.frozen {
            return Ok(None);
        }
        // If the zset was frozen just now, the record of the freeze may still be missing in MySQL.
        let zset = if is_frozen || (keys.frozen && !keys.live) { Zset::Frozen } else { Zset::Live };
        self.read_board(at, zset, part, ranking).await.map(Some)
    }

    /// Returns those of `members` that are on a live board. The ranks count only these members.
    ///
    /// # Errors
    /// Redis failed to answer, or the key is not a zset.
    pub async fn board_of(&self, at: &BoardPeriod, members: &[Vec<u8>], ranking: Ranking) -> Result<Vec<Placed>> {
        const ACTION: &str = "read a board of some members";
        if members.is_empty() {
            return Ok(Vec::new());
        }
        let mut command = redis::cmd("ZMSCORE");
        command.arg(self.live(at)).arg(members);
        let answer = self.answer(ACTION, command).await?;
        let Value::Array(scores) = &answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
        let score = |(member, score): (&Vec<u8>, &Value)| {
            Some(BoardMember { member: member.clone(), score: text(score)?.parse().ok()? })
        };
        let mut found: Vec<BoardMember> = members.iter().zip(scores).filter_map(score).collect();
        found.sort_unstable_by(ranks::order);
        found.dedup();
        Ok(ranks::place(ranking, Before::default(), found))
    }

    /// Counts the different scores above `score` among the first `members` of a zset.
    async fn count_distinct(&self, key: &str, members: u64, score: f64) -> Result<u64> {
        const ACTION: &str = "count the scores of a board";
        let (mut distinct, mut last, mut from) = (0, score, 0);
        while from < members {
            let until = members.min(from + DISTINCT_PAGE) - 1;
            let mut command = redis::cmd("ZRANGE");
            command.arg(key).arg(from).arg(until).arg("REV").arg("WITHSCORES");
            let answer = self.answer(ACTION, command).await?;
            let page = read_members(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))?;
            if page.is_empty() {
                break;
            }
            for member in &page {
                distinct += u64::from(member.score > score && member.score != last);
                last = member.score;
            }
            from += page.len() as u64;
        }
        Ok(distinct)
    }

    pub(super) fn live(&self, at: &BoardPeriod) -> String {
        self.keys.board(&at.board, &at.period)
    }

    pub(super) fn frozen(&self, at: &BoardPeriod) -> String {
        self.keys.frozen_board(&at.board, &at.period)
    }

    pub(super) fn mark(&self, at: &BoardPeriod) -> String {
        self.keys.board_mark(&at.board, &at.period)
    }

    pub(super) fn raised(&self, at: &BoardPeriod) -> String {
        self.keys.raised_board(&at.board, &at.period)
    }

    /// Begins a call of a script that changes a board. The script changes nothing if the run doesn't have the board's
    /// claim.
    pub(super) fn claimed<const KEYS: usize>(
        &self,
        script: &'static super::Script,
        at: &BoardPeriod,
        run: u64,
        keys: [String; KEYS],
    ) -> Call {
        let call = keys.into_iter().fold(Call::new(script, self.keys.board_claim(&at.board)), Call::key);
        call.arg(self.claim(run))
    }

    pub(super) async fn change(&self, action: &'static str, call: Call) -> Result<Changed> {
        changed(action, self.eval(action, &[call]).await?.pop().unwrap_or(Value::Nil))
    }

    pub(super) async fn answer(&self, action: &'static str, command: Cmd) -> Result<Value> {
        let mut pipeline = Pipeline::new();
        pipeline.add_command(command);
        Ok(self.answers(action, &pipeline).await?.pop().unwrap_or(Value::Nil))
    }

    /// Does the same as [`Self::answers`], but the answer is nil for each key of the wrong type. So one such key, which
    /// another program has written, does not affect the other boards.
    pub(super) async fn answers_of_type(&self, action: &'static str, pipeline: &Pipeline) -> Result<Vec<Value>> {
        let answer = |answered: redis::RedisResult<Value>| match answered.context(action) {
            Err(error) if error.code() == Some("WRONGTYPE") => Ok(Value::Nil),
            answered => answered,
        };
        self.run(action, pipeline).await?.into_iter().map(answer).collect()
    }

    pub(super) async fn answers(&self, action: &'static str, pipeline: &Pipeline) -> Result<Vec<Value>> {
        let results = self.run(action, pipeline).await?;
        results.into_iter().collect::<redis::RedisResult<_>>().context(action)
    }
}

/// Reads the answer of a script that changes a board.
pub(super) fn changed(action: &'static str, answer: Value) -> Result<Changed> {
    match answer {
        Value::Int(-1) => Ok(Changed::Refused),
        Value::Int(-2) => Ok(Changed::Absent),
        Value::Int(-3) => Ok(Changed::Lost),
        Value::Int(put) if put < -3 => Ok(Changed::Put(put.unsigned_abs() - 4)),
        Value::Int(times) => Ok(Changed::Done(times.unsigned_abs())),
        other => Err(CacheError::unexpected(action, &other)),
    }
}

/// Reads the answer of lua/board_read.lua: the board's count of members, the counts of members before the page, and the
/// page.
pub(super) fn read_part(answer: &Value) -> Option<(u64, Before, Vec<BoardMember>)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::Int(members), Value::Int(before), Value::Int(higher), page @ ..] = parts.as_slice() else {
        return parts.is_empty().then(Default::default);
    };
    let before = Before { members: before.unsigned_abs(), higher: higher.unsigned_abs(), distinct: 0 };
    Some((members.unsigned_abs(), before, read_members(&Value::Array(page.to_vec()))?))
}

/// Reads `member, score, member, score, ...`. Each score is a text that parses to exactly the same number.
pub(super) fn read_members(answer: &Value) -> Option<Vec<BoardMember>> {
    let Value::Array(parts) = answer else { return None };
    let member = |pair: &[Value]| match pair {
        [Value::BulkString(member), score] => {
            Some(BoardMember { member: member.clone(), score: text(score)?.parse().ok()? })
        }
        _ => None,
    };
    parts.chunks(2).map(member).collect()
}
