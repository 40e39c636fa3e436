//! The import removes a like that is missing in the site's table. But the import keeps a like that an event has written
//! or changed.

use super::{
    Schema, assert_brought_over, counters_equal_rows, here, old_likes, on_site, paused_at, publish, report, resumed,
    run, world,
};
use crate::common::stderr;

const QUICKLY: [&str; 4] = ["--deletions", "--look-again", "1s", "--yes"];

#[tokio::test(flavor = "multi_thread")]
async fn what_the_site_deleted_is_taken_out_and_nothing_else() {
    for (place, schema) in [Schema::HardDelete, Schema::Timeless].into_iter().enumerate() {
        let world = world(&format!("import_missing{place}"), &schema.settings("page_rows = 40")).await;
        let publisher = world.publisher().await;
        let daemon = world.daemon();
        old_likes(&world, (1..=200).map(|user| (user % 7 + 1, user))).await;
        report(&world, 0, &[]);
        run(&world, "DELETE FROM old_like WHERE user_id <= 30").await;
        // Publishes events for rows that the import did not write, and for a row that has changed since the import.
        publish(&world, &publisher, [(3, 900, true), (1_000, 900, true), (2, 1, true)]).await;
        world.drained(&publisher).await;
        let before = here(&world).await;
        let asked = report(&world, 0, &[&QUICKLY[..], &["--dry-run"]].concat());
        assert_eq!((&asked["missed"], &asked["taken_out"]), (&29.into(), &29.into()), "{asked}");
        assert_eq!(here(&world).await, before);
        let done = report(&world, 0, &QUICKLY);
        assert_eq!((&done["missed"], &done["taken_out"]), (&29.into(), &29.into()), "{done}");
        let mut expected = on_site(&world).await;
        expected.extend([(3, 900), (1_000, 900), (2, 1)]);
        assert_eq!(here(&world).await, expected);
        counters_equal_rows(&world).await;
        // If the import runs again, the removed rows are not added again.
        report(&world, 0, &[]);
        assert_eq!(here(&world).await, expected);
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_lost_most_rows_takes_no_like_with_it() {
    let world = world("import_lost", &Schema::HardDelete.settings("")).await;
    old_likes(&world, (1..=200).map(|user| (user % 7 + 1, user))).await;
    report(&world, 0, &[]);
    let all = here(&world).await;
    let refused = |why: &str| {
        let output = world.tallyd(&[&["import"][..], &QUICKLY].concat());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains(why), "{why}: {}", stderr(&output));
    };
    run(&world, "DELETE FROM old_like WHERE user_id > 30").await;
    refused(" imported likes are missing among 30 likes of the query");
    assert_eq!(here(&world).await, all);
    let forced = report(&world, 0, &[&QUICKLY[..], &["--force"]].concat());
    assert_eq!(forced["taken_out"], 170, "{forced}");
    assert_brought_over(&world).await;
    // A table without rows is refused even if fewer rows are missing than the limit allows.
    run(&world, "DELETE FROM old_like").await;
    refused("30 imported likes are missing among 0 likes of the query");
    assert_eq!(here(&world).await.len(), 30);
    // The way back: the table has its rows again, and so has tallyd.
    old_likes(&world, (1..=200).map(|user| (user % 7 + 1, user))).await;
    let back = report(&world, 0, &[]);
    assert_eq!((&back["changed"], &back["counted"]), (&170.into(), &170.into()), "{back}");
    assert_eq!(here(&world).await, all);
    counters_equal_rows(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_comes_back_between_the_looks_stays() {
    let world = world("import_back", &Schema::Timeless.settings("")).await;
    old_likes(&world, (1..=20).map(|user| (5, user))).await;
    report(&world, 0, &[]);
    run(&world, "DELETE FROM old_like WHERE user_id IN (7, 8)").await;
    let import = paused_at(&world, &QUICKLY, "import:missed").await;
    old_likes(&world, [(5, 7)]).await;
    let done = resumed(import);
    assert_eq!((&done["missed"], &done["taken_out"]), (&2.into(), &1.into()), "{done}");
    assert_brought_over(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_an_event_changes_after_the_looks_stays() {
    let world = world("import_changed", &Schema::HardDelete.settings("")).await;
    let publisher = world.publisher().await;
    let _daemon = world.daemon();
    old_likes(&world, (1..=20).map(|user| (5, user))).await;
    report(&world, 0, &[]);
    run(&world, "DELETE FROM old_like WHERE user_id IN (7, 8)").await;
    let import = paused_at(&world, &QUICKLY, "import:taking-out").await;
    publish(&world, &publisher, [(5, 7, true)]).await;
    world.drained(&publisher).await;
    let done = resumed(import);
    assert_eq!((&done["missed"], &done["taken_out"]), (&2.into(), &1.into()), "{done}");
    assert!(here(&world).await.contains(&(5, 7)));
    counters_equal_rows(&world).await;
}
