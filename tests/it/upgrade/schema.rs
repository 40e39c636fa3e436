//! Runs `tallyd migrate` while daemons run, while other sessions lock tables, and with SIGKILL in between. Also runs
//! daemons while the steps of a future version change the schema.

use std::process::{Child, Stdio};

use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use tokio::task::JoinHandle;

use crate::common::site::{Site, all_held, has_all};
use crate::common::{World, eventually, signal, stderr, stdout};

/// Settings with two partitions, and with a short heartbeat, so that a daemon takes over within seconds.
const TWO: &str = "[amqp]\npartitions = 2\nheartbeat_s = 2";

/// The lease of `tallyd migrate`, in seconds.
const LEASE_S: i64 = 20;

/// A query that counts the sessions that wait for a table.
const WAITS: &str = "SELECT COUNT(*) FROM information_schema.processlist \
                     WHERE db = DATABASE() AND state LIKE 'Waiting for table metadata lock%'";

async fn execute(world: &World, sql: &'static str) {
    sqlx::raw_sql(sql).execute(&world.pool).await.unwrap();
}

/// Deletes the rows in MySQL that record this migration step and all later steps, as if these steps had not run.
async fn forget_from(world: &World, step: i64) {
    sqlx::query("DELETE FROM _sqlx_migrations WHERE version >= ?").bind(step).execute(&world.pool).await.unwrap();
}

/// A session that creates the table `outbox` and takes long, so that a step must wait for the table.
struct Rival {
    id: u64,
    statement: JoinHandle<()>,
}

impl Rival {
    async fn new(world: &World) -> Self {
        execute(world, "DROP TABLE outbox").await;
        let mut session = MySqlConnection::connect(world.config.mysql.url.expose()).await.unwrap();
        let id = sqlx::query_scalar("SELECT CONNECTION_ID()").fetch_one(&mut session).await.unwrap();
        let statement = tokio::spawn(async move {
            let ended = sqlx::raw_sql("CREATE TABLE outbox SELECT SLEEP(600) AS x").execute(&mut session).await;
            assert!(ended.is_err(), "the test must end the statement");
        });
        let sleeps =
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User sleep'";
        eventually("the table is locked", || async { world.count(sleeps).await > 0 }).await;
        Self { id, statement }
    }

    async fn end(self, world: &World) {
        sqlx::raw_sql(AssertSqlSafe(format!("KILL {}", self.id))).execute(&world.pool).await.unwrap();
        self.statement.await.unwrap();
    }
}

