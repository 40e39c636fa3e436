//! Redis loses its newest data, because an outdated replica becomes the master or a server starts from an old dump.
//! MySQL keeps its data.

use redis::AsyncCommands;
use tallyd::jobs::archive::Outcome;
use tallyd_core::model::{BoardMember, BoardPeriod, Freeze};
use tallyd_core::score::Rule;
use tallyd_redis::boards::Changed;
use tallyd_redis::snapshots::Raised;

use super::late::late;
use super::restored::since;
use super::saved::open;
use super::{Board, DAY, ENDED_AT_ONCE, LATER, NOW, Stage, Stored, WEEKLY, board, outcomes, says, week};

impl Stage {
    /// Returns a copy of all data in Redis.
    pub async fn remember(&mut self) -> Stored {
        self.everything().await.0
    }

    /// Replaces all data in Redis with the copy `then`.
    pub async fn go_back(&mut self, then: &Stored) {
        let now: Vec<String> = self.remember().await.into_keys().collect();
        self.redis.del::<_, ()>(now).await.unwrap();
        for (key, (dump, expires)) in then {
            let mut restore = redis::cmd("RESTORE");
            restore.arg(key).arg((*expires).max(0)).arg(dump).arg("ABSTTL");
            restore.query_async::<()>(&mut self.redis).await.unwrap();
        }
    }

    /// Archives an earlier week, so that Redis keeps the note that this run writes.
    async fn archive_another(&mut self) {
        let at = week("2026-W44");
        self.write(&at, &board(5)).await;
        assert_eq!(outcomes(&self.archive(NOW).await).len(), 1);
    }
}

/// Returns for each member the higher of its two scores.
pub fn raised(one: &Board, other: &Board) -> Board {
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
        stage.write(&at, &board(2_500)).await;
        let then = stage.remember().await;
        // The replica never gets these writes.
        stage.write(&at, &late()).await;
        stage.archive(NOW).await;
        assert_eq!(stage.state(&at).await.as_deref(), Some(state));

        let archived = stage.written[&at].clone();
        stage.go_back(&then).await;
        stage.write(&at, &since()).await;
        let whole = raised(&archived, &stage.in_redis(&at).await);
        stage.refuses("2026-W46", "before the freeze").await;
        let report = stage.archive(NOW).await;

        let expected = if state == "done" { Outcome::Archived } else { Outcome::Ended };
        assert!(outcomes(&report).contains(&("2026-W46", expected)), "{report:#}");
        stage.holds(&at, &whole).await;
        assert!(stage.in_redis(&at).await.is_empty());
        // From now on, writes to this board are late writes again, so a run adds their scores.
        stage.archive(NOW.after(DAY)).await;
        stage.holds(&at, &whole).await;
        assert_eq!(stage.state(&at).await.as_deref(), Some(state));
    }
}

