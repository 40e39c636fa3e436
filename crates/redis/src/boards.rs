//! Boards in Redis: a closed period's zset is frozen, added to by what came late, read in rank order, and ended.
//!
//! Whatever changes a closed period carries the number of the archiver's run, and a script refuses it unless that run
//! has the board's claim. So a run that was overtaken changes nothing, and neither does a command that runs late. Nor
//! does one that runs after Redis was flushed, since the claim is gone with the boards.
//!
//! Never DEL, ZUNIONSTORE or RENAME onto a key that is there: on a large zset each stalls every other client.

use std::time::Duration;

use redis::{Cmd, Pipeline, Value};
use tallyd_core::model::{BoardMember, BoardPeriod, Freeze};
use tallyd_core::ranks::{self, Before, Placed, Ranking};
use tallyd_core::score::Rule;

use super::freezes::{GENERATION, late_field, read_notes};
use super::{
    BOARD_END, BOARD_FREEZE, BOARD_MERGE, BOARD_READ, BOARD_STAY, Cache, CacheError, Call, Context,
    PIPELINE_COMMANDS_MAX, Result, text,
};

/// Which zsets of a period are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoardKeys {
    /// The one that is written to.
    pub live: bool,
    /// The one that is archived.
    pub frozen: bool,
    /// What Redis knows of its freeze.
    pub freeze: Freeze,
    /// How many late members were moved into the frozen one.
    pub late_members: u64,
}

/// What came of changing a closed period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// It was changed: so many times, or members.
    Done(u64),
    /// What should be changed isn't there.
    Absent,
    /// Another run has claimed the board, or Redis has lost the claim: nothing was changed.
    Refused,
    /// The mark of the board's snapshot, or a page that it was raised by, is missing: Redis has lost a part of it. Nothing was changed.
    Lost,
    /// So many members were moved, and the restored zset is the live one now.
    Put(u64),
}

/// Members that are read at once to count their different scores.
const DISTINCT_PAGE: u64 = 1_000;

/// Which of a period's zsets is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zset {
    /// The one that is written to.
    Live,
    /// The one that is archived.
    Frozen,
}

/// Which part of a board is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// `count` members after the first `after`.
    Page {
        /// How many are left out.
        after: u64,
        /// How many are read at most.
        count: u64,
    },
    /// A member and its neighbours.
    Around {
        member: &'a [u8],
        /// On each side, at most.
        count: u64,
    },
}

impl Cache {
    /// Which zsets the periods have, in their order.
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
            let answers = self.answers("look for boards", &pipeline).await?;
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

    /// Takes the live zset away from those who write to it, and notes that. Zero times where a frozen one is there already. Where it was raised by
    /// `pages`, it was given all of them, or it is [`Changed::Lost`].
    ///
    /// # Errors
    /// Redis is away: it may have run.
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

    /// Moves at most `members_max` members that came late into the frozen zset, by adding.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn merge_late(&self, at: &BoardPeriod, run: u64, members_max: usize, rule: Rule) -> Result<Changed> {
        let keys = [self.live(at), self.frozen(at), self.keys.board_freezes(&at.board)];
        let call = self.claimed(&BOARD_MERGE, at, run, keys).number(members_max).arg(rule.name());
        let call = call.number(rule.packing.low_bits()).arg(late_field(&at.period));
        self.change("merge what came late", call).await
    }

    /// Lets the frozen zset stay until it is ended.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn keep_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        self.change("keep a frozen board", self.claimed(&BOARD_STAY, at, run, [self.frozen(at)]).number(0)).await
    }

    /// Lets the frozen zset go away by itself, but not before `stay` (at least a second) is over.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn expire_frozen(&self, at: &BoardPeriod, run: u64, stay: Duration) -> Result<Changed> {
        let call = self.claimed(&BOARD_STAY, at, run, [self.frozen(at)]);
        self.change("expire a frozen board", call.number(stay.as_secs().max(1))).await
    }

    /// Ends the frozen zset. Zero times where something came late: then it stays.
    ///
    /// # Errors
    /// Redis is away: it may have run.
    pub async fn end_frozen(&self, at: &BoardPeriod, run: u64) -> Result<Changed> {
        let call = self.claimed(&BOARD_END, at, run, [self.live(at), self.frozen(at)]);
        self.change("end a frozen board", call).await
    }

    /// How many members the period's zsets have: the live one, the frozen one.
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

    /// The frozen zset's members from rank `from` (0 is the first) on, highest score first; of equal scores in the order
    /// that Redis has them.
    ///
    /// # Errors
    /// Redis is away, or the key holds something else.
    pub async fn frozen_page(&self, at: &BoardPeriod, from: u64, members: usize) -> Result<Vec<BoardMember>> {
        const ACTION: &str = "read a frozen board";
        let last = from.saturating_add(members as u64).saturating_sub(1);
        let mut command = redis::cmd("ZRANGE");
        command.arg(self.frozen(at)).arg(from).arg(last).arg("REV").arg("WITHSCORES");
        let answer = self.answer(ACTION, command).await?;
        read_members(&answer).ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    /// A part of a board at one instant, and how many members the board has. [`Ranking::Dense`] takes further round
    /// trips for what stands before it: one for each thousand members.
    ///
    /// # Errors
    /// Redis is away, or the key holds something else.
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

    /// A part of a period that MySQL has no archive of, and how many members the board has. Gives none where Redis has lost its frozen zset:
    /// `is_frozen` says that MySQL knows of one.
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
        // MySQL may not know yet of a zset that was frozen a moment ago.
        let zset = if is_frozen || (keys.frozen && !keys.live) { Zset::Frozen } else { Zset::Live };
        self.read_board(at, zset, part, ranking).await.map(Some)
    }

    /// Those of `members` that are on a live board, placed among themselves.
    ///
    /// # Errors
    /// Redis is away, or the key holds something else.
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

    /// How many different scores above `score` the first `members` of a zset have.
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

    /// A call that is refused unless the run has the board's claim.
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

    pub(super) async fn answers(&self, action: &'static str, pipeline: &Pipeline) -> Result<Vec<Value>> {
        let results = self.run(action, pipeline).await?;
        results.into_iter().collect::<redis::RedisResult<_>>().context(action)
    }
}

/// What a script that changes a board returns.
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

/// What lua/board_read.lua returns: how many members the board has, what is before the page, and the page.
pub(super) fn read_part(answer: &Value) -> Option<(u64, Before, Vec<BoardMember>)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::Int(members), Value::Int(before), Value::Int(higher), page @ ..] = parts.as_slice() else {
        return parts.is_empty().then(Default::default);
    };
    let before = Before { members: before.unsigned_abs(), higher: higher.unsigned_abs(), distinct: 0 };
    Some((members.unsigned_abs(), before, read_members(&Value::Array(page.to_vec()))?))
}

/// `member, score, member, score, ...`, scores as text that gives back the very same number.
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
