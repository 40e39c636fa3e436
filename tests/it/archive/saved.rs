//! Snapshots are updated when their boards change. If Redis loses most of a board, the rest of the board never replaces
//! the board's snapshot.

use redis::AsyncCommands;
use sqlx::Row;
use tallyd::jobs::archive::{Outcome, Report, Scope};
use tallyd::jobs::snapshots::Snapshots;
use tallyd_base::jobs::run::RunReport as _;
use tallyd_core::model::{BoardPeriod, Micros};
use tokio_util::sync::CancellationToken;

use super::{Board, DAY, LATER, NOW, Stage, WEEKLY, board, outcomes, says, week};
use crate::common::eventually;

/// The current week, which is open at [`NOW`].
pub fn open() -> BoardPeriod {
    week("2026-W47")
}

impl Stage {
    /// Makes the snapshots that are due, as a daemon does.
    pub async fn save_due(&self, now: Micros) -> Report {
        self.save(None, false, now).await
    }

    /// Makes snapshots of all boards, as an operator does.
    pub async fn save_all(&self, force: bool) -> Report {
        self.save(Some(&Scope::default()), force, NOW).await
    }

    async fn save(&self, scope: Option<&Scope>, force: bool, now: Micros) -> Report {
        let mut snapshots = Snapshots::new(&self.world.config, scope.cloned(), force);
        snapshots.now = Some(now);
        self.run(&snapshots).await.unwrap()
    }

    /// Returns the rows of a snapshot.
    pub async fn saved(&self, at: &BoardPeriod) -> Board {
        let sql = "SELECT member, score FROM leaderboard_snapshot WHERE board = ? AND period = ?";
        let rows = sqlx::query(sql).bind(&at.board).bind(&at.period).fetch_all(&self.world.pool).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    pub fn mark(&self, at: &BoardPeriod) -> String {
        self.world.cache.keys.board_mark(&at.board, &at.period)
    }

    /// Removes the board and all notes about it from Redis, as if the server were empty.
    pub async fn lose(&mut self, at: &BoardPeriod) {
        let (keys, board) = (&self.world.cache.keys, &at.board);
        let keys = [self.live(at), self.frozen(at), self.mark(at), keys.board_claim(board), keys.board_freezes(board)];
        self.redis.del::<_, ()>(&keys).await.unwrap();
    }

    /// The live zset.
    pub async fn in_redis(&mut self, at: &BoardPeriod) -> Board {
        let live = self.live(at);
        self.ranked(&live).await.into_iter().collect()
    }
}

/// Adds the scores of one board to the scores of another board.
pub fn add(to: &mut Board, added: &Board) {
    for (member, score) in added {
        *to.entry(member.clone()).or_default() += score;
    }
}

#[tokio::test]
async fn a_snapshot_is_what_the_board_is() {
    let (mut stage, at) = Stage::with_open("saved", WEEKLY, &board(3_000)).await;
    let live = stage.live(&at);
    stage.redis.expire::<_, ()>(&live, 3_600).await.unwrap();
    let report = stage.save_all(false).await;
    assert_eq!(stage.ttl_s(&live).await, -1, "a board must not expire before it is archived");
    assert_eq!((outcomes(&report), report.periods[0].members), (vec![("2026-W47", Outcome::Saved)], 3_000));
    assert_eq!(stage.saved(&at).await, stage.written[&at]);

    stage.write(&at, &Board::from([(b"member-7".to_vec(), 100.5), (b"new".to_vec(), 1.0)])).await;
    for id in 0..700 {
        stage.redis.zrem::<_, _, ()>(&live, format!("member-{id}")).await.unwrap();
        stage.written.get_mut(&at).unwrap().remove(format!("member-{id}").as_bytes());
    }
    assert!(stage.save_all(false).await.is_done());
    assert_eq!(stage.saved(&at).await, stage.written[&at]);
}

#[tokio::test]
async fn a_snapshot_is_taken_when_it_is_due_and_of_boards_that_are_there() {
    let stage_settings = format!("{WEEKLY}snapshot_every = \"1h\"\n[[board]]\nname = \"posts\"\nperiod = \"total\"\n");
    let mut stage = Stage::new("saved_due", &stage_settings).await;
    assert_eq!(stage.save_due(NOW).await.periods, [], "the board must not exist yet");
    stage.write(&open(), &board(3)).await;
    let total = BoardPeriod { board: "posts".to_owned(), period: "total".to_owned() };
    stage.write(&total, &board(5)).await;
    assert_eq!(outcomes(&stage.save_due(NOW).await), [("2026-W47", Outcome::Saved), ("total", Outcome::Saved)]);
    assert_eq!(stage.save_due(NOW.after(DAY / 25)).await.periods, []);
    assert_eq!(stage.save_due(NOW.after(DAY / 24)).await.periods.len(), 2);
    assert_eq!(stage.save_due(NOW.after(DAY / 24)).await.periods, []);
    assert_eq!(stage.saved(&total).await, board(5));
    // The board of this week has grown.
    stage.write(&open(), &board(7)).await;
    assert_eq!(outcomes(&stage.save_due(NOW.after(DAY / 24)).await), [("2026-W47", Outcome::Saved)]);
}

#[tokio::test]
async fn a_young_board_whose_first_likes_were_withdrawn_is_no_loss() {
    let mut stage = Stage::new("saved_young", WEEKLY).await;
    let (at, later) = (open(), NOW.after(DAY / 24));
    let like = |member: &str, score| Board::from([(member.as_bytes().to_vec(), score)]);
    stage.write(&at, &like("a", 1.0)).await;
    assert_eq!(outcomes(&stage.save_due(NOW).await), [("2026-W47", Outcome::Saved)]);
    let live = stage.live(&at);
    stage.redis.zrem::<_, _, ()>(&live, "a").await.unwrap();
    // The only like was withdrawn, so the board is gone. In the next week, its snapshot follows.
    assert_eq!(outcomes(&stage.save_due(later).await), [("2026-W47", Outcome::Saved)]);
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Forgotten)]);
    assert_eq!(stage.archive(LATER).await.periods, []);
    // The first like was withdrawn, and others came.
    stage.write(&at, &like("a", 1.0)).await;
    stage.save_due(NOW).await;
    stage.redis.zrem::<_, _, ()>(&live, "a").await.unwrap();
    stage.write(&at, &like("b", 5.0)).await;
    assert_eq!(outcomes(&stage.save_due(later).await), [("2026-W47", Outcome::Saved)]);
    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Archived)]);
    stage.holds(&at, &like("b", 5.0)).await;
}

