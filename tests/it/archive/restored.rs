//! If Redis loses a board, tallyd restores it, and counts the later additions once.

use redis::AsyncCommands;
use tallyd::jobs::archive::{Outcome, Report};
use tallyd::jobs::snapshots::{NotRestored, Restore};
use tallyd_base::jobs::run::RunReport as _;
use tallyd_core::model::Micros;
use tokio_util::sync::CancellationToken;

use super::back::raised;
use super::{Board, DAY, LATER, NOW, Stage, Stored, WEEKLY, board, outcomes, reason, says};

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
    let (mut stage, at) = Stage::with_saved("restored", WEEKLY, &board(2_500)).await;
    stage.lose(&at).await;
    stage.write(&at, &since()).await;

    let report = stage.restore("2026-W47", NOW).await.unwrap();

    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Restored)]);
    assert_eq!(report.periods[0].members, 2_501);
    let points: f64 = board(2_500).values().sum();
    let from = format!(
        "from its snapshot of 2026-11-21T12:00:00Z, which has 2500 members and {points} points; additions after that and \
         before the loss are lost"
    );
    assert_eq!(reason(&report, "2026-W47"), from);
    stage.is_whole(&at).await;
    assert!(stage.save_all(false).await.is_done(), "the board has its mark again");
    assert_eq!(stage.saved(&at).await, stage.written[&at]);
    stage.refuses("2026-W47", "Redis has 2501 members").await;
    stage.is_whole(&at).await;
}

#[tokio::test]
async fn a_board_is_restored_under_load_and_every_write_counts_once() {
    let (mut stage, at) = Stage::with_saved("restored_load", WEEKLY, &board(5_000)).await;
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
        stage.note(&at, &added.unwrap());
    }
    stage.is_whole(&at).await;
    assert!(stage.save_all(false).await.is_done());
}

