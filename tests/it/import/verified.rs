//! Each difference that there can be is found and named.

use super::{Schema, old_likes, report, run, world};
use crate::common::stdout;

#[tokio::test(flavor = "multi_thread")]
async fn each_injected_difference_is_found_and_named() {
    let world = world("import_verify", &Schema::SoftDelete.settings("page_rows = 50")).await;
    old_likes(&world, (1..=600).map(|user| (user % 20 + 1, user))).await;
    run(&world, "UPDATE old_like SET deleted = 1 WHERE user_id % 9 = 0").await;
    report(&world, 0, &[]);
    let equal = report(&world, 0, &["--verify"]);
    assert_eq!((&equal["rows"], &equal["differing"]), (&equal["here"], &0.into()), "{equal}");
    // Targets 2 and 3: a row that is gone, and one that says another thing. 4: one too many. 50: a target that the site lacks.
    run(&world, "DELETE FROM like_record WHERE target_id = 2 AND user_id = 1").await;
    run(&world, "UPDATE like_record SET is_del = 1 - is_del WHERE target_id = 3 AND user_id IN (2, 22, 522)").await;
    run(
        &world,
        "INSERT INTO like_record VALUES (1, 4, 10000, 0, NOW(6)), (1, 50, 1, 0, NOW(6)), (2, 4, 10000, 0, NOW(6))",
    )
    .await;
    let output = world.tallyd(&["import", "old", "--verify"]);
    assert_eq!(output.status.code(), Some(2));
    let said = stdout(&output);
    assert!(said.contains("4 targets differ"), "{said}");
    for line in [
        "video:2: 27 on the site, 26 here (1 missing, 0 too many)",
        "video:3: 27 on the site, 26 here (2 missing, 1 too many)",
        "video:4: 27 on the site, 28 here (0 missing, 1 too many)",
        "video:50: 0 on the site, 1 here (0 missing, 1 too many)",
    ] {
        assert!(said.contains(line), "{line} is not in: {said}");
    }
    // Of many only the first ones are named.
    run(&world, "DELETE FROM like_record").await;
    let nothing = report(&world, 2, &["--verify"]);
    assert_eq!(nothing["differing"], 20);
    run(&world, "INSERT INTO like_record SELECT 1, 100 + seq, 1, 0, NOW(6) FROM (SELECT post_id AS seq FROM old_like GROUP BY post_id) AS posts").await;
    let many = report(&world, 2, &["--verify"]);
    assert_eq!((&many["differing"], many["targets"].as_array().unwrap().len()), (&40.into(), 20), "{many}");
    world.close().await;
}
