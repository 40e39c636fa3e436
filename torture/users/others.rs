//! Users' calls that are neither likes nor counts: they add scores to boards, read pages, or send messages that tallyd
//! must reject.

use tallyd_core::model::{Metric, Target, TargetId};

use super::{TARGETS, User, VIDEO, VIEW};
use crate::checker::{HOT, PAST, mark};
use crate::history::{Answer, What, period};
use tallyd_testkit::scripts::OnBoard;

/// Members of a board.
const MEMBERS: u64 = 40;

/// For this number of seconds, users add scores to the same past day. Then users add scores to the calendar day before
/// that past day. The archiver looks back 400 days. In a run of six hours, users go back only 360 days.
const DAY_LASTS_S: i64 = 60;

/// A day in microseconds.
const DAY: i64 = 86_400_000_000;

/// Targets of a page.
const PAGE: u64 = 20;

/// The reason why a message can't be applied, and the message's body. `@` is replaced by the message's number.
const LETTERS: [(&str, &str); 8] = [
    ("malformed-json", r#"{"type": "like", "kind": "video", @"#),
    ("malformed-json", r#"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["@""#),
    ("malformed-json", "{\"type\": \"like\", \"x\": \"\u{0}@\"}"),
    ("unknown-type", r#"{"type": "@"}"#),
    ("unknown-kind", r#"{"type": "like", "kind": "@", "target_id": "1", "user_id": "7", "at": 1795251385004538}"#),
    (
        "target-id-out-of-range",
        r#"{"type": "like", "kind": "video", "target_id": "0", "user_id": "7", "at": 1, "x": "@"}"#,
    ),
    (
        "unknown-metric",
        r#"{"type": "count", "kind": "video", "target_id": "1", "metric": "@", "delta": 1, "event_id": "x", "at": 1}"#,
    ),
    (
        "at-out-of-range",
        r#"{"type": "like", "kind": "video", "target_id": "1", "user_id": "7", "at": 99999999999999999999, "x": "@"}"#,
    ),
];

impl User {
    pub(super) async fn gain(&mut self) -> bool {
        let (member, delta) = (1 + self.dice.below(MEMBERS), 1 + self.dice.below(3).cast_signed());
        let begin = crate::history::now();
        let text = member.to_string();
        let on = OnBoard { board: HOT, member: text.as_bytes() };
        let is_done = self.seat.client.add_to_board(on, "like", delta).await.is_ok();
        let answer = if is_done { Answer::Done { at: 0 } } else { Answer::Unknown };
        self.seat.note(self.who, begin, What::Gain { member, delta }, answer);
        is_done
    }

    /// Adds a score to a board whose period has ended, as a slow API server can do.
    pub(super) async fn late(&mut self) -> bool {
        let begin = crate::history::now();
        let elapsed_s = (begin - self.seat.began) / 1_000_000;
        let today = self.seat.began.div_euclid(DAY);
        // Some calls add the score to the past day that users chose `DAY_LASTS_S` seconds ago. This past day may
        // already be archived.
        let later = i64::from(self.dice.percent(15) && elapsed_s > DAY_LASTS_S);
        let day = i32::try_from(today - 2 - elapsed_s / DAY_LASTS_S + later).unwrap();
        let (member, delta) = (1 + self.dice.below(MEMBERS), 1 + self.dice.below(3).cast_signed());
        let is_done = self.add_late(day, member, delta).await.is_ok();
        let answer = if is_done { Answer::Done { at: 0 } } else { Answer::Unknown };
        self.seat.note(self.who, begin, What::Late { day, member, delta }, answer);
        is_done
    }

    async fn add_late(&self, day: i32, member: u64, delta: i64) -> anyhow::Result<()> {
        let mut redis = self.seat.redis().await?;
        let key = self.seat.keys.board(PAST, &period(day));
        // Uses EVAL, because SCRIPT LOAD needs a right that an API server doesn't have.
        let mut script = redis::cmd("EVAL");
        script.arg(include_str!("../../lua/board.lua")).arg(1).arg(key).arg(member).arg(delta);
        let added: redis::RedisResult<Vec<String>> = script.query_async(&mut redis).await;
        if added.is_err() {
            self.seat.drop_redis().await;
        }
        added?;
        Ok(())
    }

    pub(super) async fn letter(&mut self) -> bool {
        let letter = self.next_number();
        let (reason, body) = match self.dice.below(LETTERS.len() as u64 + 1) {
            0 => ("too-large", format!("{{\"type\": \"{}\", \"x\": \"{}\"}}", mark(letter), "x".repeat(70_000))),
            kind => {
                let (reason, body) = LETTERS[usize::try_from(kind).unwrap() - 1];
                (reason, body.replace('@', &mark(letter)))
            }
        };
        let begin = crate::history::now();
        let routing_key = self.dice.below(1_000).to_string();
        let is_done = self.seat.publish(&routing_key, body.as_bytes()).await.is_ok();
        let answer = if is_done { Answer::Done { at: 0 } } else { Answer::Unknown };
        self.seat.note(self.who, begin, What::Letter { letter, reason }, answer);
        is_done
    }

    pub(super) async fn read(&mut self) -> bool {
        let first = 1 + self.dice.below(TARGETS - PAGE);
        let targets: Vec<Target> = (first..first + PAGE).map(|id| Target { kind: VIDEO, id: TargetId(id) }).collect();
        let begin = crate::history::now();
        let read = self.seat.client.read(&targets).await;
        let answer = if read.is_ok() { Answer::Done { at: 0 } } else { Answer::Unknown };
        self.seat.note(self.who, begin, What::Read { target: first }, answer);
        for (target, numbers) in targets.iter().zip(read.as_deref().unwrap_or_default()) {
            if numbers.get(Metric(VIEW)).is_some_and(|views| views.value == 0) {
                self.seat.note(self.who, begin, What::Zero { target: target.id.0 }, Answer::Done { at: 0 });
            }
        }
        read.is_ok()
    }
}
