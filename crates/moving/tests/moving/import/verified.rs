//! The verification finds and reports each possible difference.

use super::{Schema, block, old_likes, report, run, world};
use crate::common::{stderr, stdout};

const KEYSET: &str = "WHERE post_id > :after_target OR (post_id = :after_target AND user_id > :after_user)";

#[tokio::test(flavor = "multi_thread")]
async fn each_injected_difference_is_found_and_named() {
    let world = world("import_verify", &Schema::SoftDelete.settings("page_rows = 50")).await;
    old_likes(&world, (1..=600).map(|user| (user % 20 + 1, user))).await;
    run(&world, "UPDATE old_like SET deleted = 1 WHERE user_id % 9 = 0").await;
    report(&world, 0, &[]);
    let equal = report(&world, 0, &["--verify"]);
    assert_eq!((&equal["rows"], &equal["differing"]), (&equal["here"], &0.into()), "{equal}");
    assert_eq!((&equal["rows"], &equal["read"]), (&534.into(), &0.into()), "{equal}");
    // The test deletes a row of target 2, and reverses the state of some rows of target 3. Then the test adds a row to
    // target 4, and a row to target 50, which the site does not know.
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
    // If many targets differ, the import reports only the first targets.
    run(&world, "DELETE FROM like_record").await;
    let nothing = report(&world, 2, &["--verify"]);
    assert_eq!(nothing["differing"], 20);
    run(&world, "INSERT INTO like_record SELECT 1, 100 + seq, 1, 0, NOW(6) FROM (SELECT post_id AS seq FROM old_like GROUP BY post_id) AS posts").await;
    let many = report(&world, 2, &["--verify"]);
    assert_eq!((&many["differing"], many["targets"].as_array().unwrap().len()), (&40.into(), 20), "{many}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checksum_tells_swapped_users_of_two_targets_apart() {
    let world = world("import_verify_swap", &Schema::Timeless.settings("")).await;
    // These swaps do not change the XOR of the checksums, because CRC32 is linear. Some of these swaps change neither
    // the XOR nor the sum of the checksums.
    let swaps: Vec<(u64, u64)> = (0..3_000).map(|n| (2 * n + 1, 10 * n + 1_000_000)).collect();
    old_likes(&world, swaps.iter().flat_map(|(target, user)| [(*target, *user), (target + 1, user + 1)])).await;
    run(
        &world,
        "INSERT INTO like_record SELECT 1, post_id + IF(post_id % 2 = 1, 1, -1), user_id, 0, NOW(6) FROM old_like",
    )
    .await;
    let linear = "SELECT CAST((SELECT BIT_XOR(CRC32(CONCAT(post_id, '.', user_id))) FROM old_like) \
                  ^ (SELECT BIT_XOR(CRC32(CONCAT(target_id, '.', user_id))) FROM like_record) AS SIGNED)";
    assert_eq!(world.count(linear).await, 0);
    let swapped = report(&world, 2, &["--verify"]);
    assert_eq!(swapped["differing"], 6_000, "{}", swapped["differing"]);
    // Now only targets 1 and 2 are left, with the same count on each side.
    run(&world, "DELETE FROM old_like WHERE post_id > 2; DELETE FROM like_record WHERE target_id > 2").await;
    let one = report(&world, 2, &["--verify"]);
    assert_eq!((&one["differing"], &one["rows"], &one["here"]), (&2.into(), &2.into(), &2.into()), "{one}");
    assert_eq!((&one["targets"][0]["missing"], &one["targets"][0]["extra"]), (&1.into(), &1.into()), "{one}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_read_only_where_the_checksums_differ() {
    let world = world("import_verify_reads", &Schema::SoftDelete.settings("page_rows = 500")).await;
    old_likes(&world, (1..=8_000).map(|n| (n % 100 + 1, n))).await;
    report(&world, 0, &[]);
    run(&world, "DELETE FROM like_record WHERE target_id IN (20, 70) AND user_id < 200").await;
    let found = report(&world, 2, &["--verify"]);
    let read = found["read"].as_u64().unwrap();
    assert_eq!((&found["differing"], &found["rows"]), (&2.into(), &8_000.into()), "{found}");
    assert!((4..1_000).contains(&read), "{read} rows were read: {found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_to_write_a_query_and_its_values_is_summed() {
    let mut world = world("import_verify_forms", &Schema::SoftDelete.settings("")).await;
    old_likes(&world, (1..=300).map(|n| (n % 40 + 1, n))).await;
    run(&world, "UPDATE old_like SET deleted = 1 WHERE user_id % 5 = 0").await;
    let order = format!("FROM old_like {KEYSET} ORDER BY post_id, user_id LIMIT :rows");
    let deleted = "keeps_deleted = true\npage_rows = 70";
    for (query, more) in [
        (format!("SELECT post_id AS target, user_id AS user, deleted {order}; -- the end"), deleted),
        (format!("SELECT post_id AS Target, user_id AS `USER`, deleted = 1 AS deleted {order} # the end"), deleted),
        (
            format!(
                "WITH likes AS (SELECT * FROM old_like) SELECT post_id AS target, user_id AS user, deleted {} /* ; */",
                order.replace("old_like", "likes")
            ),
            deleted,
        ),
        (
            format!(
                "SELECT CAST(post_id AS CHAR) AS target, CONCAT(user_id) AS user, CONCAT(deleted) AS deleted {order}"
            ),
            deleted,
        ),
        (
            format!(
                "SELECT CAST(post_id AS DECIMAL(20)) AS target, CONVERT(user_id USING utf16) AS user, CAST(deleted AS UNSIGNED) AS deleted {order}"
            ),
            deleted,
        ),
        (
            format!(
                "SELECT post_id AS target, user_id AS user FROM old_like WHERE deleted = 0 AND ({}) \
                 ORDER BY post_id, user_id LIMIT :rows",
                KEYSET.trim_start_matches("WHERE ")
            ),
            "page_rows = 70",
        ),
    ] {
        run(&world, "DELETE FROM like_record; DELETE FROM counter").await;
        world.set(&block(&query, more));
        assert_eq!(report(&world, 0, &[])["added"].as_u64().unwrap() / 10, if more == deleted { 30 } else { 24 });
        let equal = report(&world, 0, &["--verify"]);
        assert_eq!(
            (&equal["rows"], &equal["here"], &equal["read"]),
            (&240.into(), &240.into(), &0.into()),
            "{query}: {equal}"
        );
    }
    run(&world, "DELETE FROM like_record WHERE target_id = 8 AND user_id = 7").await;
    assert_eq!(report(&world, 2, &["--verify"])["targets"][0]["target"], "video:8");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_compared_ends_in_a_sentence() {
    let mut world = world("import_verify_refused", &Schema::HardDelete.settings("")).await;
    old_likes(&world, (1..=40).map(|post| (post, 1))).await;
    report(&world, 0, &[]);
    let plain = "post_id AS target, user_id AS user";
    let order = "ORDER BY post_id, user_id LIMIT :rows";
    let of = |columns: &str| format!("SELECT {columns} FROM old_like {KEYSET} {order}");
    let deleted = "keeps_deleted = true";
    for (query, more, why) in [
        (
            of("CONCAT('0', post_id) AS target, user_id AS user"),
            "",
            "the row of target 01 and user 1: ids must be whole numbers",
        ),
        (
            of("CONCAT(post_id, 'a') AS target, user_id AS user"),
            "",
            "the row of target 1a and user 1: ids must be whole numbers",
        ),
        (of("'abc' AS target, user_id AS user"), "", "the row of target abc and user 1"),
        (of("NULLIF(post_id, 2) AS target, user_id AS user"), "", "the row of target NULL and user 1"),
        (of("-post_id AS target, user_id AS user"), "", "the row of target -1 and user 1"),
        (of(&format!("{plain}, 5 AS deleted")), deleted, "deleted = 5 for the row of target 1 and user 1"),
        (of(&format!("{plain}, 'x' AS deleted")), deleted, "deleted = x for the row of target 1 and user 1"),
        (
            format!("SELECT {plain} FROM old_like {KEYSET} ORDER BY post_id DESC LIMIT :rows"),
            "page_rows = 2",
            "the row of target 39 and user 1 after the row of target 40",
        ),
        (
            format!("SELECT {plain} FROM old_like WHERE :after_target + :after_user >= 0 {order}"),
            "page_rows = 2",
            "the row of target 1 and user 1 after the row of target 8",
        ),
        (
            format!(
                "SELECT {plain} FROM (SELECT * FROM old_like UNION ALL SELECT * FROM old_like) AS twice {KEYSET} {order}"
            ),
            "",
            "returns the row of target 1 and user 1 again",
        ),
        (
            format!("SELECT {plain} FROM old_like {KEYSET} OR :rows > 0 ORDER BY post_id, user_id"),
            "page_rows = 2",
            "returns more rows than :rows",
        ),
        (format!("SELECT {plain} FROM nowhere {KEYSET} {order}"), "", "nowhere"),
    ] {
        world.set(&block(&query, more));
        let output = world.tallyd(&["import", "--verify"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{query}: {said} {}", stdout(&output));
        assert!(said.contains("[[import]] old: ") && said.contains(why), "{query}: {said}");
    }
}