#[tokio::test]
async fn a_redis_that_went_back_and_kept_the_frozen_zset_is_told_from_one_that_did_not() {
    let mut stage = Stage::new("back_frozen", WEEKLY).await;
    stage.archive_another().await;
    let at = week("2026-W46");
    stage.write(&at, &board(40)).await;
    stage.archive(NOW).await;
    stage.write(&at, &late()).await;
    let then = stage.remember().await;
    stage.archive(NOW).await;
    stage.holds_all(&at).await;
    // When Redis loses its newest data, the merge is undone, and the next run repeats it.
    stage.go_back(&then).await;
    stage.archive(NOW).await;
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn a_raised_frozen_zset_that_redis_loses_is_raised_again() {
    let (mut stage, at) = Stage::with_archived("back_raised", WEEKLY, &board(40)).await;
    let then = stage.remember().await;
    stage.write(&at, &late()).await;
    stage.archive(NOW).await;
    stage.go_back(&then).await;
    stage.archive(NOW).await;
    stage.holds_all(&at).await;
    assert!(outcomes(&stage.archive(NOW).await).is_empty(), "no late members are missing");
    stage.go_back(&then).await;
    stage.write(&at, &board(1)).await;
    stage.archive(NOW).await;
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn what_comes_after_a_flush_adds_though_its_notes_are_gone() {
    let (mut stage, at) = Stage::with_archived("back_flushed", WEEKLY, &board(40)).await;
    stage.go_back(&Stored::new()).await;
    late_is_added(&mut stage, &at).await;
}

/// Checks that a run first reports the late writes without a merge, and merges them after an operator's command.
async fn late_is_added(stage: &mut Stage, at: &BoardPeriod) {
    stage.write(at, &late()).await;
    says(&stage.archive(NOW).await, &at.period, "these writes are in the live zset");
    stage.restore(&at.period, NOW).await.unwrap();
    stage.archive(NOW).await;
    stage.holds_all(at).await;
}

#[tokio::test]
async fn what_was_lost_while_it_was_archived_is_raised_to_its_snapshot() {
    let mut stage = Stage::new("back_saved", WEEKLY).await;
    stage.archive_another().await;
    let at = open();
    stage.write(&at, &board(40)).await;
    let then = stage.remember().await;
    stage.write(&at, &late()).await;
    stage.save_all(false).await;
    // A run crashes before it copies the first member.
    let run = stage.take().await;
    let cache = stage.world.cache.clone();
    let generation = stage.claim(run).await;
    assert_eq!(cache.freeze_board(&at, run, 0, None).await.unwrap(), Changed::Done(1));
    stage.store.note_frozen(run, &at, generation, LATER).await.unwrap();
    stage.end_lease().await;

    stage.go_back(&then).await;
    let report = stage.archive(LATER).await;

    assert!(outcomes(&report).contains(&("2026-W47", Outcome::Archived)), "{report:#}");
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn what_came_late_and_is_archived_by_a_restore_counts_once_though_redis_goes_back_to_before_that() {
    let mut stage = Stage::new("back_restored", ENDED_AT_ONCE).await;
    stage.archive_another().await;
    let at = week("2026-W46");
    stage.write(&at, &board(40)).await;
    stage.archive(NOW).await;
    stage.write(&at, &late()).await;
    let then = stage.remember().await;
    stage.restore("2026-W46", NOW).await.unwrap();
    stage.archive(NOW).await;
    stage.holds_all(&at).await;

    stage.go_back(&then).await;
    stage.refuses("2026-W46", "before the freeze").await;
    stage.archive(NOW).await;
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn what_comes_late_to_a_period_that_redis_has_forgotten_altogether_adds() {
    let mut stage = Stage::new("back_forgotten", WEEKLY).await;
    stage.archive_another().await;
    let then = stage.remember().await;
    let at = week("2026-W46");
    stage.write(&at, &board(40)).await;
    stage.archive(NOW).await;
    stage.go_back(&then).await;
    // The next run notices that the board is missing.
    stage.archive(NOW).await;
    late_is_added(&mut stage, &at).await;
}

#[tokio::test]
async fn a_server_that_takes_over_in_the_middle_of_a_raise_is_not_frozen() {
    let mut stage = Stage::new("back_twice", WEEKLY).await;
    stage.archive_another().await;
    let (at, cache) = (week("2026-W46"), stage.world.cache.clone());
    stage.write(&at, &board(3)).await;
    let run = stage.take().await;
    stage.claim(run).await;
    let member = |score| [BoardMember { member: b"member-1".to_vec(), score }];
    assert_eq!(cache.raise_board((&at, Raised::Live), run, 0, &[]).await.unwrap(), Changed::Done(0));
    let then = stage.remember().await;
    assert_eq!(cache.raise_board((&at, Raised::Live), run, 1, &member(100.0)).await.unwrap(), Changed::Done(1));
    stage.go_back(&then).await;
    assert_eq!(cache.raise_board((&at, Raised::Live), run, 2, &member(50.0)).await.unwrap(), Changed::Refused);
    assert_eq!(cache.freeze_board(&at, run, 0, Some(2)).await.unwrap(), Changed::Lost);
    assert_eq!(stage.in_redis(&at).await, board(3));
    assert_eq!(cache.raise_board((&at, Raised::Live), run, 1, &member(100.0)).await.unwrap(), Changed::Done(1));
    assert_eq!(cache.freeze_board(&at, run, 0, Some(2)).await.unwrap(), Changed::Done(1));
}

/// If a frozen zset lacked the last merge and were raised, the next run would add the merged members again.
#[tokio::test]
async fn a_server_that_lacks_a_merge_or_the_frozen_zset_is_not_raised() {
    let mut stage = Stage::new("back_merged", WEEKLY).await;
    let (at, cache) = (week("2026-W46"), stage.world.cache.clone());
    let run = stage.take().await;
    stage.claim(run).await;
    let claimed = stage.remember().await;
    stage.write(&at, &board(3)).await;
    assert_eq!(cache.freeze_board(&at, run, 0, None).await.unwrap(), Changed::Done(1));
    stage.write(&at, &board(2)).await;
    let then = stage.remember().await;
    assert_eq!(cache.merge_late(&at, run, 10, Rule::PLAIN).await.unwrap(), Changed::Done(2));
    let member = [BoardMember { member: b"member-1".to_vec(), score: 100.0 }];
    let raise =
        async |pages| cache.raise_board((&at, Raised::Frozen { late_members: 2 }), run, pages, &member).await.unwrap();
    assert_eq!(
        (raise(0).await, raise(1).await, raise(3).await),
        (Changed::Done(1), Changed::Done(0), Changed::Refused)
    );
    stage.go_back(&then).await;
    assert_eq!(raise(0).await, Changed::Refused, "the server lacks the merge");
    stage.go_back(&claimed).await;
    assert_eq!(raise(0).await, Changed::Absent);
    assert!(!stage.exists(&stage.frozen(&at)).await, "no zset may be made");
}

#[tokio::test]
async fn a_claim_notes_again_what_redis_has_forgotten() {
    let mut stage = Stage::new("back_claims", WEEKLY).await;
    let (at, cache) = (week("2026-W44"), stage.world.cache.clone());
    let freeze = async || cache.find_boards(std::slice::from_ref(&at)).await.unwrap()[0].freeze;
    assert_eq!(freeze().await, Freeze::UNCLAIMED);
    let noted = |generation, note| [(at.period.clone(), generation, note)];
    // In the first claim, the note belongs to another data set. In the second claim, the note belongs to this data set,
    // but the live zset still exists. The loop makes three more claims. Before this loop, the test deletes the live
    // zset.
    assert_eq!(cache.claim_board("likes", 900, &noted(800, 0)).await.unwrap(), 900);
    assert_eq!(freeze().await, Freeze { generation: 900, note: None });
    let live = stage.live(&at);
    stage.redis.zadd::<_, _, _, ()>(&live, "a", 1).await.unwrap();
    assert_eq!(cache.claim_board("likes", 901, &noted(900, 0)).await.unwrap(), 900);
    assert_eq!(freeze().await, Freeze { generation: 900, note: None });
    stage.delete(&live).await;
    for (run, note, expected) in [(902, 0, 0), (903, 902, 902), (904, 0, 902)] {
        assert_eq!(cache.claim_board("likes", run, &noted(900, note)).await.unwrap(), 900);
        assert_eq!(freeze().await, Freeze { generation: 900, note: Some(expected) });
    }
    stage.go_back(&Stored::new()).await;
    assert_eq!(cache.claim_board("likes", 905, &noted(900, 0)).await.unwrap(), 905);
}
