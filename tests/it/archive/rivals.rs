//! Two runs archive the same board at the same time. The second run takes over from the first run, and sometimes the
//! first run resumes later. Only the run that holds the lock archives the board.

use std::process::{Child, Stdio};
use std::time::Instant;

use redis::AsyncCommands;
use tallyd::jobs::archive::Scope;
use tallyd_base::jobs::run::RunReport as _;
use tallyd_base::jobs::runner::Ran;
use tallyd_core::archive::Done;
use tallyd_core::model::{BoardMember, Freeze};
use tallyd_core::tally::Tally;
use tallyd_mysql::StoreError;
use tallyd_mysql::archive_rows::Places;
use tallyd_mysql::snapshots::Saved;
use tallyd_redis::Cache;
use tallyd_redis::boards::Changed;
use tallyd_redis::score::Rule;
use tallyd_redis::snapshots::Raised;
use tallyd_redis::snapshots::Restoring;
use tokio_util::sync::CancellationToken;

use super::late::late;
use super::{DAY, NOW, Stage, WEEKLY, board, week};
use crate::common::{DEADLINE, eventually, signal};

#[tokio::test]
async fn of_two_archivers_at_once_one_works() {
    let (stage, at) = Stage::with_closed("archive_two", WEEKLY, &board(300)).await;
    let archiver = stage.archiver(&Scope::default(), NOW);
    let (one, other) = tokio::join!(stage.run_once(&archiver), stage.run_once(&archiver));
    let ran = [one.unwrap(), other.unwrap()];
    assert!(ran.iter().any(|ran| matches!(ran, Ran::Ended(report) if report.is_done())), "{ran:?}");
    assert!(ran.iter().any(|ran| matches!(ran, Ran::Held { .. })), "{ran:?}");
    stage.holds(&at, &board(300)).await;
}

#[tokio::test]
async fn a_run_that_is_overtaken_at_work_stops_and_the_board_is_archived_once() {
    let (stage, at) = Stage::with_closed("archive_overtaken", &WEEKLY.replace("= 7", "= 1"), &board(5_000)).await;
    let overtaken = stage.take().await;
    let archiver = stage.archiver(&Scope::default(), NOW);
    let running = stage.rival(overtaken, archiver, &CancellationToken::new());
    eventually("the first run copies the board", async || stage.rows().await > 0).await;
    // Each write of the first run extends the first run's lease. So the second run can begin only between two writes.
    let until = Instant::now() + DEADLINE;
    let report = loop {
        stage.end_lease().await;
        match stage.run_once(&stage.archiver(&Scope::default(), NOW)).await.unwrap() {
            Ran::Ended(report) => break report,
            Ran::Held { owner, .. } => {
                assert!(Instant::now() < until, "the second run does not begin: {owner} holds the lock")
            }
        }
    };

    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(StoreError::TakenOver(_))), "{error:#}");
    assert!(report.is_done(), "{report:#}");
    stage.holds_all(&at).await;
}