#[tokio::test]
async fn a_closed_board_that_redis_lost_is_not_archived_before_it_is_restored() {
    let (mut stage, at) = Stage::with_saved("restored_closed", WEEKLY, &board(40)).await;
    stage.lose(&at).await;
    let report = stage.archive(LATER).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Kept)], "Redis has no sign that the board existed");
    stage.write(&at, &since()).await;
    says(&stage.archive(LATER).await, "2026-W47", "`tallyd board restore`");
    assert_eq!(stage.state(&at).await, None);

    stage.restore("2026-W47", LATER).await.unwrap();
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Archived)]);
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn an_evicted_board_is_not_archived_for_what_is_left_of_it() {
    let (mut stage, at, _redis) = Stage::evicting("restored_evicted", &board(40)).await;
    stage.delete(&stage.live(&at)).await;
    stage.write(&at, &since()).await;
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Kept)]);
    stage.restore_how("2026-W47", LATER, true).await.unwrap();
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Archived)]);
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn a_board_that_is_lost_while_it_is_archived_is_restored_and_archived() {
    let (mut stage, at) = Stage::with_saved("restored_frozen", WEEKLY, &board(40)).await;
    let run = stage.take().await;
    let generation = stage.claim(run).await;
    stage.world.cache.freeze_board(&at, run, 0, None).await.unwrap();
    stage.store.note_frozen(run, &at, generation, LATER).await.unwrap();
    stage.end_lease().await;
    stage.refuses("2026-W47", "run `tallyd archive` to continue").await;
    stage.lose(&at).await;
    stage.write(&at, &since()).await;
    says(&stage.archive(LATER).await, "2026-W47", "there is a snapshot");

    stage.restore("2026-W47", LATER).await.unwrap();
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Archived)]);
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn an_archived_board_is_put_back_stays_and_ends_again() {
    let (mut stage, at) = Stage::with_archived("restored_archive", WEEKLY, &board(2_100)).await;
    stage.refuses("2026-W46", "frozen zset is in Redis").await;
    let ended = NOW.after(30 * DAY);
    assert_eq!(outcomes(&stage.archive(ended).await), [("2026-W46", Outcome::Ended)]);
    let ranked = stage.archived(&at).await;

    says(&stage.restore("2026-W46", ended).await.unwrap(), "2026-W46", "from its archive of 2026-11-21T12:00:00Z");
    let frozen = stage.frozen(&at);
    assert_eq!(stage.ranked(&frozen).await, ranked);
    assert_eq!(outcomes(&stage.archive(ended.after(29 * DAY)).await), []);

    // A late write is added to the restored board.
    stage.write(&at, &since()).await;
    assert_eq!(outcomes(&stage.archive(ended.after(29 * DAY)).await), [("2026-W46", Outcome::Archived)]);
    stage.holds_all(&at).await;
    assert_eq!(outcomes(&stage.archive(ended.after(59 * DAY)).await), [("2026-W46", Outcome::Ended)]);
    assert!(!stage.exists(&frozen).await);
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn what_comes_after_the_end_is_saved_by_putting_the_board_back() {
    let (mut stage, at) = Stage::with_archived("restored_late", super::ENDED_AT_ONCE, &board(30)).await;
    stage.write(&at, &since()).await;
    says(&stage.archive(NOW).await, "2026-W46", "`tallyd board restore` to restore the archive");
    stage.restore("2026-W46", NOW).await.unwrap();
    assert_eq!(outcomes(&stage.archive(NOW).await), [("2026-W46", Outcome::Ended)]);
    stage.holds_all(&at).await;
}

#[tokio::test]
async fn a_board_of_an_old_backup_is_raised_and_nothing_counts_twice() {
    let (mut stage, at) = Stage::with_saved("restored_backup", WEEKLY, &board(1_500)).await;
    let (live, mark) = (stage.live(&at), stage.mark(&at));
    let backup: (Vec<u8>, Vec<u8>) =
        redis::pipe().cmd("DUMP").arg(&live).cmd("DUMP").arg(&mark).query_async(&mut stage.redis).await.unwrap();
    stage.write(&at, &(0..500).map(|id| (format!("member-{id}").into_bytes(), 50.0)).collect()).await;
    stage.save_all(false).await;
    let saved = stage.written[&at].clone();
    // Redis restarts from the backup, and gets more writes.
    stage.lose(&at).await;
    for (key, dump) in [(&live, &backup.0), (&mark, &backup.1)] {
        redis::cmd("RESTORE").arg(key).arg(0).arg(dump).query_async::<()>(&mut stage.redis).await.unwrap();
    }
    stage.write(&at, &since()).await;
    let expected = raised(&saved, &stage.in_redis(&at).await);
    says(&stage.save_all(false).await, "2026-W47", "`tallyd board restore`");
    for _ in 0..2 {
        says(&stage.restore("2026-W47", NOW).await.unwrap(), "2026-W47", "raised to its snapshot");
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
    let (mut stage, at) = Stage::with_saved("restored_mark", WEEKLY, &board(300)).await;
    stage.write(&at, &since()).await;
    stage.delete(&stage.mark(&at)).await;
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
    stage.is_whole(&at).await;
    assert!(stage.save_all(false).await.is_done());
    // MySQL was restored from a backup.
    stage.execute("UPDATE leaderboard_snapshot_period SET number = 1").await;
    stage.execute("UPDATE leaderboard_snapshot SET score = 1, primary_value = 1").await;
    stage.refuses("2026-W47", "Redis has 301 members").await;
    assert!(stage.save_all(false).await.is_done());
    assert_eq!(stage.saved(&at).await, stage.written[&at]);
}

#[tokio::test]
async fn what_came_since_a_flush_is_added_however_much_it_is() {
    let of = |factor: f64| board(300).into_iter().map(|(member, score)| (member, score * factor)).collect::<Board>();
    let (mut stage, at) = Stage::with_saved("restored_flushed", WEEKLY, &of(10.0)).await;
    stage.go_back(&Stored::new()).await;
    stage.write(&at, &of(6.0)).await;
    stage.restore("2026-W47", NOW).await.unwrap();
    stage.is_whole(&at).await;
    // The test deletes only the board's mark. The data set stays the same, so tallyd must not treat this case as a
    // flush of Redis.
    stage.delete(&stage.mark(&at)).await;
    stage.restore("2026-W47", NOW).await.unwrap();
    stage.is_whole(&at).await;
}

#[tokio::test]
async fn a_board_of_which_much_was_taken_away_is_not_doubled() {
    let mut saved = board(10);
    saved.insert(b"b".to_vec(), 900.0);
    let (mut stage, at, _redis) = Stage::evicting("restored_fallen", &saved).await;
    stage.write(&at, &Board::from([(b"member-9".to_vec(), -1.0)])).await;
    let whole = stage.written[&at].clone();
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
    let (mut stage, at) = Stage::with_saved("restored_undone", WEEKLY, &board(40)).await;
    let run = stage.take().await;
    let generation = stage.claim(run).await;
    stage.store.note_frozen(run, &at, generation, LATER).await.unwrap();
    stage.end_lease().await;
    stage.write(&at, &since()).await;
    stage.refuses("2026-W47", "Redis went back to a state before the freeze").await;
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Archived)]);
    stage.holds_all(&at).await;
}
