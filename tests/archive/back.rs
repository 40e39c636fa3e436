//! Redis goes back in time: a replica takes over that was behind, or a server starts from an old dump. MySQL does not go back with it.

use redis::AsyncCommands;
use tallyd::archiver::Outcome;
use tallyd::model::BoardPeriod;

use crate::late::late;
use crate::restored::since;
use crate::{Board, DAY, ENDED_AT_ONCE, NOW, Stage, Stored, WEEKLY, board, outcomes, reason, week};

impl Stage {
    /// All that Redis has now.
    pub async fn remember(&mut self) -> Stored {
        self.everything().await.0
    }

    /// Redis has all that it had then, and nothing else.
    pub async fn go_back(&mut self, then: &Stored) {
        let now: Vec<String> = self.remember().await.into_keys().collect();
        self.redis.del::<_, ()>(now).await.unwrap();
        for (key, (dump, expires)) in then {
            let mut restore = redis::cmd("RESTORE");
            restore.arg(key).arg((*expires).max(0)).arg(dump).arg("ABSTTL");
            restore.query_async::<()>(&mut self.redis).await.unwrap();
        }
    }

    /// A week before, so that there was a run.
    async fn archive_another(&mut self) {
        let at = week("2026-W44");
        self.write(&at, &board(5)).await;
        assert_eq!(outcomes(&self.archive(NOW).await).len(), 1);
    }
}

/// The larger of both numbers.
fn raised(one: &Board, other: &Board) -> Board {
    let mut raised = one.clone();
    for (member, score) in other {
        let known = raised.entry(member.clone()).or_default();
        *known = known.max(*score);
    }
    raised
}

#[tokio::test]
async fn a_board_from_before_its_freeze_is_raised_to_its_archive_and_nothing_counts_twice() {
    for (name, settings, state) in [("back_done", WEEKLY, "done"), ("back_ended", ENDED_AT_ONCE, "ended")] {
        let mut stage = Stage::new(name, settings).await;
        stage.archive_another().await;
        let at = week("2026-W46");
        let mut whole = board(2_500);
        stage.write(&at, &whole).await;
        let then = stage.remember().await;
        // What the replica never hears of.
        let last = late(&mut whole);
        stage.write(&at, &last).await;
        stage.archive(NOW).await;
        assert_eq!(stage.state(&at).await.as_deref(), Some(state));

        stage.go_back(&then).await;
        stage.write(&at, &since()).await;
        let live: Board = stage.in_redis(&at).await;
        stage.refuses("2026-W46", "before it was frozen").await;
        let report = stage.archive(NOW).await;

        let expected = if state == "done" { Outcome::Archived } else { Outcome::Ended };
        assert!(outcomes(&report).contains(&("2026-W46", expected)), "{report:#}");
        let whole = raised(&whole, &live);
        stage.holds(&at, &whole).await;
        assert!(stage.in_redis(&at).await.is_empty());
        // What comes now is late again, and adds.
        stage.archive(NOW.after(DAY)).await;
        stage.holds(&at, &whole).await;
        assert_eq!(stage.state(&at).await.as_deref(), Some(state));
        stage.close().await;
    }
}

#[tokio::test]
async fn a_redis_that_went_back_and_kept_the_frozen_zset_is_told_from_one_that_did_not() {
    let mut stage = Stage::new("back_frozen", WEEKLY).await;
    stage.archive_another().await;
    let at = week("2026-W46");
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    stage.archive(NOW).await;
    let last = late(&mut whole);
    stage.write(&at, &last).await;
    let then = stage.remember().await;
    stage.archive(NOW).await;
    stage.holds(&at, &whole).await;
    // The merge is undone, and is done again.
    stage.go_back(&then).await;
    stage.archive(NOW).await;
    stage.holds(&at, &whole).await;
    stage.close().await;
}

#[tokio::test]
async fn what_comes_after_a_flush_adds_though_its_notes_are_gone() {
    let mut stage = Stage::new("back_flushed", WEEKLY).await;
    let at = week("2026-W46");
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    stage.archive(NOW).await;
    stage.go_back(&Stored::new()).await;
    late_is_added(&mut stage, &at, &mut whole).await;
    stage.close().await;
}

/// A daemon of the version before archives in between, and notes nothing in Redis.
#[tokio::test]
async fn what_comes_after_a_run_that_keeps_no_notes_adds() {
    let mut stage = Stage::new("back_former", ENDED_AT_ONCE).await;
    stage.archive_another().await;
    let (claim, notes) = (stage.world.cache.keys.board_claim("likes"), stage.world.cache.keys.board_freezes("likes"));
    let at = week("2026-W46");
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    let former: Stored = stage.remember().await;
    stage.archive(NOW).await;
    stage.redis.del::<_, ()>(&notes).await.unwrap();
    let (dump, _) = &former[&notes];
    redis::cmd("RESTORE").arg(&notes).arg(0).arg(dump).query_async::<()>(&mut stage.redis).await.unwrap();
    let number: u64 = stage.redis.get(&claim).await.unwrap();
    stage.redis.set::<_, _, ()>(&claim, number + 1).await.unwrap();
    late_is_added(&mut stage, &at, &mut whole).await;
    stage.close().await;
}

/// It is told, waits for a person, and is merged.
async fn late_is_added(stage: &mut Stage, at: &BoardPeriod, whole: &mut Board) {
    let late = late(whole);
    stage.write(at, &late).await;
    let report = stage.archive(NOW).await;
    assert!(reason(&report, &at.period).contains("what came late is in the live zset"), "{report:#}");
    stage.restore(&at.period, NOW).await.unwrap();
    stage.archive(NOW).await;
    stage.holds(at, whole).await;
}
