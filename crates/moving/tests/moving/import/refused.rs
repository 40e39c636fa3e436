//! Runs `tallyd import` with invalid queries and with invalid rows. The error contains the reason, and the import
//! writes no row of the page with the invalid row.

use super::{Schema, block, here, old_likes, report, run, world};
use crate::common::{stderr, stdout};

const KEYSET: &str = "WHERE post_id > :after_target OR (post_id = :after_target AND user_id > :after_user)";
const ORDER: &str = "ORDER BY post_id, user_id LIMIT :rows";

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_imported_is_refused_by_name() {
    let mut world = world("import_refused", &Schema::HardDelete.settings("")).await;
    old_likes(&world, [(1, 1), (2, 1), (3, 1)]).await;
    let of = |columns: &str| format!("SELECT {columns} FROM old_like {KEYSET} {ORDER}");
    let plain = "post_id AS target, user_id AS user";
    for (query, more, why) in [
        (of("post_id AS target"), "", "has no column user: it returns target; add ... AS user"),
        (
            of(&format!("{plain}, 1 AS more")),
            "",
            "returns the unknown column more: allowed are target, user, deleted, at",
        ),
        (of(&format!("{plain}, deleted")), "", "if a row stays when its user unlikes"),
        (of(plain), "keeps_deleted = true", "the query has no column deleted"),
        (
            of(&format!("{plain}, 5 AS deleted")),
            "keeps_deleted = true",
            "deleted = 5 for the row of target 1 and user 1",
        ),
        (of(&format!("{plain}, 1700000000 AS at")), "", "set unit"),
        (of(&format!("{plain}, NULLIF(changed_at, changed_at) AS at")), "", "at = NULL for the row of target 1"),
        (of(&format!("{plain}, NOW() + INTERVAL 8 HOUR AS at")), "", "in the future: times are read as UTC"),
        (of("-post_id AS target, user_id AS user"), "", "the row of target -1 and user 1: ids must be whole numbers"),
        (
            of("CONCAT('9223372036854775808') AS target, user_id AS user"),
            "",
            "the row of target 9223372036854775808 and",
        ),
        (of("UUID() AS target, user_id AS user"), "", "in decimal; other ids can't be imported"),
        (
            format!("SELECT {plain} FROM old_like {KEYSET} ORDER BY post_id DESC LIMIT :rows"),
            "",
            "the row of target 2 and user 1 after the row of target 3",
        ),
        (
            format!("SELECT {plain} FROM old_like WHERE :after_target + :after_user < 9 {ORDER}"),
            "page_rows = 2",
            "the row of target 1 and user 1 after the row of target 2",
        ),
        (
            format!("SELECT {plain} FROM old_like {KEYSET} OR :rows > 0 ORDER BY post_id, user_id"),
            "page_rows = 2",
            "more rows than :rows = 2",
        ),
        (format!("SELECT {plain} FROM nowhere {KEYSET} {ORDER}"), "", "nowhere"),
    ] {
        world.set(&block(&query, more));
        let output = world.tallyd(&["import"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{query}: {said}");
        assert!(said.contains("[[import]] old: ") && said.contains(why), "{query}: {said}");
    }
    // The daemon does not read move.toml, so its problems do not stop a start or an upgrade.
    let checked = world.tallyd(&["config", "check"]);
    assert!(checked.status.success() && stdout(&checked).contains("warning  mysql-imports"), "{}", stdout(&checked));
    // The import has written at most the two pages before the invalid row.
    assert!(here(&world).await.len() <= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_without_the_right_to_read_is_told_which_right() {
    let mut world = world("import_rights", &Schema::HardDelete.settings("")).await;
    let account = world.accounts.as_ref().unwrap().of_daemon_in_mysql();
    let other = format!("{}_site", world.name);
    run(&world, &format!("CREATE DATABASE {other}; CREATE TABLE {other}.old_like LIKE old_like; INSERT INTO {other}.old_like (post_id, user_id) VALUES (1, 2)")).await;
    let query = Schema::HardDelete.query().replace("FROM old_like", &format!("FROM {other}.old_like"));
    world.set(&block(&query, ""));
    let output = world.tallyd(&["import"]);
    assert!(
        stderr(&output).contains("the account of [mysql] url is not allowed to run the query"),
        "{}",
        stderr(&output)
    );
    // docs/moving-reference.md describes this permission.
    run(&world, &format!("GRANT SELECT ON {other}.old_like TO {account}")).await;
    assert_eq!(report(&world, 0, &[])["added"], 1);
    run(&world, &format!("DROP DATABASE {other}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_options_that_do_not_fit_are_refused() {
    let mut world = world("import_usage", &Schema::SoftDelete.settings("")).await;
    for (arguments, code, why) in [
        (["import", "new"].as_slice(), 64, "no [[import]] is named new: the configured names are old"),
        (&["import", "--verify", "--dry-run"], 64, "cannot be used with"),
        (&["import", "--resume"], 1, "there is nothing to resume"),
        (&["import", "--deletions", "--yes"], 1, "the table keeps its deleted rows"),
    ] {
        let output = world.tallyd(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    world.set("");
    assert!(stderr(&world.tallyd(&["import"])).contains("move.toml beside the configuration has no [[import]]"));
}