#[tokio::test]
async fn what_is_left_of_a_lost_board_does_not_replace_its_snapshot() {
    let (mut stage, at) = Stage::with_saved("saved_lost", WEEKLY, &board(30)).await;
    stage.lose(&at).await;
    stage.write(&at, &board(20)).await;

    let report = stage.save_all(false).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Kept)]);
    says(&report, "2026-W47", "Redis has lost the board, wholly or in part, since its last snapshot");
    assert_eq!(stage.save_due(NOW.after(DAY)).await.periods, [], "a daemon must not save the board");
    assert_eq!(stage.saved(&at).await, board(30));

    // The scores in Redis are lower than the scores in the snapshot. The operator knows that the lower scores are
    // right, and uses `force`.
    let week = Scope { board: Some("likes".to_owned()), period: Some("2026-W47".to_owned()), dry_run: false };
    assert_eq!(outcomes(&stage.save(Some(&week), true, NOW).await), [("2026-W47", Outcome::Saved)]);
    assert_eq!(stage.saved(&at).await, board(20));
    assert_eq!(outcomes(&stage.save_due(NOW.after(DAY)).await), [("2026-W47", Outcome::Saved)]);
}

#[tokio::test]
async fn a_board_that_was_evicted_or_came_from_a_backup_does_not_replace_its_snapshot() {
    let (mut stage, at, _redis) = Stage::evicting("saved_evicted", &board(30)).await;
    let (live, mark) = (stage.live(&at), stage.mark(&at));

    stage.delete(&live).await;
    // The board has all members again, but with lower scores.
    stage.write(&at, &board(30).into_keys().map(|member| (member, 1.0)).collect()).await;
    says(&stage.save_all(false).await, "2026-W47", "wholly or in part");
    assert_eq!(stage.saved(&at).await, board(30));

    let number: u64 = stage.redis.get(&mark).await.unwrap();
    stage.redis.set::<_, _, ()>(&mark, number - 1).await.unwrap();
    stage.write(&at, &board(30)).await;
    says(&stage.save_all(false).await, "2026-W47", "Redis has lost the board");
    assert_eq!(stage.saved(&at).await, board(30));
}

