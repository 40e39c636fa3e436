//! A restore fails and reports the reason if Redis still has the board, or if the board's copy in MySQL is incomplete.

use redis::AsyncCommands;
use tallyd::jobs::archive::Outcome;
use tallyd_core::model::BoardMember;
use tallyd_redis::boards::Changed;
use tallyd_redis::snapshots::{Raised, Restoring};

use super::saved::open;
use super::{DAY, LATER, NOW, Stage, WEEKLY, board, outcomes};

#[tokio::test]
async fn what_an_interrupted_restore_has_left_is_taken_by_no_other() {
    let (mut stage, at) = Stage::with_saved("restored_left", WEEKLY, &board(40)).await;
    let snapshot = stage.store.snapshot(&at).await.unwrap().unwrap();
    let tag = format!("s{}-{}", snapshot.number, NOW.0);
    // A restore filled its temporary zset and was then stopped. Redis still had the board.
    let run = stage.take().await;
    let cache = stage.world.cache.clone();
    let to = Restoring { at: &at, tag: &tag, run };
    stage.claim(run).await;
    let member = [BoardMember { member: b"stale".to_vec(), score: 1_000.0 }];
    cache.fill_board(to, &member).await.unwrap();
    cache.end_filling(to, 1).await.unwrap();
    stage.end_lease().await;
    let left = cache.keys.restored_board("likes", "2026-W47", &tag);
    assert!((1..=86_400).contains(&stage.ttl_s(&left).await), "the key must expire");
    stage.refuses("2026-W47", "Redis has 40 members").await;
    assert_eq!(stage.in_redis(&at).await, board(40));

    assert_eq!(outcomes(&stage.archive(LATER).await), [("2026-W47", Outcome::Archived)]);
    assert_eq!(outcomes(&stage.archive(LATER.after(30 * DAY)).await), [("2026-W47", Outcome::Ended)]);
    stage.restore("2026-W47", LATER.after(30 * DAY)).await.unwrap();
    let frozen = stage.frozen(&at);
    assert_eq!(stage.ranked(&frozen).await, stage.archived(&at).await);
    assert_eq!(stage.ttl_s(&frozen).await, -1);
}

#[tokio::test]
async fn a_frozen_zset_that_came_back_after_its_end_is_not_trusted() {
    let (mut stage, at) = Stage::with_archived("restored_came_back", super::ENDED_AT_ONCE, &board(30)).await;
    let frozen = stage.frozen(&at);
    stage.redis.zadd::<_, _, _, ()>(&frozen, "stranger", 5).await.unwrap();
    stage.refuses("2026-W46", "you can unlink the frozen zset").await;
    assert_eq!(stage.state(&at).await.as_deref(), Some("ended"));
    stage.delete(&frozen).await;
    stage.restore("2026-W46", NOW).await.unwrap();
    assert_eq!(stage.state(&at).await.as_deref(), Some("done"));
    assert_eq!(stage.ranked(&frozen).await, stage.archived(&at).await);
}

#[tokio::test]
async fn what_is_left_of_a_deleted_snapshot_is_none() {
    let (mut stage, at) = Stage::with_saved("restored_void", WEEKLY, &board(30)).await;
    let run = stage.take().await;
    stage.store.note_frozen(run, &at, 0, LATER).await.unwrap();
    stage.store.void_snapshot(run, &at).await.unwrap();
    stage.end_lease().await;
    stage.lose(&at).await;
    stage.refuses("2026-W47", "neither a complete snapshot nor an archive").await;
}

#[tokio::test]
async fn what_can_not_be_restored_is_refused_with_the_reason() {
    let mut stage = Stage::new("restored_not", WEEKLY).await;
    let at = open();
    stage.refuses("2026-W40", "neither a complete snapshot nor an archive").await;
    stage.write(&at, &board(9)).await;
    stage.refuses("2026-W47", "neither a complete snapshot nor an archive").await;
    let error = stage.restore("2026-11", NOW).await.unwrap_err();
    assert!(error.to_string().contains("2026-11 is a month"), "{error:#}");
}

#[tokio::test]
async fn a_server_that_takes_over_in_the_middle_of_a_restore_is_not_marked() {
    let mut stage = Stage::new("restored_twice", WEEKLY).await;
    let (at, cache) = (open(), stage.world.cache.clone());
    stage.write(&at, &board(3)).await;
    let run = stage.take().await;
    stage.claim(run).await;
    let to = Restoring { at: &at, tag: "s1", run };
    let member = |name: &str| [BoardMember { member: name.into(), score: 100.0 }];
    let raise = async |pages| cache.raise_board((&at, Raised::Live), run, pages, &member("member-1")).await.unwrap();
    assert_eq!(raise(0).await, Changed::Done(1));
    assert_eq!(cache.fill_board(to, &member("a")).await.unwrap(), Changed::Done(1));
    let then = stage.remember().await;
    assert_eq!(raise(1).await, Changed::Done(0));
    assert_eq!(cache.fill_board(to, &member("b")).await.unwrap(), Changed::Done(2));
    stage.go_back(&then).await;
    assert_eq!(cache.mark_board(&at, run, None, Some(1), Some(2)).await.unwrap(), Changed::Lost);
    assert_eq!(cache.end_filling(to, 2).await.unwrap(), Changed::Lost);
    assert_eq!(raise(1).await, Changed::Done(0));
    assert_eq!(cache.mark_board(&at, run, None, Some(1), Some(2)).await.unwrap(), Changed::Done(1));
    assert_eq!(cache.fill_board(to, &member("b")).await.unwrap(), Changed::Done(2));
    assert_eq!(cache.end_filling(to, 2).await.unwrap(), Changed::Done(1));
}
