//! Finds and erases all data of a user or a target in Redis, except filters.

use redis::{Pipeline, Value};
use tallyd_core::keys::KindNames;
use tallyd_core::model::{BoardPeriod, Metric, Target, UserId};

use super::boards::Changed;
use super::{BOARD_ERASE, Cache, PIPELINE_COMMANDS_MAX, Result, text};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoardZset {
    Live,
    Frozen,
    /// A zset that was left incomplete, because a restore stopped while it was filling the zset.
    Filling,
    Restored(String),
}

impl Cache {
    /// If several requests got the same event, Redis counts them in a further field. If this event is older than the
    /// user's last click, the field can remain until the whole hash expires.
    pub async fn forget_clicks(&self, kinds: &KindNames, pairs: &[(Target, UserId)]) -> Result<u64> {
        const ACTION: &str = "forget clicks";
        let mut forgotten = 0;
        for some in pairs.chunks(PIPELINE_COMMANDS_MAX / 4) {
            let (mut reads, mut fields) = (Pipeline::with_capacity(some.len() * 2), Vec::with_capacity(some.len() * 2));
            for (target, user) in some {
                let kind = kinds.get(target.kind).unwrap_or_default();
                // The newer hash is read first, because it can become the older hash between the two reads.
                for key in self.keys.recent(kind, self.keys.bucket(*target)) {
                    let field = format!("{}:{user}", target.id);
                    reads.cmd("HGET").arg(&key).arg(&field);
                    fields.push((key, field));
                }
            }
            let clicks = self.answers(ACTION, &reads).await?;
            let mut deletes = Pipeline::with_capacity(some.len() * 3);
            for ((key, field), click) in fields.iter().zip(&clicks) {
                let command = deletes.cmd("HDEL").arg(key).arg(field);
                if let Some(at) = text(click).and_then(|click| click.get(..click.len().saturating_sub(1))) {
                    command.arg(format!("{field}:{at}"));
                }
            }
            forgotten += sum(&self.answers(ACTION, &deletes).await?);
        }
        Ok(forgotten)
    }

    pub async fn erase_user(&self, user: UserId, dry_run: bool) -> Result<u64> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd(if dry_run { "EXISTS" } else { "UNLINK" }).arg(self.keys.limit(user));
        Ok(sum(&self.answers("delete the keys of a user", &pipeline).await?))
    }

    pub async fn erase_numbers(&self, kind: &str, metrics: &[Metric], target: Target, dry_run: bool) -> Result<u64> {
        if self.is_packed() {
            let mut command = redis::cmd(if dry_run { "HEXISTS" } else { "HDEL" });
            command.arg(self.keys.counters(kind, self.keys.bucket(target))).arg(target.id.0);
            return self.count_ones(vec![command]).await;
        }
        self.count_ones(metrics.iter().map(|metric| self.drop_number(kind, target, *metric, dry_run)).collect()).await
    }

    pub async fn zsets_with(
        &self,
        zsets: Vec<(BoardPeriod, BoardZset)>,
        member: &[u8],
    ) -> Result<Vec<(BoardPeriod, BoardZset)>> {
        const ACTION: &str = "look for a member of boards";
        let mut found = Vec::new();
        for some in zsets.chunks(PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(some.len());
            for (at, zset) in some {
                pipeline.cmd("ZSCORE").arg(self.zset(at, zset)).arg(member);
            }
            let answers = self.answers(ACTION, &pipeline).await?;
            found.extend(some.iter().zip(answers).filter(|(_, score)| *score != Value::Nil).map(|(it, _)| it.clone()));
        }
        Ok(found)
    }

    /// The run must have claimed the board.
    pub async fn erase_member(
        &self,
        run: u64,
        (at, zset): (&BoardPeriod, &BoardZset),
        member: &[u8],
        by: Option<&[u8]>,
    ) -> Result<Changed> {
        let call = self.claimed(&BOARD_ERASE, at, run, [self.zset(at, zset)]);
        self.change("remove a member from a board", call.arg(member).arg(by.unwrap_or_default())).await
    }

    pub async fn drop_zset(&self, at: &BoardPeriod, zset: &BoardZset) -> Result<()> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.cmd("UNLINK").arg(self.zset(at, zset));
        self.answers("delete the zset of a restore", &pipeline).await.map(drop)
    }

    fn zset(&self, at: &BoardPeriod, zset: &BoardZset) -> String {
        let BoardPeriod { board, period } = at;
        match zset {
            BoardZset::Live => self.live(at),
            BoardZset::Frozen => self.frozen(at),
            BoardZset::Filling => self.keys.filling_board(board, period),
            BoardZset::Restored(tag) => self.keys.restored_board(board, period, tag),
        }
    }
}

fn sum(answers: &[Value]) -> u64 {
    let number = |answer: &Value| if let Value::Int(number) = answer { number.unsigned_abs() } else { 0 };
    answers.iter().map(number).sum()
}
