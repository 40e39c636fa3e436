//! If Redis loses a board, tallyd restores it, and counts the later additions once.

use redis::AsyncCommands;
use tallyd::jobs::archive::{Outcome, Report};
use tallyd::jobs::snapshots::{NotRestored, Restore};
use tallyd_base::jobs::run::RunReport as _;
use tallyd_core::model::Micros;
use tokio_util::sync::CancellationToken;

use super::saved::{add, open};
use super::{Board, DAY, NOW, Stage, Stored, WEEKLY, board, outcomes, reason, week};

impl Stage {
    pub async fn restore(&self, period: &str, now: Micros) -> anyhow::Result<Report> {
        self.restore_how(period, now, false).await
    }

    async fn restore_how(&self, period: &str, now: Micros, add: bool) -> anyhow::Result<Report> {
        let mut restore = Restore::new(&self.world.config, ("likes", period), add)?;
        restore.now = Some(now);
        self.run(&restore).await
    }

    pub async fn refuses(&self, period: &str, why: &str) {
        let error = self.restore(period, NOW).await.unwrap_err();
        assert!(error.is::<NotRestored>() && error.to_string().contains(why), "{error:#}");
    }
}

/// Returns additions to two old members and to one new member. The tests write these additions after Redis has lost the
/// board.
pub fn since() -> Board {
    Board::from([(b"member-3".to_vec(), 2.0), (b"member-4".to_vec(), 0.5), (b"new".to_vec(), 7.0)])
}

#[tokio::test]
async fn a_lost_board_is_restored_with_what_was_added_since() {
    let mut stage = Stage::new("restored", WEEKLY).await;
    let at = open();
    let mut whole = board(2_500);
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    stage.lose(&at).await;
    stage.write(&at, &since()).await;
    add(&mut whole, &since());

    let report = stage.restore("2026-W47", NOW).await.unwrap();

    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Restored)]);
    assert_eq!(report.periods[0].members, 2_501);
    let points: f64 = board(2_500).values().sum();
    let from = format!(
        "from its snapshot of 2026-11-21T12:00:00Z, which has 2500 members and {points} points; additions after that and \
         before the loss are lost"
    );
    assert_eq!(reason(&report, "2026-W47"), from);
    assert_eq!(stage.in_redis(&at).await, whole);
    assert!(stage.save_all(false).await.is_done(), "the board has its mark again");
    assert_eq!(stage.saved(&at).await, whole);
    stage.refuses("2026-W47", "Redis has 2501 members").await;
    assert_eq!(stage.in_redis(&at).await, whole);
}

#[tokio::test]
async fn a_board_is_restored_under_load_and_every_write_counts_once() {
    let mut stage = Stage::new("restored_load", WEEKLY).await;
    let at = open();
    let mut whole = board(5_000);
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    stage.lose(&at).await;
    let stop = CancellationToken::new();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..4_u64 {
        let (mut redis, key, stopped) = (stage.world.redis().await, stage.live(&at), stop.clone());
        writers.spawn(async move {
            let mut added = Board::new();
            for turn in 0_u64.. {
                let member = format!("member-{}", (turn * 7_919 + writer) % 6_000).into_bytes();
                redis.zincr::<_, _, _, ()>(&key, &member, 1).await.unwrap();
                *added.entry(member).or_default() += 1.0;
                if stopped.is_cancelled() {
                    break;
                }
            }
            added
        });
    }
    let report = stage.restore("2026-W47", NOW).await.unwrap();
    assert!(report.is_done(), "{report:#}");
    stop.cancel();
    while let Some(added) = writers.join_next().await {
        add(&mut whole, &added.unwrap());
    }
    assert_eq!(stage.in_redis(&at).await, whole);
    assert!(stage.save_all(false).await.is_done());
}

#[tokio::test]
async fn a_closed_board_that_redis_lost_is_not_archived_before_it_is_restored() {
    let mut stage = Stage::new("restored_closed", WEEKLY).await;
    let (at, later) = (open(), NOW.after(7 * DAY));
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    stage.lose(&at).await;
    let report = stage.archive(later).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Kept)], "Redis has no sign that the board existed");
    stage.write(&at, &since()).await;
    let report = stage.archive(later).await;
    assert!(reason(&report, "2026-W47").contains("`tallyd board restore`"), "{report:#}");
    assert_eq!(stage.state(&at).await, None);

    stage.restore("2026-W47", later).await.unwrap();
    add(&mut whole, &since());
    assert_eq!(outcomes(&stage.archive(later).await), [("2026-W47", Outcome::Archived)]);
    stage.holds(&at, &whole).await;
}

#[tokio::test]
async fn an_evicted_board_is_not_archived_for_what_is_left_of_it() {
    let (mut stage, _redis) = Stage::evicting("restored_evicted").await;
    let (at, later) = (open(), NOW.after(7 * DAY));
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    let live = stage.live(&at);
    stage.redis.del::<_, ()>(&live).await.unwrap();
    stage.write(&at, &since()).await;
    assert_eq!(outcomes(&stage.archive(later).await), [("2026-W47", Outcome::Kept)]);
    stage.restore_how("2026-W47", later, true).await.unwrap();
    add(&mut whole, &since());
    assert_eq!(outcomes(&stage.archive(later).await), [("2026-W47", Outcome::Archived)]);
    stage.holds(&at, &whole).await;
}