#[tokio::test]
async fn a_board_that_is_lost_while_it_is_saved_spoils_nothing() {
    let (mut stage, at) = Stage::with_saved("saved_midway", WEEKLY, &board(60_000)).await;
    let mut snapshots = Snapshots::new(&stage.world.config, Some(Scope::default()), false);
    snapshots.now = Some(NOW);
    let run = stage.take().await;
    let saving = stage.rival(run, snapshots, &CancellationToken::new());
    let mark = stage.mark(&at);
    let marked = || {
        let (mut redis, mark) = (stage.redis.clone(), mark.clone());
        async move { redis.get::<_, Option<u64>>(&mark).await.unwrap() == Some(run) }
    };
    eventually("the run reads the board", marked).await;
    stage.lose(&at).await;
    stage.write(&at, &Board::from([(b"member-1".to_vec(), 1.0)])).await;
    let report = saving.await.unwrap().unwrap();
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Kept)]);
    assert_eq!(stage.saved(&at).await, board(60_000));
}

#[tokio::test]
async fn a_snapshot_under_load_has_each_member_as_it_was_at_some_time_of_the_run() {
    let before = board(5_000);
    let (stage, at) = Stage::with_open("saved_load", WEEKLY, &before).await;
    let (mut redis, key) = (stage.redis.clone(), stage.live(&at));
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let writing = tokio::spawn(async move {
        let mut added = Board::new();
        for turn in 0_u64.. {
            let member = format!("member-{}", (turn * 7_919) % 6_000).into_bytes();
            redis.zincr::<_, _, _, ()>(&key, &member, 1).await.unwrap();
            *added.entry(member).or_default() += 1.0;
            if stopped.is_cancelled() {
                return added;
            }
        }
        added
    });
    assert!(stage.save_all(false).await.is_done());
    stop.cancel();
    let mut after = before.clone();
    add(&mut after, &writing.await.unwrap());
    let saved = stage.saved(&at).await;
    for (member, score) in &before {
        assert!((*score..=after[member]).contains(&saved[member]), "{score} {} {}", saved[member], after[member]);
    }
    assert!(saved.keys().all(|member| after.contains_key(member)));
    assert!(stage.save_all(false).await.is_done());
    assert_eq!(stage.saved(&at).await, after);
}

#[tokio::test]
async fn a_snapshot_goes_when_its_board_is_archived() {
    let (mut stage, at) = Stage::with_saved("saved_done", WEEKLY, &board(2_500)).await;
    let report = stage.archive(LATER).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Archived)]);
    stage.holds(&at, &board(2_500)).await;
    assert_eq!(stage.saved(&at).await, Board::new());
    assert_eq!(stage.store.snapshot(&at).await.unwrap(), None);
    assert!(!stage.exists(&stage.mark(&at)).await);
}

#[tokio::test]
async fn the_snapshot_of_a_total_board_is_read_in_rank_order_from_an_index() {
    let settings = "[metrics]\nlike = 1\ncomment = 2\n[[board]]\nname = \"likes\"\nperiod = \"total\"\n\
        score = [\"like\", \"comment\"]\ntie = \"second\"\n";
    let mut stage = Stage::new("saved_index", settings).await;
    let at = week("total");
    // Each score contains two counts. Members with higher numbers do not always have higher scores.
    let score = |id: u64| ((id * 31 % 40) << 20) + id * 17 % 50;
    let whole: Board = (0..4_000).map(|id| (format!("m{id}").into_bytes(), score(id) as f64)).collect();
    stage.write(&at, &whole.into_iter().filter(|(_, score)| *score > 0.0).collect()).await;
    stage.save_all(false).await;
    stage.execute("ANALYZE TABLE leaderboard_snapshot").await;
    let sql = "SELECT member, primary_value, second_value FROM leaderboard_snapshot \
        WHERE board = 'likes' AND period = 'total' ORDER BY primary_value DESC, second_value DESC, member DESC LIMIT 100";
    let rows = sqlx::query(sql).fetch_all(&stage.world.pool).await.unwrap();
    let members: Vec<Vec<u8>> = rows.iter().map(|row| row.get(0)).collect();
    let live = stage.live(&at);
    let ranked: Vec<Vec<u8>> = stage.redis.zrevrange(&live, 0, 99).await.unwrap();
    assert_eq!(members, ranked);
    let top = (rows[0].get::<f64, _>(1), rows[0].get::<u32, _>(2));
    let best = stage.ranked(&live).await[0].1 as u64;
    assert_eq!(top, ((best >> 20) as f64, (best & 0xf_ffff) as u32));
    let plan = sqlx::query(sqlx::AssertSqlSafe(format!("EXPLAIN FORMAT=TRADITIONAL {sql}")))
        .fetch_one(&stage.world.pool)
        .await
        .unwrap();
    let (key, extra): (String, String) = (plan.get("key"), plan.get("Extra"));
    assert_eq!(key, "by_rank");
    assert!(!extra.contains("filesort") && extra.contains("Using index"), "{extra}");
}