/// A process that is killed when this value is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[tokio::test]
async fn a_process_that_was_frozen_and_wakes_up_after_a_takeover_changes_nothing() {
    let (mut stage, at) = Stage::with_closed("archive_woken", &WEEKLY.replace("= 7", "= 1"), &board(1_500)).await;
    let mut tallyd = stage.world.command();
    tallyd.args(["archive", "--period", "2026-W46", "--yes"]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = Process(tallyd.spawn().unwrap());
    eventually("the process copies the board", async || stage.rows().await > 0).await;
    signal(&process.0, "STOP");
    stage.write(&at, &late()).await;
    let until = Instant::now() + DEADLINE;
    let report = loop {
        // The process can be stopped in the middle of a transaction that holds the lock's row. The row then stays
        // locked until MySQL closes the connection of the process. If the process sent the statement that locks the row
        // before the stop, MySQL can execute this statement later. Such a late statement extends the lease.
        kill_open_transactions(&stage).await;
        stage.end_lease().await;
        match stage.run_once(&stage.archiver(&Scope::default(), NOW)).await.unwrap() {
            Ran::Ended(report) => break report,
            Ran::Held { owner, .. } => assert!(Instant::now() < until, "held by {owner}"),
        }
    };
    assert!(report.is_done(), "{report:#}");
    let before = stage.everything().await;

    signal(&process.0, "CONT");
    let ended = tokio::task::spawn_blocking(move || process.0.wait().unwrap()).await.unwrap();

    assert!(!ended.success());
    assert_eq!(stage.everything().await, before);
    stage.holds_all(&at).await;
}

async fn kill_open_transactions(stage: &Stage) {
    let open: Vec<u64> = sqlx::query_scalar(
        "SELECT CAST(trx_mysql_thread_id AS UNSIGNED) FROM information_schema.innodb_trx \
         JOIN information_schema.processlist ON id = trx_mysql_thread_id \
         WHERE db = DATABASE() AND trx_mysql_thread_id <> CONNECTION_ID()",
    )
    .fetch_all(&stage.world.pool)
    .await
    .unwrap();
    for connection in open {
        stage.execute(&format!("KILL {connection}")).await;
    }
}

#[tokio::test]
async fn a_run_whose_lock_was_taken_over_writes_nothing() {
    let (mut stage, at) = Stage::with_closed("archive_fenced", WEEKLY, &board(10)).await;
    let overtaken = stage.take().await;
    stage.end_lease().await;
    stage.take().await;
    let before = stage.everything().await;

    let error = stage.archive_as(overtaken, &Scope::default(), NOW).await.unwrap_err();

    assert!(matches!(error.downcast_ref(), Some(StoreError::TakenOver(_))), "{error:#}");
    let members = [BoardMember { member: b"a".to_vec(), score: 1.0 }];
    let done = Done { tally: Tally::default(), left_out: 0, copy: 0, frozen: Freeze::UNCLAIMED, late_members: 0 };
    let saved = Saved { member: members[0].clone(), primary: 1.0, second: 0 };
    for refused in [
        stage.store.note_frozen(overtaken, &at, 0, NOW).await,
        stage.store.copy_places(overtaken, Places::new(&at, 0, 1, &members)).await,
        stage.store.trim_places(overtaken, &at, 0, 0, 9).await.map(drop),
        stage.store.note_done(overtaken, &at, done, NOW).await,
        stage.store.note_ended(overtaken, &at, NOW).await,
        stage.store.note_restored(overtaken, &at, NOW).await,
        stage.store.note_pruned(overtaken, &at, NOW).await,
        stage.store.begin_snapshot(overtaken, &at, 0, NOW).await,
        stage.store.note_generation(overtaken, &at, 0).await,
        stage.store.save_members(overtaken, &at, &[saved]).await,
        stage.store.forget_members(overtaken, &at, &[b"a".to_vec()]).await,
        stage.store.end_snapshot(overtaken, &at, 1, NOW).await,
        stage.store.void_snapshot(overtaken, &at).await,
        stage.store.forget_snapshot(overtaken, &at, None).await.map(drop),
    ] {
        assert!(matches!(refused, Err(StoreError::TakenOver(_))), "{refused:?}");
    }
    assert_eq!(stage.everything().await, before);
}

#[tokio::test]
async fn a_run_that_is_overtaken_while_it_writes_rows_commits_none() {
    let stage = Stage::new("archive_overtaken_writing", WEEKLY).await;
    let at = week("2026-W46");
    let run = stage.take().await;
    let mut other = stage.world.pool.begin().await.unwrap();
    sqlx::raw_sql("SELECT run FROM job_lock FOR UPDATE").execute(&mut *other).await.unwrap();
    let ten: Vec<_> = (0..10_u8).map(|id| BoardMember { member: vec![id], score: 1.0 }).collect();
    let (store, places) = (stage.store.clone(), Places::new(&at, 0, 1, &ten));
    let writing = tokio::spawn(async move { store.copy_places(run, places).await });
    eventually("the rows are written, and the run waits for the job's row", async || {
        let sql = "SELECT COUNT(*) FROM information_schema.processlist \
                   WHERE db = DATABASE() AND info LIKE 'UPDATE job_lock SET writes%'";
        sqlx::query_scalar::<_, i64>(sql).fetch_one(&stage.world.pool).await.unwrap() == 1
    })
    .await;
    sqlx::raw_sql("UPDATE job_lock SET run = run + 1").execute(&mut *other).await.unwrap();
    other.commit().await.unwrap();

    let refused = writing.await.unwrap();

    assert!(matches!(refused, Err(StoreError::TakenOver(_))), "{refused:?}");
    assert!(stage.archived(&at).await.is_empty());
}

#[tokio::test]
async fn redis_refuses_a_run_that_has_no_claim_or_lost_it() {
    let mut stage = Stage::new("archive_claim", WEEKLY).await;
    let at = week("2026-W46");
    let (live, frozen) = (stage.live(&at), stage.frozen(&at));
    let claim = stage.world.cache.keys.board_claim("likes");
    for flushed in [false, true] {
        stage.world.cache.claim_board("likes", 1, &[]).await.unwrap();
        match flushed {
            true => stage.delete(&claim).await,
            false => drop(stage.world.cache.claim_board("likes", 2, &[]).await.unwrap()),
        }
        stage.write(&at, &board(3)).await;
        assert_eq!(stage.world.cache.freeze_board(&at, 1, 0, None).await.unwrap(), Changed::Refused);
        stage.redis.copy::<_, _, _, ()>(&live, &frozen, redis::CopyOptions::default().replace(true)).await.unwrap();
        let before = stage.everything().await;
        assert_eq!(stage.world.cache.merge_late(&at, 1, 10, Rule::PLAIN).await.unwrap(), Changed::Refused);
        assert_eq!(stage.world.cache.expire_frozen(&at, 1, DAY).await.unwrap(), Changed::Refused);
        assert_eq!(stage.world.cache.keep_frozen(&at, 1).await.unwrap(), Changed::Refused);
        let (cache, to) = (&stage.world.cache, Restoring { at: &at, tag: "s1", run: 1 });
        let member = [BoardMember { member: b"a".to_vec(), score: 1.0 }];
        for refused in [
            cache.fill_board(to, &member).await.unwrap(),
            cache.end_filling(to, 1).await.unwrap(),
            cache.put_frozen(to).await.unwrap(),
            cache.put_live(to, 10, Rule::PLAIN, 1).await.unwrap(),
            cache.raise_board((&at, Raised::Live), 1, 0, &member).await.unwrap(),
            cache.mark_board(&at, 1, None, Some(1), None).await.unwrap(),
        ] {
            assert_eq!(refused, Changed::Refused);
        }
        assert_eq!(stage.everything().await, before);
        stage.delete(&live).await;
        assert_eq!(stage.world.cache.end_frozen(&at, 1).await.unwrap(), Changed::Refused);
        assert!(stage.exists(&frozen).await);
        assert_eq!(before.0.get(&frozen), stage.everything().await.0.get(&frozen));
    }
}

/// MySQL lost the first run's rows in a failover, so the second run got the same run id.
#[tokio::test]
async fn of_two_runs_with_one_number_the_last_to_claim_has_the_board() {
    let (stage, at) = Stage::with_closed("archive_one_number", WEEKLY, &board(3)).await;
    let config = &stage.world.config;
    let other = Cache::new(&config.redis, &config.metrics).unwrap();
    stage.world.cache.claim_board("likes", 7, &[]).await.unwrap();
    other.claim_board("likes", 7, &[]).await.unwrap();
    assert_eq!(stage.world.cache.freeze_board(&at, 7, 0, None).await.unwrap(), Changed::Refused);
    assert_eq!(other.freeze_board(&at, 7, 0, None).await.unwrap(), Changed::Done(1));
}

#[tokio::test]
async fn a_frozen_zset_is_never_renamed_over_and_never_unlinked_under_late_writes() {
    let mut stage = Stage::new("archive_over", WEEKLY).await;
    let at = week("2026-W46");
    let (live, frozen) = (stage.live(&at), stage.frozen(&at));
    stage.world.cache.claim_board("likes", 1, &[]).await.unwrap();
    assert_eq!(stage.world.cache.freeze_board(&at, 1, 0, None).await.unwrap(), Changed::Absent);
    stage.write(&at, &board(3)).await;
    assert_eq!(stage.world.cache.freeze_board(&at, 1, 0, None).await.unwrap(), Changed::Done(1));
    stage.write(&at, &board(1)).await;
    assert_eq!(stage.world.cache.freeze_board(&at, 1, 0, None).await.unwrap(), Changed::Done(0));
    assert_eq!(stage.world.cache.end_frozen(&at, 1).await.unwrap(), Changed::Done(0));
    assert_eq!((stage.ranked(&live).await.len(), stage.ranked(&frozen).await.len()), (1, 3));
    // If the frozen zset is missing, the run must not merge the late writes. Otherwise the new frozen zset would
    // contain only the late writes of the board.
    stage.delete(&frozen).await;
    assert_eq!(stage.world.cache.merge_late(&at, 1, 10, Rule::PLAIN).await.unwrap(), Changed::Absent);
    assert_eq!(stage.ranked(&live).await.len(), 1);
    assert!(!stage.exists(&frozen).await);
}
