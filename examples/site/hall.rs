//! Shows the loss of a board. The demo fills the all-time board, and the daemon saves the board. Then Redis loses the
//! board, and a command restores it.

use std::collections::HashMap;

use anyhow::{Context, Result};

use crate::dice::Dice;
use crate::servers::Servers;

/// The board's name.
pub const HALL: &str = "users";

const PERIOD: &str = "total";

/// The number of members of the board.
const MEMBERS: u64 = 2_000;

/// The number of likes that the demo adds after the loss.
const SINCE: u64 = 300;

/// The stage of the demonstration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The demo has filled the board. The daemon has not saved the board's first snapshot yet.
    Filled,
    /// Redis has lost the board and gets new likes.
    Lost,
    /// The board was restored.
    Restored,
}

/// The expected board.
pub struct Hall {
    pub scores: HashMap<String, u64>,
    pub stage: Stage,
}

impl Hall {
    /// Fills the zset in one command, so a snapshot has either all members or none.
    pub async fn fill(servers: &Servers) -> Result<Self> {
        let mut dice = Dice::new(u64::from(u8::MAX));
        let scores: HashMap<String, u64> =
            (1..=MEMBERS).map(|user| (user.to_string(), 1 + dice.below(5_000))).collect();
        let mut fill = redis::cmd("ZADD");
        fill.arg(servers.keys.board(HALL, PERIOD));
        for (member, score) in &scores {
            fill.arg(score).arg(member);
        }
        let () = fill.query_async(&mut servers.redis.clone()).await.context("fill the all-time board")?;
        Ok(Self { scores, stage: Stage::Filled })
    }

    /// Deletes the board as a flush does, and adds some likes. Returns how many.
    pub async fn lose(&mut self, servers: &Servers) -> Result<u64> {
        let mut dice = Dice::new(7);
        let key = servers.keys.board(HALL, PERIOD);
        let mut pipeline = redis::pipe();
        let beside = [servers.keys.board_mark(HALL, PERIOD), servers.keys.board_freezes(HALL)];
        pipeline.atomic().cmd("UNLINK").arg(&key).arg(&beside).ignore();
        for _ in 0..SINCE {
            let member = (1 + dice.below(MEMBERS + 50)).to_string();
            pipeline.cmd("ZINCRBY").arg(&key).arg(1).arg(&member).ignore();
            *self.scores.entry(member).or_default() += 1;
        }
        let () = pipeline.query_async(&mut servers.redis.clone()).await.context("lose the all-time board")?;
        self.stage = Stage::Lost;
        Ok(SINCE)
    }

    /// Returns the number of members with a wrong score.
    pub async fn different(&self, servers: &Servers) -> Result<u64> {
        let mut range = redis::cmd("ZRANGE");
        range.arg(servers.keys.board(HALL, PERIOD)).arg(&[0, -1]).arg("WITHSCORES");
        let found: Vec<(String, f64)> =
            range.query_async(&mut servers.redis.clone()).await.context("read the all-time board")?;
        let found: HashMap<String, f64> = found.into_iter().collect();
        let wrong = self.scores.iter().filter(|(member, score)| found.get(*member) != Some(&(**score as f64)));
        Ok((wrong.count() + found.keys().filter(|member| !self.scores.contains_key(*member)).count()) as u64)
    }
}
