//! Runs the steps of docs/moving.md on a site whose users continue to like.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod mover;
mod old_site;
mod page;

use std::collections::{BTreeMap, BTreeSet};

use mover::Mover;
use old_site::{Clicks, QUIET, Servers, WRONG};
use page::Block;
use sqlx::Row;

use crate::common::eventually;

/// The number of likes and unlikes that users make between two steps.
const SOME: u64 = 50;

/// Returns the likes in tallyd's tables.
async fn here(mover: &Mover) -> BTreeSet<(u64, u64)> {
    let sql = "SELECT target_id, user_id FROM like_record WHERE is_del = 0";
    let rows = sqlx::query(sql).fetch_all(&mover.world.pool).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Returns the counters of a metric in `counter` that are not zero, by target.
async fn counters(mover: &Mover, metric: u8) -> BTreeMap<u64, i64> {
    let sql = "SELECT target_id, CAST(SUM(value) AS SIGNED) AS number FROM counter WHERE metric = ? GROUP BY target_id HAVING number <> 0";
    let rows = sqlx::query(sql).bind(metric).fetch_all(&mover.world.pool).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

fn likes_of_targets(clicks: &Clicks) -> BTreeMap<u64, i64> {
    let mut numbers = BTreeMap::new();
    for (post, _) in &clicks.likes {
        *numbers.entry(*post).or_default() += 1;
    }
    numbers
}

/// Waits until tallyd has all clicks. Then checks each like count, in `counter` and in the old keys.
async fn assert_tallyd_has_all(mover: &Mover, clicks: &Clicks) {
    eventually("tallyd has all likes", || async { here(mover).await == clicks.likes }).await;
    eventually("tallyd has all views", || async { counters(mover, 2).await == clicks.views }).await;
    assert_eq!(counters(mover, 1).await, likes_of_targets(clicks));
    mover.world.outbox_added().await;
    assert_keys(mover, clicks).await;
}

async fn assert_keys(mover: &Mover, clicks: &Clicks) {
    assert_eq!(mover.site.keys("like").await, likes_of_targets(clicks), "like:count");
    assert_eq!(mover.site.keys("view").await, clicks.views, "view:count");
}

/// Follows steps 1 and 2 of the page.
async fn read_beside_the_old_worker(mover: &mut Mover) {
    mover.forward(1).await;
    mover.forward(2).await;
    assert!(mover.said.contains("no dead letters"), "{}", mover.said);
    mover.map_is_written().await;
    mover.site.worker_has_all().await;
    mover.site.clicked(SOME).await;
}

/// Follows steps 3 to 5 of the page.
async fn import_and_watch(mover: &mut Mover, days: u32) {
    for block in mover.step(3).forward {
        if matches!(&block, Block::Sh(line) if line.contains("--deletions")) {
            mover.site.delete_silently(7, QUIET.start).await;
        }
        mover.run(block).await;
    }
    mover.forward(4).await;
    for _ in 0..days {
        mover.site.clicked(SOME).await;
        mover.forward(5).await;
    }
}

/// Follows step 6, and checks the results that the text of the step describes.
async fn stop_counting_in_old_keys(mover: &mut Mover) {
    for block in mover.step(6).forward {
        let Block::Sh(line) = &block else { unreachable!() };
        if line.starts_with("date") {
            mover.site.clicks.lock().await.servers = Servers::Publishing;
            mover.site.clicked(SOME).await;
            mover.site.worker_has_all().await;
        }
        if line.contains("PERSIST") && line.contains("like") {
            mover.site.stop_worker().await;
        }
        mover.run(block).await;
    }
    assert_eq!(mover.site.keys_that_end().await, 0);
    mover.site.clicked(SOME).await;
}

/// Follows the instructions that undo step 6. The old keys then lack the views that API servers only published.
async fn count_in_old_keys_again(mover: &mut Mover) {
    {
        let mut clicks = mover.site.clicks.lock().await;
        clicks.servers = Servers::Counting;
        for (post, views) in std::mem::take(&mut clicks.views_published) {
            *clicks.views.get_mut(&post).unwrap() -= views;
        }
    }
    mover.site.start_worker().await;
    mover.run(Block::Sh("systemctl enable --now tallyd".to_owned())).await;
    mover.site.clicked(SOME).await;
    let clicks = mover.site.clicks.clone();
    let clicks = clicks.lock().await;
    let mut likes = likes_of_targets(&clicks);
    *likes.get_mut(&WRONG.0).unwrap() += WRONG.1;
    eventually("the old keys get counts again", || async { mover.site.keys("like").await == likes }).await;
    assert_eq!((mover.site.table().await, mover.site.keys("view").await), (clicks.likes.clone(), clicks.views.clone()));
    mover.map_is_empty().await;
}

/// Follows steps 7 and 8. Because of the keys of deleted posts, the first reconcile stops, and the page describes how
/// to continue.
async fn cut_over(mover: &mut Mover, has_keys_of_deleted_posts: bool) {
    mover.forward(7).await;
    for block in mover.step(8).forward {
        match block {
            Block::Sh(line) if line == "tallyd reconcile --full" && has_keys_of_deleted_posts => {
                mover.ends(&line, 1).await;
                assert!(mover.page_says("`reconcile --full` exits with 1"));
                let force = "tallyd reconcile --full --force";
                assert!(mover.page_says(&format!("`{force}`")));
                mover.run(Block::Sh(force.to_owned())).await;
                assert_eq!(mover.site.deleted_posts_that_are_liked().await, 0);
            }
            block => mover.run(block).await,
        }
    }
    mover.site.clicked(SOME).await;
    mover.map_is_empty().await;
    let clicks = mover.site.clicks.clone();
    let clicks = clicks.lock().await;
    assert_tallyd_has_all(mover, &clicks).await;
}

/// Follows step 9. The check at the end of the step must pass while users click.
async fn keep_the_old_table(mover: &mut Mover) {
    mover.forward(9).await;
    mover.site.clicked(SOME).await;
    let clicks = mover.site.clicks.clone();
    let clicks = clicks.lock().await;
    eventually("the old table has all likes", || async { mover.site.table().await == clicks.likes }).await;
    assert_tallyd_has_all(mover, &clicks).await;
}

/// Runs the commands of step 10 of docs/moving.md. The last command removes the map.
async fn end_the_move(mover: &mut Mover) {
    let mut is_own = false;
    for block in mover.step(10).forward {
        if is_own && matches!(&block, Block::Sh(line) if line.contains("restart")) {
            mover.site.clicks.lock().await.servers = Servers::Own;
            mover.site.clicked(SOME).await;
            mover.map_is_empty().await;
            mover.take_out(&["map"]);
        }
        is_own |= matches!(&block, Block::Sql(_));
        mover.run(block).await;
    }
    mover.site.clicked(SOME).await;
    let clicks = mover.site.clicks.clone();
    let clicks = clicks.lock().await;
    assert_tallyd_has_all(mover, &clicks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_that_goes_on_liking_moves_by_the_page() {
    let mut mover = Mover::new("moving").await;
    read_beside_the_old_worker(&mut mover).await;
    // The engineer goes back to the start, as step 2 describes, and then repeats steps 1 and 2.
    mover.take_out(&["map"]);
    mover.back(2).await;
    mover.reconnect().await;
    mover.site.clicked(SOME).await;
    mover.take_out(&["import"]);
    read_beside_the_old_worker(&mut mover).await;
    import_and_watch(&mut mover, 2).await;
    stop_counting_in_old_keys(&mut mover).await;
    cut_over(&mut mover, false).await;
    keep_the_old_table(&mut mover).await;
    mover.stop_export();
    mover.take_out(&["import", "export"]);
    end_the_move(&mut mover).await;
    mover.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_that_has_moved_goes_back_by_the_page() {
    let mut mover = Mover::new("moving_back").await;
    mover.site.leave_keys_of_deleted_posts().await;
    read_beside_the_old_worker(&mut mover).await;
    import_and_watch(&mut mover, 1).await;
    stop_counting_in_old_keys(&mut mover).await;
    count_in_old_keys_again(&mut mover).await;
    stop_counting_in_old_keys(&mut mover).await;
    cut_over(&mut mover, true).await;
    keep_the_old_table(&mut mover).await;
    // While the test holds this lock, users can't click.
    let clicks = mover.site.clicks.clone();
    let mut clicks = clicks.lock().await;
    mover.map_is_empty().await;
    mover.outbox_is_empty().await;
    mover.stop_export();
    mover.take_out(&["map"]);
    mover.back(9).await;
    assert_eq!(mover.site.table().await, clicks.likes);
    assert_keys(&mover, &clicks).await;
    mover.site.start_worker().await;
    clicks.servers = Servers::Counting;
    drop(clicks);
    mover.site.clicked(SOME).await;
    let clicks = mover.site.clicks.clone();
    let clicks = clicks.lock().await;
    eventually("the old table is written again", || async { mover.site.table().await == clicks.likes }).await;
    assert_keys(&mover, &clicks).await;
    drop(clicks);
    mover.close().await;
}
