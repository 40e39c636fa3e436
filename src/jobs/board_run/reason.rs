//! Why a period is kept as it is: a sentence for an operator, with what to do.

/// Why a period is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::jobs) enum Reason {
    // What a run finds.
    #[error(
        "Redis lost its frozen zset before the copy was verified: leaderboard_archive may hold a part of it; what the live \
         zset holds, if there is one, came late: delete its row of leaderboard_period to have that archived as the whole board"
    )]
    Lost,
    #[error(
        "Redis lost its frozen zset before the copy was verified, but there is a snapshot: `tallyd board restore` puts that \
         in its place"
    )]
    LostWithBackup,
    #[error(
        "Redis has lost it since its snapshot, wholly or in part, and what the live zset holds, if there is one, is not the \
         board: `tallyd board restore` puts the snapshot back with what was added since; or, if what Redis has is right, \
         `tallyd board snapshot NAME PERIOD --force` takes that"
    )]
    LostLive,
    #[error(
        "Redis lost its frozen zset before late writes were archived: these are lost, and leaderboard_archive is whole as it \
         was before"
    )]
    LostLate,
    #[error("{}; {}", Self::LostLate, Self::Late)]
    LostLateAndLate,
    #[error(
        "it was written to after its zset had ended: what came late is in the live zset and not in leaderboard_archive; \
         `tallyd board restore` puts the archive back, and the next run merges it"
    )]
    Late,
    #[error("it was written to after its archive had been pruned: the live zset holds that, and can be unlinked")]
    LatePruned,
    #[error(
        "Redis went back in time, and its frozen zset is there again after it had ended: leaderboard_archive is whole and \
         stays as it is, the zset can be unlinked, and a live one beside it"
    )]
    CameBack,
    #[error(
        "Redis has it as it was before it was frozen: `tallyd archive` raises that to its archive, and archives it once more"
    )]
    WentBack,
    #[error("another server has taken over while it was raised to its archive: the next run does that")]
    WentBackAgain,
    #[error(
        "the configuration has no such board any more, so it can't say how long its zset stays: put the board back, or delete \
         its row of leaderboard_period"
    )]
    Unknown,

    // What happens on the way.
    #[error("its zset is gone from Redis since it was looked for")]
    ZsetGone,
    #[error("its frozen zset went away while it was read: Redis lost it")]
    FrozenGone,
    #[error("its frozen zset had {before} members while it was copied, and has {now} now")]
    Changed { before: u64, now: u64 },
    #[error("Redis and leaderboard_archive differ at place {0}")]
    Differs(u64),
    #[error("Redis and leaderboard_archive are equal, but not what was verified")]
    NotAsVerified,
    #[error("{0}; it was archived before: delete its row of leaderboard_period to have it archived anew")]
    ArchivedBefore(Box<Self>),
    #[error("it was written to just now: the next run merges that")]
    WrittenJustNow,
    #[error("the score at place {0} is infinite, which MySQL can't hold")]
    InfiniteAt(u64),
    #[error("the score of {0} is infinite, which MySQL can't hold")]
    InfiniteOf(String),
    /// What a server says of this period's rows or keys.
    #[error("{0}")]
    Server(String),

    // Why no snapshot is taken.
    #[error("it is frozen or archived: only what is neither is saved")]
    NotOpen,
    #[error("a restore was interrupted, and has what was added since: `tallyd board restore` ends it")]
    RestoreInterrupted,

    // Why nothing is restored.
    #[error("its archive was pruned, by archive_keep")]
    Pruned,
    #[error("its frozen zset is in Redis, and its archive is whole")]
    Archived,
    #[error("it is frozen, and not archived yet: `tallyd archive` goes on with it")]
    Frozen,
    #[error("MySQL has neither a complete snapshot nor an archive of it")]
    NothingSaved,
    #[error("Redis has it, with {live} members, and has not lost it since its last snapshot, of {saved}")]
    NotLost { live: u64, saved: u64 },
    #[error("{filled} members were added, and Redis has {members}: try again")]
    NotFilled { filled: u64, members: u64 },
    #[error("MySQL has {filled} members of it, and should have {total}")]
    Incomplete { filled: u64, total: u64 },
}