#[tokio::test]
async fn a_board_that_is_lost_while_it_is_archived_is_restored_and_archived() {
    let mut stage = Stage::new("restored_frozen", WEEKLY).await;
    let (at, later) = (open(), NOW.after(7 * DAY));
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    let run = stage.take().await;
    let generation = stage.claim(run).await;
    stage.world.cache.freeze_board(&at, run, 0, None).await.unwrap();
    stage.store.note_frozen(run, &at, generation, later).await.unwrap();
    stage.end_lease().await;
    stage.refuses("2026-W47", "run `tallyd archive` to continue").await;
    stage.lose(&at).await;
    stage.write(&at, &since()).await;
    let report = stage.archive(later).await;
    assert!(reason(&report, "2026-W47").contains("there is a snapshot"), "{report:#}");

    stage.restore("2026-W47", later).await.unwrap();
    add(&mut whole, &since());
    assert_eq!(outcomes(&stage.archive(later).await), [("2026-W47", Outcome::Archived)]);
    stage.holds(&at, &whole).await;
}

#[tokio::test]
async fn an_archived_board_is_put_back_stays_and_ends_again() {
    let mut stage = Stage::new("restored_archive", WEEKLY).await;
    let at = week("2026-W46");
    let mut whole = board(2_100);
    stage.write(&at, &whole).await;
    stage.archive(NOW).await;
    stage.refuses("2026-W46", "frozen zset is in Redis").await;
    let ended = NOW.after(30 * DAY);
    assert_eq!(outcomes(&stage.archive(ended).await), [("2026-W46", Outcome::Ended)]);
    let ranked = stage.archived(&at).await;

    let report = stage.restore("2026-W46", ended).await.unwrap();
    assert!(reason(&report, "2026-W46").contains("from its archive of 2026-11-21T12:00:00Z"), "{report:#}");
    let frozen = stage.frozen(&at);
    assert_eq!(stage.ranked(&frozen).await, ranked);
    assert_eq!(outcomes(&stage.archive(ended.after(29 * DAY)).await), []);

    // A late write is added to the restored board.
    stage.write(&at, &since()).await;
    add(&mut whole, &since());
    assert_eq!(outcomes(&stage.archive(ended.after(29 * DAY)).await), [("2026-W46", Outcome::Archived)]);
    stage.holds(&at, &whole).await;
    assert_eq!(outcomes(&stage.archive(ended.after(59 * DAY)).await), [("2026-W46", Outcome::Ended)]);
    assert!(!stage.exists(&frozen).await);
    stage.holds(&at, &whole).await;
}

#[tokio::test]
async fn what_comes_after_the_end_is_saved_by_putting_the_board_back() {
    let mut stage = Stage::new("restored_late", super::ENDED_AT_ONCE).await;
    let at = week("2026-W46");
    let mut whole = board(30);
    stage.write(&at, &whole).await;
    stage.archive(NOW).await;
    stage.write(&at, &since()).await;
    let report = stage.archive(NOW).await;
    assert!(reason(&report, "2026-W46").contains("`tallyd board restore` to restore the archive"));
    stage.restore("2026-W46", NOW).await.unwrap();
    add(&mut whole, &since());
    assert_eq!(outcomes(&stage.archive(NOW).await), [("2026-W46", Outcome::Ended)]);
    stage.holds(&at, &whole).await;
}

#[tokio::test]
async fn a_board_of_an_old_backup_is_raised_and_nothing_counts_twice() {
    let mut stage = Stage::new("restored_backup", WEEKLY).await;
    let at = open();
    let old = board(1_500);
    stage.write(&at, &old).await;
    stage.save_all(false).await;
    let (live, mark) = (stage.live(&at), stage.mark(&at));
    let backup: (Vec<u8>, Vec<u8>) =
        redis::pipe().cmd("DUMP").arg(&live).cmd("DUMP").arg(&mark).query_async(&mut stage.redis).await.unwrap();
    let later: Board = (0..500).map(|id| (format!("member-{id}").into_bytes(), 50.0)).collect();
    stage.write(&at, &later).await;
    stage.save_all(false).await;
    let mut saved = old;
    add(&mut saved, &later);
    // Redis restarts from the backup, and gets more writes.
    stage.lose(&at).await;
    for (key, dump) in [(&live, &backup.0), (&mark, &backup.1)] {
        redis::cmd("RESTORE").arg(key).arg(0).arg(dump).query_async::<()>(&mut stage.redis).await.unwrap();
    }
    stage.write(&at, &since()).await;
    let mut expected = stage.in_redis(&at).await;
    for (member, score) in saved {
        let raised = expected.entry(member).or_default();
        *raised = raised.max(score);
    }
    let report = stage.save_all(false).await;
    assert!(reason(&report, "2026-W47").contains("`tallyd board restore`"), "{report:#}");
    for _ in 0..2 {
        let report = stage.restore("2026-W47", NOW).await.unwrap();
        assert!(reason(&report, "2026-W47").contains("raised to its snapshot"), "{report:#}");
        assert_eq!(stage.in_redis(&at).await, expected);
        // The second pass of this loop also tests an older value of the mark.
        stage.redis.set::<_, _, ()>(&mark, 1).await.unwrap();
    }
    stage.restore("2026-W47", NOW).await.unwrap();
    assert!(stage.save_all(false).await.is_done());
    assert_eq!(stage.saved(&at).await, expected);
}