#[tokio::test]
async fn a_board_that_is_lost_in_its_first_snapshot_is_saved_anew() {
    let (stage, at) = Stage::with_open("saved_first", WEEKLY, &board(30)).await;
    let run = stage.take().await;
    stage.store.begin_snapshot(run, &at, 0, NOW).await.unwrap();
    stage.end_lease().await;
    // Redis has no mark of the board, so no snapshot of it was ever completed. So tallyd must not report that Redis
    // lost the board.
    assert_eq!(stage.save_due(NOW.after(DAY / 400)).await.periods, [], "the retry must wait");
    assert_eq!(outcomes(&stage.save_due(NOW.after(DAY / 200)).await), [("2026-W47", Outcome::Saved)]);
    assert_eq!(stage.saved(&at).await, board(30));
}

#[tokio::test]
async fn a_board_that_was_deleted_on_purpose_is_forgotten_by_force() {
    let (mut stage, at) = Stage::with_saved("saved_forgotten", WEEKLY, &board(2_500)).await;
    stage.lose(&at).await;
    let week = Scope { board: Some("likes".to_owned()), period: Some("2026-W47".to_owned()), dry_run: false };
    assert_eq!(outcomes(&stage.save(Some(&week), false, NOW).await), [("2026-W47", Outcome::Kept)]);
    assert_eq!(outcomes(&stage.save(Some(&week), true, NOW).await), [("2026-W47", Outcome::Forgotten)]);
    assert_eq!((stage.saved(&at).await, stage.store.snapshot(&at).await.unwrap()), (Board::new(), None));
    assert_eq!(stage.archive(LATER).await.periods, []);
}

#[tokio::test]
async fn a_run_that_is_overtaken_before_it_marks_the_board_does_not_mark_it() {
    let (mut stage, at) = Stage::with_saved("saved_overtaken", WEEKLY, &board(30)).await;
    let mark = stage.mark(&at);
    let former: u64 = stage.redis.get(&mark).await.unwrap();
    let overtaken = stage.take().await;
    stage.claim(overtaken).await;
    stage.end_lease().await;
    assert!(stage.save_all(false).await.is_done());
    let late = stage.world.cache.mark_board(&at, overtaken, Some(former), Some(overtaken), None).await.unwrap();
    assert_eq!(late, tallyd_redis::boards::Changed::Refused);
    assert!(stage.save_all(false).await.is_done());
}

#[tokio::test]
async fn what_is_frozen_or_archived_is_not_saved() {
    let (mut stage, at) = Stage::with_archived("saved_archived", WEEKLY, &board(30)).await;
    stage.delete(&stage.frozen(&at)).await;
    stage.write(&at, &board(2)).await;
    let week = Scope { board: Some("likes".to_owned()), period: Some("2026-W46".to_owned()), dry_run: false };
    says(&stage.save(Some(&week), true, NOW).await, "2026-W46", "frozen or archived");
    assert_eq!(stage.saved(&at).await, Board::new());
}

#[tokio::test]
async fn a_board_that_can_not_be_saved_keeps_no_other_one_from_it() {
    let settings = format!("{WEEKLY}[[board]]\nname = \"posts\"\nperiod = \"total\"\n");
    let mut stage = Stage::new("saved_others", &settings).await;
    let (at, total) = (open(), BoardPeriod { board: "posts".to_owned(), period: "total".to_owned() });
    stage.write(&at, &board(30)).await;
    stage.write(&total, &board(5)).await;
    for _ in 0..2 {
        stage.save_due(NOW).await;
    }
    stage.delete(&stage.live(&at)).await;
    stage.write(&at, &Board::from([(b"member-1".to_vec(), 1.0)])).await;
    let later = NOW.after(DAY / 24);
    let report = stage.save_due(later).await;
    assert_eq!(outcomes(&report), [("2026-W47", Outcome::Kept), ("total", Outcome::Saved)]);
    assert_eq!(stage.save_due(later).await.periods, [], "the retry must wait");
}
