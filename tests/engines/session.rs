//! Settings of a server that a session of ours must not take over.

use super::common::World;
use super::servers::{Server, Template, are_here, run};
use super::{Model, stream_of_likes, take};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_outside_of_a_transaction_stays_without_autocommit() {
    if !are_here() {
        return;
    }
    let server = Server::start(&Template::new(), &[]);
    let admin = server.pool().await;
    let world = World::on(server.admin_url(), "autocommit", "").await;
    let publisher = world.publisher().await;
    let (mut likes, mut model) = (stream_of_likes(35), Model::default());
    // The test's own sessions are older.
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run").await, 0);
    run(&admin, "SET GLOBAL autocommit = 0").await;
    let daemon = world.daemon();
    world.publish(&publisher, &take(&mut likes, 300, &mut model)).await;
    world.drained(&publisher).await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    assert!(daemon.stop().success());
    assert_eq!(world.count("SELECT COUNT(*) FROM partition_owner WHERE owner IS NULL").await, 1, "it was released");
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome = 'done'").await, 1);
    world.assert_equals(&model).await;
    world.close().await;
}