/// Starts `tallyd migrate`, whose second step must wait because another session locks the table `outbox`.
async fn migrate_that_waits(world: &World) -> Child {
    let account = world.accounts.as_ref().unwrap().of_migration(world.config.mysql.url.expose());
    let mut migrate = world.command();
    migrate.arg("migrate").env("TALLYD__MYSQL__URL", account);
    let migrate = migrate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("a step waits for the table", || async { world.count(WAITS).await > 0 }).await;
    migrate
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_was_killed_half_way_is_refused_by_daemons_and_made_again() {
    let world = World::new("upgrade_killed", "").await;
    forget_from(&world, 2).await;
    let rival = Rival::new(&world).await;
    let mut migrate = migrate_that_waits(&world).await;
    migrate.kill().unwrap();
    migrate.wait().unwrap();
    rival.end(&world).await;
    let half = "SELECT COUNT(*) FROM _sqlx_migrations WHERE version = 2 AND NOT success";
    assert_eq!(world.count(half).await, 1, "the kill must interrupt the migration in step 2");

    for arguments in [&[][..], &["config", "check"], &["reconcile"]] {
        let output = world.tallyd(arguments);
        assert_eq!(output.status.code(), Some(78), "{arguments:?}: {}", stderr(&output));
        let said = stderr(&output) + &stdout(&output);
        assert!(said.contains("lacks 5 steps: run `tallyd migrate`"), "{arguments:?}: {said}");
    }

    let output = world.tallyd(&["migrate"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "the schema is up to date after 5 steps\n");
    assert_eq!(world.tallyd(&["config", "check"]).status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_gives_way_to_those_who_wait_for_its_table_and_is_tried_again() {
    let world = World::new("upgrade_busy", "").await;
    forget_from(&world, 2).await;
    let rival = Rival::new(&world).await;
    let migrate = migrate_that_waits(&world).await;
    eventually("the step stops waiting for the table", || async { world.count(WAITS).await == 0 }).await;
    eventually("the step waits again", || async { world.count(WAITS).await > 0 }).await;
    rival.end(&world).await;
    let output = migrate.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "the schema is up to date after 5 steps\n");
    assert!(stderr(&output).contains("another session has locked a table"), "{}", stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migrate_renews_its_lease_while_a_step_waits_for_a_table() {
    let world = World::new("upgrade_lease", "").await;
    forget_from(&world, 2).await;
    let rival = Rival::new(&world).await;
    let first = migrate_that_waits(&world).await;
    let seconds_left = "SELECT TIMESTAMPDIFF(SECOND, NOW(6), lease_until) FROM migrate_lock";
    assert!((1..=LEASE_S).contains(&world.count(seconds_left).await));

    // The second migrate waits for longer than a lease that is not renewed.
    let second = world.tallyd(&["migrate"]);
    assert_eq!(second.status.code(), Some(75), "{}", stderr(&second));
    assert!(stderr(&second).contains("another `tallyd migrate` has held the lock for 30 s"), "{}", stderr(&second));

    rival.end(&world).await;
    let output = first.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "the schema is up to date after 5 steps\n");
    assert!(world.count(seconds_left).await <= 0, "the lock must be free");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migrate_takes_over_from_one_that_is_frozen_in_a_step() {
    let world = World::new("upgrade_frozen", "").await;
    forget_from(&world, 2).await;
    let rival = Rival::new(&world).await;
    let first = migrate_that_waits(&world).await;
    signal(&first, "STOP");
    eventually("the lease has ended", || async {
        world.count("SELECT COUNT(*) FROM migrate_lock WHERE lease_until < NOW(6)").await > 0
    })
    .await;
    let second = migrate_that_waits(&world).await;
    signal(&first, "CONT");
    let output = first.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", stderr(&output));
    rival.end(&world).await;
    let output = second.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(world.tallyd(&["config", "check"]).status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_step_runs_again_beside_daemons_that_write_and_changes_nothing() {
    let world = World::new("upgrade_again", TWO).await;
    world.publisher().await;
    // This reconcile loads Redis, so that later reconciles have nothing to load.
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    let daemons = [world.daemon(), world.daemon()];
    let site = Site::open(&world);
    all_held(&world).await;
    for _ in 0..3 {
        site.clicked(300).await;
        forget_from(&world, 1).await;
        let output = world.tallyd(&["migrate"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(stdout(&output), "the schema is up to date after 6 steps\n");
    }
    site.clicked(300).await;
    site.end(&world).await;
    for daemon in daemons {
        assert!(!daemon.log().contains("\"ERROR\""), "{}", daemon.log());
        assert_eq!(daemon.stop().code(), Some(0));
    }
}

/// The steps of the next version run while daemons of this version write. These steps add a column to each table that
/// daemons write often, and add a new table.
#[tokio::test(flavor = "multi_thread")]
async fn daemons_of_this_version_go_on_and_start_again_under_the_schema_of_the_next() {
    let world = World::new("upgrade_next", TWO).await;
    world.publisher().await;
    // This reconcile loads Redis, so that later reconciles have nothing to load.
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    let first = world.daemon();
    let site = Site::open(&world);
    has_all(&world, &first).await;
    site.clicked(300).await;

    for table in ["like_record", "counter", "partition_owner", "job_run", "job_lock", "outbox", "repair"] {
        let sql = format!("ALTER TABLE {table} ADD COLUMN of_the_next BIGINT NOT NULL DEFAULT 0, ALGORITHM = INSTANT");
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    execute(&world, "CREATE TABLE of_the_next (id BIGINT PRIMARY KEY)").await;
    let history = "INSERT INTO _sqlx_migrations \
                   SELECT 7, 'next', NOW(), TRUE, checksum, 1 FROM _sqlx_migrations WHERE version = 6";
    execute(&world, history).await;
    site.clicked(300).await;

    // A second daemon starts with the newer schema, and then the first daemon stops.
    let second = world.daemon();
    second.logged("a newer tallyd has applied 1 more schema steps").await;
    site.clicked(300).await;
    assert_eq!(first.stop().code(), Some(0));
    has_all(&world, &second).await;
    site.clicked(300).await;
    site.end(&world).await;
    assert_eq!(stdout(&world.tallyd(&["migrate"])), "the schema is up to date\n");
    let check = stdout(&world.tallyd(&["config", "check"]));
    assert!(check.contains("a newer tallyd applied 1 more schema steps, and this version supports them"), "{check}");

    // This row requires a newer version, so a daemon of this version can't start.
    execute(&world, "UPDATE schema_floor SET step = 7").await;
    let refused = world.tallyd(&[]);
    assert_eq!(refused.status.code(), Some(78), "{}", stderr(&refused));
    assert!(
        stderr(&refused).contains("this version does not work with it: run the newer version"),
        "{}",
        stderr(&refused)
    );
    assert_eq!(second.stop().code(), Some(0));
}
