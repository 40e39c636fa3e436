//! Some settings of a MySQL server must not apply to tallyd's sessions.

use sqlx::mysql::{MySqlPool, MySqlPoolOptions};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

use super::common::{World, body, eventually, target};
use super::servers::{ACCOUNT, Server, Template, are_here, run};
use super::{Model, stream_of_likes, take};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_outside_of_a_transaction_stays_without_autocommit() {
    if !are_here() {
        return;
    }
    let server = Server::start(&Template::new(), &[]);
    let admin = server.pool().await;
    let mut world = World::on(server.admin_url(), "autocommit", "").await;
    let publisher = world.publisher().await;
    let (mut likes, mut model) = (stream_of_likes(35), Model::default());
    // The test opens its own session first, so that the new setting does not apply to it.
    let one = MySqlPoolOptions::new().max_connections(1);
    world.pool = one.connect(world.config.mysql.url.expose()).await.unwrap();
    run(&admin, "SET GLOBAL autocommit = 0").await;
    let daemon = world.daemon();
    world.publish(&publisher, &take(&mut likes, 300, &mut model)).await;
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    assert!(daemon.stop().success());
    assert_eq!(
        world.count("SELECT COUNT(*) FROM partition_owner WHERE owner IS NULL").await,
        1,
        "the partition must be released"
    );
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome = 'done'").await, 1);
}

/// Runs `statement` in all later sessions, to change their clock as if the server's clock had changed.
async fn step_clocks(admin: &MySqlPool, statement: &str) {
    run(admin, &format!("SET GLOBAL init_connect = '{statement}'")).await;
    run(admin, &format!("KILL CONNECTION USER {ACCOUNT}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_stepped_in_mid_session_makes_no_dead_letter() {
    if !are_here() {
        return;
    }
    let server = Server::start(&Template::new(), &[]);
    let admin = server.pool().await;
    run(&admin, &format!("CREATE USER {ACCOUNT}; GRANT ALL ON `t\\_%`.* TO {ACCOUNT}")).await;
    let url = format!("mysql://{ACCOUNT}@{}/{{world}}", server.address());
    let world = World::on(server.admin_url(), "stepped", &format!("[mysql]\nurl = \"{url}\"")).await;
    let publisher = world.publisher().await;
    let pool = MySqlPool::connect(&format!("{}{}", server.admin_url(), world.name)).await.unwrap();
    let count = async |sql: &'static str| sqlx::query_scalar::<_, i64>(sql).fetch_one(&pool).await.unwrap();
    let like = |user, ahead_s: i64| {
        let at = Micros(tallyd_base::runtime::clock::now().0 + ahead_s * 1_000_000);
        body(&LikeEvent { target: target(1), user: UserId(user), at, liked: true })
    };
    let daemon = world.daemon();
    world.publish(&publisher, &[like(1, 0)]).await;
    let likes = "SELECT COUNT(*) FROM like_record";
    eventually("the partition is written", || async { count(likes).await == 1 }).await;
    // By MySQL's changed clock, the third like is not in the future.
    step_clocks(&admin, "SET timestamp = UNIX_TIMESTAMP() + 600").await;
    world.publish(&publisher, &[like(2, 0), like(3, 590)]).await;
    daemon.logged("s: correct the wrong clock").await;
    assert_eq!((count(likes).await, count("SELECT COUNT(*) FROM dead_letter").await), (1, 0));
    // The clock is right again, and the daemon writes the second like. The daemon does not write the third like. By the
    // right clock, the time of the third like is too far in the future.
    step_clocks(&admin, "").await;
    daemon.logged("outage-over").await;
    eventually("the current like is written", || async { count(likes).await == 2 }).await;
    assert!(daemon.stop().success());
    pool.close().await;
}
