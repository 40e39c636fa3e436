//! A run waits for the replicas of MySQL. The test starts its own primary and its own replica.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use std::time::Duration;

use sqlx::mysql::MySqlPool;
use sqlx::{AssertSqlSafe, Row};
use tallyd::jobs::reconcile::{Mode, Reconciler};
use tallyd_base::jobs::run::{RunOptions, RunReport as _};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::progress::ProgressSink;
use tallyd_base::servers::Servers;
use tokio_util::sync::CancellationToken;

use super::common::ports::free_port;
use super::common::{World, drift, eventually, stack, stderr, stdout, target};

/// The program names, options and statements that differ between MySQL and MariaDB.
#[derive(Clone, Copy)]
struct Dialect {
    program: &'static str,
    /// The options with which two servers can run on one machine.
    options: &'static [&'static str],
    install: &'static [&'static str],
    log_status: &'static str,
    replica: &'static str,
}

const MARIADB: Dialect = Dialect {
    program: "mariadbd",
    options: &[],
    install: &["mariadb-install-db", "--auth-root-authentication-method=normal", "--skip-test-db"],
    log_status: "SHOW MASTER STATUS",
    replica: "SLAVE",
};

const MYSQL: Dialect = Dialect {
    program: "mysqld",
    options: &["--mysqlx=OFF", "--secure-file-priv=NULL"],
    install: &["mysqld", "--initialize-insecure"],
    log_status: "SHOW BINARY LOG STATUS",
    replica: "REPLICA",
};

impl Dialect {
    /// Returns the dialect of the server that all tests share.
    async fn of_the_stack() -> Self {
        let pool = MySqlPool::connect(&stack("MYSQL_URL")).await.unwrap();
        let version: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(&pool).await.unwrap();
        if version.contains("MariaDB") { MARIADB } else { MYSQL }
    }

    fn follow(self, port: u16, file: &str, position: u64) -> String {
        let (command, word) = match self.replica {
            "SLAVE" => ("CHANGE MASTER TO", "MASTER"),
            _ => ("CHANGE REPLICATION SOURCE TO", "SOURCE"),
        };
        format!(
            "{command} {word}_HOST='127.0.0.1', {word}_PORT={port}, {word}_USER='r', {word}_LOG_FILE='{file}', \
             {word}_LOG_POS={position}; START {}",
            self.replica
        )
    }
}

/// A server that stops when it is dropped.
struct Server {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Server {
    fn start(dialect: Dialect, id: u8) -> Self {
        // The name of the data folder must not begin with a dot. Otherwise MySQL would ignore all files in the folder.
        let folder = tempfile::Builder::new().prefix("tallyd").tempdir().unwrap();
        let port = free_port();
        let install = program(dialect.install[0], folder.path()).args(&dialect.install[1..]).output().unwrap();
        assert!(install.status.success(), "{}", stderr(&install));
        let child = program(dialect.program, folder.path())
            .args(dialect.options)
            .arg(format!("--port={port}"))
            .arg(format!("--server-id={id}"))
            .args(["--bind-address=127.0.0.1", "--socket=s", "--log-bin=b", "--innodb-buffer-pool-size=32M"])
            .spawn()
            .unwrap();
        Self { child, port, folder }
    }

    fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}/", self.port)
    }

    async fn pool(&self) -> MySqlPool {
        let url = format!("{}mysql", self.url());
        eventually("the server answers", || async { MySqlPool::connect(&url).await.is_ok() }).await;
        MySqlPool::connect(&url).await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program(name: &str, folder: &Path) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(name);
    command
        .env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin"))
        // When a server starts, it deletes all temporary tables in TMPDIR, even those of another server. So each server
        // gets its own folder for temporary files.
        .env("TMPDIR", folder)
        .args(["--no-defaults", "--user=root"])
        .arg(format!("--datadir={}", folder.display()))
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

async fn run(pool: &MySqlPool, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_for_a_replica_that_is_behind_and_goes_on_when_it_is_not() {
    let dialect = Dialect::of_the_stack().await;
    let (primary, replica) = (Server::start(dialect, 1), Server::start(dialect, 2));
    let (primary_pool, pool) = (primary.pool().await, replica.pool().await);
    for sql in ["CREATE USER r@127.0.0.1", "GRANT REPLICATION SLAVE ON *.* TO r@127.0.0.1"] {
        run(&primary_pool, sql.to_owned()).await;
    }
    // The replica starts to read at the current position of the log. Earlier entries of the log create accounts that
    // the replica already has.
    let status = sqlx::query(dialect.log_status).fetch_one(&primary_pool).await.unwrap();
    let (file, position): (String, u64) = (status.get(0), status.get(1));
    run(&pool, dialect.follow(primary.port, &file, position)).await;
    let settings = format!("[reconcile]\nreplicas = [\"127.0.0.1:{}\"]\nmax_lag = \"1s\"", replica.port);
    let world = World::on(primary.url(), "replica", &settings).await;
    // Declares the queue.
    world.publisher().await;
    let loaded = world.report(&["reconcile"]);
    assert_eq!((&loaded["waits"]["replica_lag"], &loaded["ended"]), (&0.into(), &"done".into()), "{loaded}");
    drift(&world, target(1), 2).await;

    run(&pool, format!("STOP {} SQL_THREAD", dialect.replica)).await;
    let behind = world.report(&["reconcile", "--run-time", "3s"]);
    assert_eq!((&behind["ended"], &behind["repaired"]), (&"time-over".into(), &0.into()), "{behind}");
    assert!(behind["waits"]["replica_lag"].as_u64().unwrap() >= 2, "{behind}");
    let reason = behind["waited_for"].as_str().unwrap();
    assert!(reason.contains(&format!("the replica 127.0.0.1:{} is behind", replica.port)), "{reason}");
    // A scheduled run waits for a replica only for `wait_max`, because other jobs wait for this run. After `wait_max`
    // this run ends early. The schedule later starts a full run again, because this run is not complete.
    let servers = Servers::new(&world.config).unwrap();
    let mut reconciler = Reconciler::scheduled(&world.config, &servers, Mode::Full).unwrap();
    reconciler.wait_max = Some(Duration::from_secs(1));
    let (options, stop) = (RunOptions { resume: true, ..RunOptions::default() }, CancellationToken::new());
    let ran = tallyd_base::jobs::run::once(&servers, &world.config, &reconciler, options, ProgressSink::Log, &stop)
        .await
        .unwrap();
    let Ran::Ended(report) = ran else { panic!("{ran:?}") };
    assert!(!report.is_done() && report.head.ended_early.unwrap().contains("is behind"));
    run(&pool, format!("START {} SQL_THREAD", dialect.replica)).await;
    let checked = world.tallyd(&["config", "check"]);
    assert!(
        stdout(&checked).contains(&format!("the replica 127.0.0.1:{} answers", replica.port)),
        "{}",
        stdout(&checked)
    );

    let caught_up = world.report(&["reconcile"]);
    assert_eq!((&caught_up["ended"], &caught_up["repaired"]), (&"done".into(), &1.into()), "{caught_up}");
    drop(replica);
    let output = world.tallyd(&["reconcile", "--run-time", "3s"]);
    assert!(stdout(&output).contains("ended early"), "{}", stdout(&output));
    assert!(stderr(&output).contains("can't be read"), "{}", stderr(&output));
    let checked = world.tallyd(&["config", "check"]);
    assert!(stderr(&checked).contains("the replica 127.0.0.1:"), "{}", stderr(&checked));
    let _kept = (primary.folder.path(), world.folder.path());
}
