//! The import copies all likes from each type of table.

use super::{Schema, TABLE, assert_brought_over, block, counters_equal_rows, here, old_likes, report, run, world};
use crate::common::stderr;

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_each_schema_is_brought_over_whole() {
    for (place, schema) in Schema::ALL.into_iter().enumerate() {
        let world = world(&format!("import_schema{place}"), &schema.settings("page_rows = 70")).await;
        old_likes(&world, (1..=300).map(|n| (n % 40 + 1, n))).await;
        if schema == Schema::SoftDelete {
            run(&world, "UPDATE old_like SET deleted = 1 WHERE user_id % 5 = 0").await;
        }
        let first = report(&world, 0, &[]);
        assert_eq!((&first["rows"], &first["added"], &first["kept"]), (&300.into(), &300.into(), &0.into()), "{first}");
        assert_eq!(first["warnings"].as_array().unwrap().len(), 0, "{first}");
        assert_brought_over(&world).await;
        // The second import finds no row that is newer than the imported row.
        let again = report(&world, 0, &["old"]);
        assert_eq!(
            (&again["added"], &again["changed"], &again["kept"]),
            (&0.into(), &0.into(), &300.into()),
            "{again}"
        );
        assert_brought_over(&world).await;
        assert_eq!(world.count("SELECT COUNT(*) FROM outbox").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changed_in_a_table_with_times_follows_in_the_next_run() {
    let mut world = world("import_again", &Schema::SoftDelete.settings("page_rows = 10")).await;
    old_likes(&world, (1..=50).map(|n| (7, n))).await;
    report(&world, 0, &[]);
    run(&world, "UPDATE old_like SET deleted = 1, changed_at = '2024-06-07 08:09:10' WHERE user_id <= 20").await;
    let again = report(&world, 0, &[]);
    assert_eq!((&again["changed"], &again["counted"]), (&20.into(), &(-20).into()), "{again}");
    assert_brought_over(&world).await;
    // Without times, the newer reading of a row wins, but no row wins over an event, even one from 1970.
    let query = Schema::Timeless.query().replace(" AS user", " AS user, deleted");
    world.set(&block(&query, "keeps_deleted = true"));
    run(&world, "DELETE FROM like_record; DELETE FROM counter; DELETE FROM job_run").await;
    run(
        &world,
        "INSERT INTO like_record VALUES (1, 7, 1, 0, '1970-01-02 00:00:01'), (1, 7, 50, 1, '1970-01-02 00:00:01')",
    )
    .await;
    run(&world, "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 7, 1, 0, 1, NOW(6))")
        .await;
    report(&world, 0, &[]);
    run(&world, "UPDATE old_like SET deleted = 1 - deleted").await;
    report(&world, 0, &[]);
    assert_eq!(here(&world).await, (1..=20).map(|user| (7, user)).collect());
    counters_equal_rows(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_empty_page_is_the_end_of_the_table() {
    let query = Schema::Timeless
        .query()
        .replace("post_id > :after_target OR", "(post_id > :after_target AND post_id < :after_target + 3) OR");
    let world = world("import_short", &block(&query, "page_rows = 40")).await;
    // Each page has two targets with 15 rows each, which is less than page_rows.
    old_likes(&world, (0..90).map(|n| (n % 6 + 1, n + 1))).await;
    assert_eq!(report(&world, 0, &[])["added"], 90);
    assert_brought_over(&world).await;
    run(&world, "DELETE FROM like_record WHERE target_id = 6 AND user_id = 6").await;
    assert_eq!(report(&world, 2, &["--verify"])["differing"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_says_what_it_found_and_writes_nothing() {
    let mut world = world("import_dry", &Schema::HardDelete.settings("page_rows = 20")).await;
    old_likes(&world, (1..=50).map(|n| (n, n))).await;
    let output = world.tallyd(&["import", "--dry-run"]);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(text.contains("old: 50 rows read") && text.contains("nothing was changed"), "{text}");
    assert!(text.contains("times from 2024-05-06T07:08:09Z") && text.contains("plan: table old_like"), "{text}");
    let (from, to) = (
        "post_id > :after_target OR (post_id = :after_target AND user_id > :after_user)",
        "(post_id, user_id) > (:after_target, :after_user)",
    );
    world.set(&block(&Schema::HardDelete.query().replace(from, to), "page_rows = 20"));
    let pairs = report(&world, 0, &["--dry-run"]);
    assert!(pairs["warnings"][0].as_str().unwrap().contains("from its beginning for each page"), "{pairs}");
    world.set(&Schema::HardDelete.settings("page_rows = 20"));
    // Without an index, MySQL reads the whole table for each page.
    run(&world, &format!("DROP TABLE old_like; {}", TABLE.replace(", PRIMARY KEY (post_id, user_id)", ""))).await;
    old_likes(&world, [(1, 2), (3, 4), (1, 2), (2, 9)]).await;
    let twice = report(&world, 0, &["--dry-run"]);
    assert_eq!((&twice["rows"], &twice["repeated"], &twice["likes"]), (&4.into(), &1.into(), &3.into()), "{twice}");
    let warned = twice["warnings"].to_string();
    assert!(warned.contains("without an index") && warned.contains("again: return each row once"), "{twice}");
    assert!(here(&world).await.is_empty());
    assert_eq!(world.count("SELECT COUNT(*) FROM counter").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_another_server_with_text_ids_is_read() {
    let query = "SELECT CAST(post AS UNSIGNED) AS target, who AS user, changed AS at FROM old_text \
                 WHERE CAST(post AS UNSIGNED) > :after_target OR (CAST(post AS UNSIGNED) = :after_target AND who > :after_user) \
                 ORDER BY CAST(post AS UNSIGNED), who LIMIT :rows";
    let url = crate::common::stack("MYSQL_URL");
    let source =
        |name: &str| format!("unit = \"ms\"\npage_rows = 3\nserver = \"texts\"\n[server.texts]\nurl = \"{url}{name}\"");
    let mut world = world("import_text", &block(query, "unit = \"ms\"")).await;
    let settings = block(query, &source(&world.name));
    world.set(&settings);
    run(&world, "CREATE TABLE old_text (post VARCHAR(30) NOT NULL, who BIGINT NOT NULL, changed BIGINT NOT NULL)")
        .await;
    run(&world, "INSERT INTO old_text VALUES ('9', 1, 1700000000123), ('10', 1, 1700000000123), ('9223372036854775807', 2, 1700000000123), ('10', 2, 1700000000123)").await;
    report(&world, 0, &[]);
    let expected = [(9, 1), (10, 1), (10, 2), (i64::MAX as u64, 2)];
    assert_eq!(here(&world).await.into_iter().collect::<Vec<_>>(), expected);
    let checked = world.tallyd(&["config", "check"]);
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(text.contains("mysql-imports") && text.contains("reads the table old_text without an index"), "{text}");
}
