//! Starts MariaDB servers for a test: a single server, a primary with a replica, or a Galera cluster.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use sqlx::mysql::{MySqlConnectOptions, MySqlPool};
use sqlx::{AssertSqlSafe, Row};

use super::common::ports::free_port;
use super::common::servers::not_run;
use super::common::{eventually, stderr, without_disk};

/// Returns true if this machine has MariaDB's programs. The programs must exist, unless dev/lab uses MySQL.
pub fn are_here() -> bool {
    let chosen = std::env::var("TALLYD_STACK_MYSQL_FROM").unwrap_or_default();
    if !chosen.starts_with("mysql-") {
        return true;
    }
    let here = program("mariadbd", &std::env::temp_dir()).arg("--version").output().is_ok();
    if !here {
        not_run(&format!("this test needs MariaDB's own programs, which {chosen} lacks"));
    }
    here
}

/// The data folder of an empty server. A test copies it, because a copy is faster than a new installation.
pub struct Template(tempfile::TempDir);

impl Template {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        give(folder.path());
        let data = format!("--datadir={}", folder.path().join("data").display());
        let install = program("mariadb-install-db", folder.path())
            .args(["--no-defaults", &user_argument(), &data, "--auth-root-authentication-method=normal"])
            .args(["--skip-test-db", "--innodb-log-file-size=8M"])
            .output()
            .unwrap();
        assert!(install.status.success(), "{}", stderr(&install));
        Self(folder)
    }
}

/// A server that stops when it is dropped.
pub struct Server {
    pub port: u16,
    child: Child,
    folder: tempfile::TempDir,
    arguments: Vec<String>,
}

impl Server {
    pub fn start(template: &Template, arguments: &[String]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        run_command(Command::new("cp").arg("-a").arg(template.0.path().join("data")).arg(folder.path()));
        give(folder.path());
        let port = free_port();
        let child = spawn(folder.path(), port, arguments);
        Self { port, child, folder, arguments: arguments.to_vec() }
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the server's URL for an administrator.
    pub fn admin_url(&self) -> String {
        format!("mysql://root@{}/", self.address())
    }

    /// Connects as the administrator, who can also write to a read-only server.
    pub async fn pool(&self) -> MySqlPool {
        let options: MySqlConnectOptions = format!("{}mysql", self.admin_url()).parse().unwrap();
        eventually("the server answers", || async {
            match MySqlPool::connect_with(options.clone()).await {
                Ok(pool) => sqlx::query("SELECT 1 FROM mysql.user").fetch_all(&pool).await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
        MySqlPool::connect_with(options).await.unwrap()
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts a killed server with its old data and one more argument.
    pub fn start_again(&mut self, argument: String) {
        self.arguments.push(argument);
        self.child = spawn(self.folder.path(), self.port, &self.arguments);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub async fn run(pool: &MySqlPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

pub async fn text(pool: &MySqlPool, sql: &str) -> String {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await.unwrap().get(0)
}

pub async fn number(pool: &MySqlPool, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await.unwrap()
}

fn spawn(folder: &Path, port: u16, arguments: &[String]) -> Child {
    program("mariadbd", folder)
        .args(["--no-defaults", &user_argument(), "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=32M"])
        .args(["--innodb-log-file-size=8M", "--log-error=../error.log", "--binlog-format=ROW", "--skip-name-resolve"])
        .arg(format!("--datadir={}", folder.join("data").display()))
        .arg(format!("--socket={}", folder.join("s").display()))
        .arg(format!("--port={port}"))
        .args(arguments)
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn program(name: &str, folder: &Path) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(name);
    // When a server starts, it deletes all temporary tables in TMPDIR, even those of another server. So each server
    // gets its own folder for temporary files.
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin")).env("TMPDIR", folder).envs(without_disk());
    command
}

/// If root runs the tests, the servers use the account of Debian's package. Otherwise the program that copies a Galera
/// node would run as the user `nobody`.
fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output().unwrap();
    output.stdout == b"0\n"
}

fn user_argument() -> String {
    let name = if is_root() { "mysql".to_owned() } else { std::env::var("USER").unwrap_or_default() };
    format!("--user={name}")
}

fn give(folder: &Path) {
    if is_root() {
        // dev/lab sets the id of the account, because its programs use another /etc/passwd.
        let account = std::env::var("TALLYD_STACK_MYSQL_UID").unwrap_or_else(|_| "mysql".to_owned());
        run_command(Command::new("chown").arg("-R").arg(account).arg(folder));
    }
}

fn run_command(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// A primary and its replica.
pub struct Pair {
    pub primary: Server,
    pub replica: Server,
    pub primary_pool: MySqlPool,
    pub replica_pool: MySqlPool,
}

/// The name of an account that has all rights, except the right to write to a read-only server.
pub const ACCOUNT: &str = "tallyd";

impl Pair {
    pub async fn start() -> Self {
        let template = Template::new();
        let arguments = |id: u8| {
            ["--log-bin=b", "--log-slave-updates", "--gtid-strict-mode", "--rpl-semi-sync-slave-enabled=ON"]
                .map(ToOwned::to_owned)
                .into_iter()
                .chain([format!("--server-id={id}")])
                .collect::<Vec<_>>()
        };
        let (primary, replica) = (Server::start(&template, &arguments(1)), Server::start(&template, &arguments(2)));
        let (primary_pool, replica_pool) = (primary.pool().await, replica.pool().await);
        for pool in [&primary_pool, &replica_pool] {
            let accounts = format!(
                "SET sql_log_bin = 0; CREATE USER {ACCOUNT}; GRANT ALL ON `t\\_%`.* TO {ACCOUNT}; \
                 CREATE USER r; GRANT REPLICATION SLAVE ON *.* TO r; SET sql_log_bin = 1"
            );
            run(pool, &accounts).await;
        }
        let pair = Self { primary, replica, primary_pool, replica_pool };
        let follow = format!(
            "SET GLOBAL gtid_slave_pos = '{}'; SET GLOBAL read_only = 1; \
             CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {}, MASTER_USER = 'r', MASTER_USE_GTID = slave_pos; START SLAVE",
            text(&pair.primary_pool, "SELECT @@gtid_binlog_pos").await,
            pair.primary.port
        );
        run(&pair.replica_pool, &follow).await;
        pair
    }

    /// Waits until the replica has written everything that it received. Then makes the replica the primary.
    pub async fn promote(&self) {
        run(&self.replica_pool, "STOP SLAVE IO_THREAD").await;
        eventually("the replica has written everything that it received", || async {
            let status = sqlx::query("SHOW SLAVE STATUS").fetch_one(&self.replica_pool).await.unwrap();
            let got: String = status.get("Gtid_IO_Pos");
            text(&self.replica_pool, "SELECT @@gtid_slave_pos").await == got
        })
        .await;
        run(&self.replica_pool, "STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only = 0").await;
    }
}