#[tokio::test]
async fn a_board_that_lost_its_mark_alone_is_not_added_to_itself() {
    let mut stage = Stage::new("restored_mark", WEEKLY).await;
    let at = open();
    stage.write(&at, &board(300)).await;
    stage.save_all(false).await;
    stage.write(&at, &since()).await;
    let (mark, whole) = (stage.mark(&at), stage.in_redis(&at).await);
    stage.redis.del::<_, ()>(&mark).await.unwrap();
    assert!(!stage.save_all(false).await.is_done());
    let dry = stage.world.tallyd(&["board", "restore", "likes", "2026-W47", "--dry-run"]);
    let sum: f64 = board(300).values().sum();
    let said = crate::common::stdout(&dry);
    assert!(
        said.contains(&format!(
            "Redis has 301 members of it now; scores with a sum of {sum} are in both Redis and the snapshot"
        )),
        "{said}"
    );
    stage.restore("2026-W47", NOW).await.unwrap();
    assert_eq!(stage.in_redis(&at).await, whole);
    assert!(stage.save_all(false).await.is_done());
    // MySQL was restored from a backup.
    stage.execute("UPDATE leaderboard_snapshot_period SET number = 1").await;
    stage.execute("UPDATE leaderboard_snapshot SET score = 1, primary_value = 1").await;
    stage.refuses("2026-W47", "Redis has 301 members").await;
    assert!(stage.save_all(false).await.is_done());
    assert_eq!(stage.saved(&at).await, whole);
}

#[tokio::test]
async fn what_came_since_a_flush_is_added_however_much_it_is() {
    let mut stage = Stage::new("restored_flushed", WEEKLY).await;
    let at = open();
    let of = |factor: f64| board(300).into_iter().map(|(member, score)| (member, score * factor)).collect::<Board>();
    stage.write(&at, &of(10.0)).await;
    stage.save_all(false).await;
    stage.go_back(&Stored::new()).await;
    stage.write(&at, &of(6.0)).await;
    stage.restore("2026-W47", NOW).await.unwrap();
    assert_eq!(stage.in_redis(&at).await, of(16.0));
    // The test deletes only the board's mark. The data set stays the same, so tallyd must not treat this case as a
    // flush of Redis.
    let mark = stage.mark(&at);
    stage.redis.del::<_, ()>(&mark).await.unwrap();
    stage.restore("2026-W47", NOW).await.unwrap();
    assert_eq!(stage.in_redis(&at).await, of(16.0));
}

#[tokio::test]
async fn a_board_of_which_much_was_taken_away_is_not_doubled() {
    let (mut stage, _redis) = Stage::evicting("restored_fallen").await;
    let at = open();
    let mut whole = board(10);
    add(&mut whole, &Board::from([(b"b".to_vec(), 900.0)]));
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    let unliked = Board::from([(b"member-9".to_vec(), -1.0)]);
    stage.write(&at, &unliked).await;
    add(&mut whole, &unliked);
    assert!(stage.save_all(false).await.is_done(), "an unlike must not count as a loss");
    stage.write(&at, &Board::from([(b"b".to_vec(), -600.0)])).await;
    assert!(!stage.save_all(false).await.is_done());
    assert!(stage.world.tallyd(&["board", "restore", "likes", "2026-W47", "--dry-run"]).status.success());
    stage.restore("2026-W47", NOW).await.unwrap();
    assert_eq!(stage.in_redis(&at).await, whole);
    // A Redis that evicts nothing has not lost the board.
    redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory-policy")
        .arg("noeviction")
        .exec_async(&mut stage.redis)
        .await
        .unwrap();
    stage.write(&at, &Board::from([(b"b".to_vec(), -600.0)])).await;
    assert!(stage.save_all(false).await.is_done());
}

#[tokio::test]
async fn a_freeze_that_a_failover_undid_is_done_again_and_nothing_counts_twice() {
    let mut stage = Stage::new("restored_undone", WEEKLY).await;
    let (at, later) = (open(), NOW.after(7 * DAY));
    let mut whole = board(40);
    stage.write(&at, &whole).await;
    stage.save_all(false).await;
    let run = stage.take().await;
    let generation = stage.claim(run).await;
    stage.store.note_frozen(run, &at, generation, later).await.unwrap();
    stage.end_lease().await;
    stage.write(&at, &since()).await;
    add(&mut whole, &since());
    stage.refuses("2026-W47", "Redis went back to a state before the freeze").await;
    assert_eq!(outcomes(&stage.archive(later).await), [("2026-W47", Outcome::Archived)]);
    stage.holds(&at, &whole).await;
}
