//! Why a run leaves a period as it is.

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    // Found by a run.
    #[error(
        "Redis lost the period's frozen zset before the copy was verified, so leaderboard_archive can hold only a part of it. A live \
         zset, if Redis has one, holds only late writes. To archive the late writes as the whole board, delete the \
         period's row of leaderboard_period"
    )]
    Lost,
    #[error(
        "Redis lost the period's frozen zset before the copy was verified, but there is a snapshot: run `tallyd board restore` to restore the \
         snapshot"
    )]
    LostWithBackup,
    #[error(
        "Redis has lost the board, wholly or in part, since its last snapshot. A live zset, if Redis has one, is not the whole \
         board: run `tallyd board restore` to restore the snapshot with later additions. If the data in Redis is right, run \
         `tallyd board snapshot NAME PERIOD --force`"
    )]
    LostLive,
    #[error(
        "Redis lost the period's frozen zset before late writes were archived: the late writes are lost, and leaderboard_archive is complete \
         without them"
    )]
    LostLate,
    #[error("{}; {}", Self::LostLate, Self::Late)]
    LostLateAndLate,
    #[error(
        "a client wrote to the period after its zset had ended, so these writes are in the live zset and not in \
         leaderboard_archive. Run `tallyd board restore` to restore the archive, and the next run merges the writes"
    )]
    Late,
    #[error(
        "a client wrote to the period after its archive was deleted: these writes are only in the live zset, which you can unlink"
    )]
    LatePruned,
    #[error(
        "Redis went back in time, and has the frozen zset of an ended period again. leaderboard_archive is complete and \
         stays unchanged: you can unlink the frozen zset, and the live zset if Redis has one"
    )]
    CameBack,
    #[error(
        "Redis went back to a state before the freeze: run `tallyd archive` to restore the \
         archived scores in Redis and to archive the board again"
    )]
    WentBack,
    #[error("another Redis server took over while this run raised scores in Redis: the next run raises all scores")]
    WentBackAgain,
    #[error(
        "the configuration no longer has this board, so tallyd does not know when to remove its zset: add the board again, or \
         delete the period's rows of leaderboard_period, leaderboard_snapshot_period and leaderboard_snapshot"
    )]
    Unknown,
    #[error(
        "the board has another time_zone or week_starts in the site card, so its period is perhaps open: correct this \
         configuration, or reload a daemon with it"
    )]
    EndsOtherwise,

    // The run found these reasons while it worked on the period.
    #[error("the period's zset disappeared from Redis during the run")]
    ZsetGone,
    #[error("Redis lost the period's frozen zset while the run read the zset")]
    FrozenGone,
    #[error("the period's frozen zset had {before} members during the copy, and has {now} members now")]
    Changed { before: u64, now: u64 },
    #[error("Redis and leaderboard_archive differ at place {0}")]
    Differs(u64),
    #[error("Redis and leaderboard_archive are equal, but both differ from the verified copy")]
    NotAsVerified,
    #[error("{0}. The period already has an archive: to archive it again, delete its row of leaderboard_period")]
    ArchivedBefore(Box<Self>),
    #[error("a client has just written to the period: the next run merges that write")]
    WrittenJustNow,
    #[error("MySQL cannot store the member {0}: its score is infinite, or its name has more than 255 bytes")]
    Unstorable(String),
    #[error("{0}")]
    Server(String),

    // The reasons why no snapshot is taken.
    #[error("the period is frozen or archived, and tallyd takes no snapshot of such a period")]
    NotOpen,
    #[error("an interrupted restore has moved the later additions: run `tallyd board restore` to finish the restore")]
    RestoreInterrupted,

    // The reasons why nothing is restored.
    #[error("the period's archive was deleted, because it was older than archive_keep")]
    Pruned,
    #[error("the period's frozen zset is in Redis, and its archive is complete")]
    Archived,
    #[error("the period is frozen, and not archived yet: run `tallyd archive` to continue")]
    Frozen,
    #[error("MySQL has neither a complete snapshot nor an archive of the period")]
    NothingSaved,
    #[error(
        "Redis has not lost the board since the last snapshot: Redis has {live} members, and the snapshot has {saved}"
    )]
    NotLost { live: u64, saved: u64 },
    #[error("tallyd added {filled} members to Redis, but Redis has {members}: try again")]
    NotFilled { filled: u64, members: u64 },
    #[error("MySQL has {filled} members of the period, but should have {total}")]
    Incomplete { filled: u64, total: u64 },
}

impl Reason {
    pub fn is_of_zset_that_returned(&self) -> bool {
        matches!(self, Self::Late | Self::LatePruned | Self::CameBack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_reasons_are_of_a_zset_that_returned() {
        assert!([Reason::Late, Reason::LatePruned, Reason::CameBack].iter().all(Reason::is_of_zset_that_returned));
        assert!(![Reason::ZsetGone, Reason::NotOpen, Reason::Frozen].iter().any(Reason::is_of_zset_that_returned));
    }
}
