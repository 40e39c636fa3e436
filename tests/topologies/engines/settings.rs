//! Servers with settings that operators and hosters really use. tallyd works with them, or says what to change.

use std::process::Output;

use sqlx::mysql::{MySqlPool, MySqlPoolOptions};

use super::common::{World, stderr, stdout};
use super::servers::{Server, Template, are_here, run};

/// Starts a server with one more argument, and a world on this server.
async fn world_with(argument: &str, name: &str) -> Option<(Server, MySqlPool, World)> {
    if !are_here() {
        return None;
    }
    let server = Server::start(&Template::new(), &["--log-bin=b".to_owned(), argument.to_owned()]);
    let admin = server.pool().await;
    let world = World::on(server.admin_url(), name, "").await;
    Some((server, admin, world))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_table_has_long_keys_where_compact_rows_are_the_default() {
    let Some((_server, _, world)) = world_with("--innodb-default-row-format=compact", "compact").await else { return };
    let compact = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() \
                   AND row_format <> 'Dynamic' AND table_name <> '_sqlx_migrations'";
    assert_eq!(world.count(compact).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_takes_its_time_where_the_server_limits_statements() {
    const LIKES: i64 = 1_000_000;
    let Some((_server, admin, mut world)) = world_with("--innodb-buffer-pool-size=256M", "slow").await else { return };
    let fill = format!(
        "USE {}; INSERT INTO like_record SELECT 1, 42, seq, 0, '2026-01-01' FROM seq_1_to_{LIKES}; \
                        INSERT INTO counter (kind, target_id, metric, slot, value, update_at) \
                        VALUES (1, 42, 1, 0, {LIKES}, '2026-01-01')",
        world.name
    );
    run(&admin, &fill).await;
    world.publisher().await;
    // The test opens its own session first, so that the limit does not apply to it.
    world.pool = MySqlPoolOptions::new().max_connections(1).connect(world.config.mysql.url.expose()).await.unwrap();
    run(&admin, "SET GLOBAL max_statement_time = 0.05").await;
    let daemon = world.daemon();
    let output = world.tallyd(&["reconcile", "--full"]);
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(daemon.stop().success());
    run(&admin, "SET GLOBAL max_statement_time = 0").await;
}

/// Asserts that the program ended because an operator must correct something, and said so.
fn assert_refused(output: &Output, sentence: &str) {
    let said = stdout(output) + &stderr(output);
    assert!(said.contains(sentence), "{said}");
    assert_eq!(output.status.code(), Some(78), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_binary_log_of_statements_is_refused_before_any_write() {
    const SENTENCE: &str = "binlog_format is STATEMENT, so MySQL refuses every write of tallyd";
    let Some((_server, admin, world)) = world_with("--sync-binlog=1", "statement").await else { return };
    assert!(world.tallyd(&["config", "check"]).status.success());
    run(&admin, "SET GLOBAL binlog_format = 'STATEMENT'").await;
    for arguments in [&["config", "check"][..], &["run"]] {
        assert_refused(&world.tallyd(arguments), SENTENCE);
    }
    assert_refused(&world.tallyd(&["reconcile"]), "BINLOG_FORMAT = STATEMENT");
    run(&admin, &format!("DROP TABLE {}._sqlx_migrations", world.name)).await;
    assert_refused(&world.tallyd(&["migrate"]), SENTENCE);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_with_an_unknown_plugin_is_refused_by_its_name() {
    const SENTENCE: &str =
        "plugin client_ed25519, which tallyd does not know: use mysql_native_password or caching_sha2_password";
    let Some((server, admin, world)) = world_with("--plugin-load-add=auth_ed25519", "plugin").await else { return };
    run(&admin, "CREATE USER new IDENTIFIED VIA ed25519 USING PASSWORD('x'); GRANT ALL ON *.* TO new").await;
    let url = format!("mysql://new:x@{}/{}", server.address(), world.name);
    world.write(&format!("[mysql]\nurl = \"{url}\""));
    for arguments in [&["config", "check"][..], &["run"], &["reconcile"], &["migrate"]] {
        assert_refused(&world.tallyd(arguments), SENTENCE);
    }
}
