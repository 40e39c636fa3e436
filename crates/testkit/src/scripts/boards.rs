//! Adds to boards with lua/board.lua.

use redis::Value;
use tallyd_core::kinds::LIKE;
use tallyd_redis::Call;
use tallyd_redis::feed::Gain;

use super::{ApiServer, OnBoard, Result};

impl ApiServer {
    /// Adds `delta` to one column of a member, in all current periods of the board. `column` is one of the names in the
    /// board's `score`.
    pub async fn add_to_board(&self, on: OnBoard<'_>, column: &str, delta: i64) -> Result<()> {
        let call = self.add_call(&on, column, delta)?;
        self.cache.eval("add to a board", &[call]).await?;
        Ok(())
    }

    pub(super) fn add_call(&self, on: &OnBoard<'_>, column: &str, delta: i64) -> Result<Call> {
        let OnBoard { board, member } = *on;
        let at = tallyd_base::runtime::clock::now();
        let gain = Gain { board, member: member.into(), column: column.into(), delta, at };
        Ok(self.cache.gain_call(&self.boards, &gain)?)
    }

    /// Adds the like to the boards, and makes the call in the second layout. Returns how many boards failed. The like
    /// counts nevertheless.
    pub(super) async fn add_elsewhere(&self, also: Option<Call>, liked: bool, boards: &[OnBoard<'_>]) -> usize {
        let calls = boards.iter().filter_map(|on| self.add_call(on, LIKE, if liked { 1 } else { -1 }).ok());
        let mut calls: Vec<Call> = calls.collect();
        let on_boards = calls.len();
        calls.extend(also);
        if calls.is_empty() {
            return boards.len();
        }
        let answers = self.cache.eval_each("add to boards and the second layout", &calls).await.unwrap_or_default();
        let is_added = |answer: &tallyd_redis::Result<Value>| answer.is_ok();
        boards.len() - answers.into_iter().take(on_boards).filter(is_added).count()
    }
}
