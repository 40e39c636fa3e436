//! If a recount's query is invalid, the error contains the reason, and no counter is changed.

use sqlx::AssertSqlSafe;

use super::{QUERY, added, comment, count, run, settings, world};
use crate::common::{World, stderr, stdout};

/// Returns invalid queries, each with the other settings of its `[[recount]]` block and with the expected error.
fn wrong() -> Vec<(String, &'static str, &'static str)> {
    let order = "GROUP BY video_id ORDER BY video_id LIMIT :limit";
    vec![
        (format!("SELECT video_id FROM comment WHERE video_id > :after {order}"), "", "returns 1 columns: it must return two"),
        (
            format!("SELECT video_id, 1, 2 FROM comment WHERE video_id > :after {order}"),
            "",
            "returns 3 columns: it must return two",
        ),
        (
            format!("SELECT CAST(video_id AS CHAR), 1 FROM comment WHERE video_id > :after {order}"),
            "",
            "it must be the target's id, an integer",
        ),
        (
            format!("SELECT video_id, AVG(1) + 0.5e0 AS stars FROM comment WHERE video_id > :after {order}"),
            "",
            "second column, stars, is DOUBLE: it must be the number",
        ),
        (
            format!("SELECT video_id, AVG(id) FROM comment WHERE video_id > :after {order}"),
            "",
            "for target 2: it must be an integer",
        ),
        (
            format!("SELECT video_id, IF(video_id = 2, NULL, 1) FROM comment WHERE video_id > :after {order}"),
            "",
            "returns NULL for target 2: use COALESCE",
        ),
        (
            "SELECT IF(video_id = 3, NULL, video_id) AS v, 1 FROM comment WHERE video_id > :after ORDER BY id LIMIT :limit".to_owned(),
            "",
            "returns target 2 after 2: return each target once",
        ),
        (
            "SELECT NULLIF(1, 1), 1 FROM comment WHERE video_id > :after LIMIT :limit".to_owned(),
            "",
            "a target with the id NULL",
        ),
        (
            "SELECT video_id, 1 FROM comment WHERE video_id > :after GROUP BY video_id ORDER BY video_id DESC LIMIT :limit".to_owned(),
            "",
            "returns target 2 after 3: return each target once, in the order of the ids",
        ),
        (
            format!("SELECT video_id, :after FROM comment WHERE video_id > 0 {order}"),
            "page_targets = 2",
            "returns target 1, but ids must be above 2",
        ),
        (
            "SELECT video_id, :limit FROM comment WHERE video_id > :after GROUP BY video_id ORDER BY video_id".to_owned(),
            "page_targets = 2",
            "returns more rows than :limit = 2",
        ),
        (
            format!("SELECT video_id - 2, 1 FROM comment WHERE video_id > :after {order}"),
            "",
            "returns the target -1: ids must be 1 to",
        ),
        (format!("SELECT video_id, 1 FROM comments WHERE video_id > :after {order}"), "", "comments' doesn't exist"),
        (format!("SELECT video, 1 FROM comment WHERE video_id > :after {order}"), "", "Unknown column 'video'"),
        (format!("SELECT video_id, 1 FORM comment WHERE video_id > :after {order}"), "", "error in your SQL syntax"),
        (
            format!("SELECT video_id, SLEEP(5) FROM comment WHERE video_id > :after {order}"),
            "query_max = \"1s\"",
            "took longer than query_max = 1 s",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_query_is_said_and_nothing_is_changed() {
    let mut world = world("recount_wrong", &settings(QUERY, "")).await;
    comment(&world, &[(1, 1), (2, 2), (3, 3)]).await;
    count(&world, &[(1, 0, 9)]).await;
    for (query, more, said) in wrong() {
        world.set(&settings(&query, more));
        let refused = world.tallyd(&["admin", "recount"]);
        let text = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{query}: {text}");
        assert!(text.contains("[[recount]] of video comment: ") && text.contains(said), "{query}: {text}");
        assert_eq!(added(&world).await.len(), 0, "{query}");
    }
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE job = 'recount' AND outcome = 'refused'").await, 16);
    assert_eq!(world.count("SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE '%SLEEP(5)%' AND id <> CONNECTION_ID()").await, 0, "the server has ended it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_may_not_read_its_table_is_told_what_right_it_lacks() {
    let mut world = world("recount_right", &settings(QUERY, "")).await;
    let user = format!("recount_{}", std::process::id());
    let name = world.name.clone();
    for sql in [
        format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'narrow'"),
        format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO '{user}'@'%'"),
        format!("CREATE DATABASE {name}_shop"),
        format!("CREATE TABLE {name}_shop.comment (video_id BIGINT NOT NULL, deleted BOOLEAN NOT NULL)"),
    ] {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    world.set(&settings(&QUERY.replace("FROM comment", &format!("FROM {name}_shop.comment")), ""));
    let mut url = url::Url::parse(world.config.mysql.url.expose()).unwrap();
    url.set_username(&user).unwrap();
    url.set_password(Some("narrow")).unwrap();
    let tallyd =
        |arguments: &[&str]| world.command().args(arguments).env("TALLYD__MYSQL__URL", url.as_str()).output().unwrap();
    let refused = tallyd(&["admin", "recount"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = "the account of [mysql] url is not allowed to run the query";
    assert!(stderr(&refused).contains(said), "{}", stderr(&refused));
    let checked = tallyd(&["config", "check"]);
    assert_eq!(checked.status.code(), Some(78));
    assert!(stderr(&checked).contains(said), "{}", stderr(&checked));
    run(&world, &format!("GRANT SELECT ON {name}_shop.comment TO '{user}'@'%'")).await;
    assert!(tallyd(&["admin", "recount"]).status.success());
    run(&world, &format!("DROP USER '{user}'@'%'; DROP DATABASE {name}_shop")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_config_asks_mysql_how_it_would_run_the_query() {
    let mut world: World = world("recount_check", &settings(QUERY, "cron = \"0 0 5 * * *\"")).await;
    comment(&world, &[(1, 1), (2, 2)]).await;
    let checked = world.tallyd(&["config", "check"]);
    assert!(checked.status.success(), "{}", stderr(&checked));
    let text = stdout(&checked);
    assert!(text.contains("recount   video:comment 20"), "when it runs next\n{text}");
    assert!(text.contains("video:comment: table comment, access "), "{text}");
    world.set(&settings("SELECT video_id FROM comment WHERE video_id > :after LIMIT :limit", ""));
    let checked = world.tallyd(&["config", "check"]);
    assert_eq!(checked.status.code(), Some(78));
    assert!(
        stderr(&checked).contains("[[recount]] of video comment: the query returns 1 columns"),
        "{}",
        stderr(&checked)
    );
    let offline = world.tallyd(&["config", "check", "--offline"]);
    assert!(
        offline.status.success()
            && stdout(&offline).contains("recount   video:comment only with `tallyd admin recount`")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_to_be_recounted_is_reported() {
    let mut world = world("recount_names", &settings(QUERY, "")).await;
    let unknown = world.tallyd(&["admin", "recount", "video:view"]);
    assert_eq!(unknown.status.code(), Some(64));
    assert!(
        stderr(&unknown).contains("no [[recount]] is named video:view: the configured names are video:comment"),
        "{}",
        stderr(&unknown)
    );
    world.set("");
    let nothing = world.tallyd(&["admin", "recount"]);
    assert_eq!(nothing.status.code(), Some(64));
    assert!(stderr(&nothing).contains("the configuration has no [[recount]]"), "{}", stderr(&nothing));
}
