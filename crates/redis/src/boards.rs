//! Boards in Redis. The archiver freezes the zset of a closed period, merges late members, reads the zset in rank
//! order, and finally deletes it (decision 0048).
//!
//! Every call that changes a closed period contains the number of the archiver's run, and the script refuses it unless
//! this run has the board's claim. So a late call changes nothing, and neither does a run after another one has claimed
//! the board. A flush of Redis removes the claim.
//!
//! Never use DEL, ZUNIONSTORE, or RENAME onto an existing key: on a large zset, each blocks all other clients.

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

const DISTINCT_PAGE: u64 = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zset {
    Live,
    Frozen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    Page { after: u64, count: u64 },
    Around { member: &'a [u8], count: u64 },
}

impl Cache {
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

    /// Also notes the freeze. Zero if a frozen zset already exists. `pages` have raised the board's scores before: if
    /// Redis lacks one of them, the result is [`Changed::Lost`].
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

    pub async fn merge_late(&self, at: &BoardPeriod, run: u64, members_max: usize, rule: Rule) -> Result<Changed> {
        let keys = [self.live(at), self.frozen(at), self.keys.board_freezes(&at.board)];
        let call = self.claimed(&BOARD_MERGE, at, run, keys).number(members_max).arg(rule.name());
        let call = call.number(rule.packing.low_bits()).arg(late_field(&at.period));
        self.change("merge late members of a board", call).await
    }

    pub async fn keep_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        self.change("keep a frozen board", self.claimed(&BOARD_STAY, at, run, [self.frozen(at)]).number(0)).await
    }

    pub async fn expire_frozen(&self, at: &BoardPeriod, run: u64, stay: Duration) -> Result<Changed> {
        let call = self.claimed(&BOARD_STAY, at, run, [self.frozen(at)]);
        self.change("expire a frozen board", call.number(stay.as_secs().max(1))).await
    }

    /// Deletes the frozen zset. If late members exist in the live zset, the call deletes nothing and returns zero.
    pub async fn end_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        let call = self.claimed(&BOARD_END, at, run, [self.live(at), self.frozen(at)]);
        self.change("delete a frozen board", call).await
    }

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

    /// From the rank `from` (0 is the first). Redis sorts members with equal scores by their bytes, the greatest first.
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

    /// `is_frozen` is MySQL's record. `None` if it is true and Redis has lost the frozen zset.
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
