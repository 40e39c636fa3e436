//! Servers with settings that operators and hosters really use. tallyd works with them, or says what to change.

use sqlx::mysql::MySqlPool;

use super::common::World;
use super::servers::{Server, Template, are_here};

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
    world.close().await;
}
