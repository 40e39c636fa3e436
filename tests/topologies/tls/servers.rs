//! Starts servers for a test. The servers accept only TLS, and require a client certificate.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use redis::{Client, ClientTlsConfig, TlsCertificates};

use super::authority::{Certificate, Files};
use super::common::ports::free_ports;
use super::common::{eventually, without_disk};
use crate::engines::servers::{Server, Template, run};

/// The default folder of RabbitMQ's scripts. An environment variable can set another folder.
const RABBIT_BIN: &str = "/usr/lib/rabbitmq/bin";

/// A server that stops when it is dropped, even if a later server fails to start.
struct Process(Child);

impl Process {
    fn spawn(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Servers {
    pub files: Files,
    mysql: Server,
    mysql_admin: sqlx::MySqlPool,
    _redis: Process,
    redis_port: u16,
    redis_admin: redis::aio::MultiplexedConnection,
    _sentinel: Process,
    pub sentinel_port: u16,
    rabbitmq: Rabbit,
    folder: tempfile::TempDir,
}

impl Servers {
    pub async fn start() -> Self {
        let files = Files::new();
        let folder = tempfile::tempdir().unwrap();
        fs::copy(files.path(&Certificate::Right.file()), files.path("shown.pem")).unwrap();
        // RabbitMQ is the slowest server, so it starts first. The other servers start while RabbitMQ starts.
        let rabbitmq = Rabbit::start(&files);
        let [redis_port, sentinel_port] = free_ports();
        let redis = redis_server(&files, redis_port, folder.path(), &["--save", ""]);
        let sentinel = sentinel(&files, sentinel_port, redis_port, folder.path());
        let file = |name: &str| files.path(name).display().to_string();
        let arguments = [
            format!("--ssl-cert={}", file("shown.pem")),
            format!("--ssl-key={}", file("server.key")),
            format!("--ssl-ca={}", file("ca.pem")),
            "--require-secure-transport=ON".to_owned(),
        ];
        let mysql = Server::start(&Template::new(), &arguments);
        let mysql_admin = mysql.pool().await;
        let read = |name: &str| fs::read(files.path(name)).unwrap();
        let client = Client::build_with_tls(
            format!("rediss://127.0.0.1:{redis_port}/"),
            TlsCertificates {
                client_tls: Some(ClientTlsConfig { client_cert: read("tallyd.pem"), client_key: read("tallyd.key") }),
                root_cert: Some(read("ca.pem")),
            },
        )
        .unwrap();
        eventually("Redis answers", || async { client.get_multiplexed_async_connection().await.is_ok() }).await;
        let redis_admin = client.get_multiplexed_async_connection().await.unwrap();
        let servers = Self {
            files,
            mysql,
            mysql_admin,
            _redis: redis,
            redis_port,
            redis_admin,
            _sentinel: sentinel,
            sentinel_port,
            rabbitmq,
            folder,
        };
        eventually("RabbitMQ listens", || async { std::net::TcpStream::connect(servers.amqp_address()).is_ok() }).await;
        servers
    }

    /// Returns MySQL's URL for an administrator, who needs no certificate.
    pub fn mysql_admin_url(&self) -> String {
        self.mysql.admin_url()
    }

    /// Makes an account with the daemon's rights that requires a client certificate.
    pub async fn mysql_account(&self, database: &str) {
        let sql = format!(
            "CREATE USER tallyd REQUIRE X509; GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO tallyd; \
             GRANT CREATE, ALTER, DROP ON {database}.applied_event TO tallyd; GRANT CREATE, ALTER, DROP ON {database}.recent_delta TO tallyd"
        );
        run(&self.mysql_admin, &sql).await;
    }

    pub fn mysql_address(&self) -> String {
        self.mysql.address()
    }

    pub fn redis_address(&self) -> String {
        format!("127.0.0.1:{}", self.redis_port)
    }

    pub fn amqp_address(&self) -> String {
        format!("127.0.0.1:{}", self.rabbitmq.port)
    }

    /// Makes all servers use this certificate.
    pub async fn show(&mut self, shown: Certificate) {
        self.show_mysql(shown).await;
        self.show_others(shown).await;
    }

    pub async fn show_mysql(&self, shown: Certificate) {
        fs::copy(self.files.path(&shown.file()), self.files.path("shown.pem")).unwrap();
        run(&self.mysql_admin, "FLUSH SSL").await;
    }

    /// Makes RabbitMQ and Redis use this certificate. RabbitMQ reads the file again for each connection.
    pub async fn show_others(&mut self, shown: Certificate) {
        let (certificate, key) = (self.files.path(&shown.file()), self.files.path("server.key"));
        fs::copy(&certificate, self.files.path("rabbit.pem")).unwrap();
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg("tls-cert-file").arg(certificate.to_str()).arg("tls-key-file").arg(key.to_str());
        set.exec_async(&mut self.redis_admin).await.unwrap();
    }

    pub fn rabbitmq_log(&self) -> String {
        fs::read_to_string(self.rabbitmq.folder.path().join("server.log")).unwrap_or_default()
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- RabbitMQ's log ---\n{}\n--- {} ---", self.rabbitmq_log(), self.folder.path().display());
        }
    }
}

fn redis_server(files: &Files, port: u16, folder: &Path, arguments: &[&str]) -> Process {
    let file = |name: &str| files.path(name).display().to_string();
    let mut command = Command::new("redis-server");
    command
        .args(["--port", "0", "--tls-port", &port.to_string(), "--bind", "127.0.0.1", "--tls-auth-clients", "yes"])
        .args(["--tls-cert-file", &file(&Certificate::Right.file()), "--tls-key-file", &file("server.key")])
        .args(["--tls-ca-cert-file", &file("ca.pem"), "--dir", &folder.display().to_string()])
        .args(arguments)
        .stdout(Stdio::null());
    Process::spawn(&mut command)
}

/// Starts a sentinel that requires no client certificate. So a client without a certificate can ask the sentinel for
/// the master, but the master rejects the client.
fn sentinel(files: &Files, port: u16, master: u16, folder: &Path) -> Process {
    let file = |name: &str| files.path(name).display().to_string();
    let text = format!(
        "port 0\ntls-port {port}\nbind 127.0.0.1\ntls-replication yes\ntls-auth-clients optional\ntls-cert-file {}\ntls-key-file {}\n\
         tls-ca-cert-file {}\ndir {}\nsentinel monitor mymaster 127.0.0.1 {master} 1\n",
        file(&Certificate::Right.file()),
        file("server.key"),
        file("ca.pem"),
        folder.display()
    );
    let path = folder.join("sentinel.conf");
    fs::write(&path, text).unwrap();
    Process::spawn(Command::new("redis-server").arg(&path).arg("--sentinel").stdout(Stdio::null()))
}

/// A RabbitMQ node whose users log in with their certificates.
struct Rabbit {
    port: u16,
    child: Child,
    _epmd: Process,
    folder: tempfile::TempDir,
}

impl Rabbit {
    fn start(files: &Files) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [port, dist_port, epmd_port] = free_ports();
        fs::copy(files.path(&Certificate::Right.file()), files.path("rabbit.pem")).unwrap();
        let file = |name: &str| files.path(name).display().to_string();
        let text = format!(
            "listeners.tcp = none\nlisteners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\n\
             ssl_options.keyfile = {}\nssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true\n\
             ssl_cert_login_from = common_name\nauth_mechanisms.1 = EXTERNAL\ndisk_free_limit.absolute = 50MB\n\
             default_user = tallyd\ndefault_pass = nobody-logs-in-with-it\nlog.file.level = info\n",
            file("ca.pem"),
            file("rabbit.pem"),
            file("server.key")
        );
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("rabbitmq.conf", &text);
        write("rabbitmq-env.conf", "");
        // With this setting, RabbitMQ reads the certificates for each connection, instead of every two minutes.
        write("advanced.config", "[{ssl, [{bypass_pem_cache, true}]}].");
        write("enabled_plugins", "[rabbitmq_consistent_hash_exchange, rabbitmq_auth_mechanism_ssl].");
        let epmd =
            Process::spawn(Command::new("epmd").args(["-port", &epmd_port.to_string(), "-address", "127.0.0.1"]));
        let bin = std::env::var("TALLYD_STACK_RABBIT_BIN").unwrap_or_else(|_| RABBIT_BIN.to_owned());
        let log = File::create(folder.path().join("stdout.log")).unwrap();
        let path = |name: &str| folder.path().join(name);
        let arguments = "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none +A 4 -start_epmd false -ssl bypass_pem_cache true \
                         -kernel inet_dist_use_interface {127,0,0,1}";
        let child = Command::new(Path::new(&bin).join("rabbitmq-server"))
            .env_clear()
            .envs(without_disk())
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("LC_ALL", "C.UTF-8")
            .env("HOME", folder.path())
            .env("ERL_EPMD_PORT", epmd_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODENAME", "tls@localhost")
            .env("RABBITMQ_DIST_PORT", dist_port.to_string())
            .env("ERL_CRASH_DUMP_SECONDS", "0")
            .env("RABBITMQ_CONF_ENV_FILE", path("rabbitmq-env.conf"))
            .env("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", path("advanced.config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", path("enabled_plugins"))
            .env("RABBITMQ_MNESIA_BASE", path("data"))
            .env("RABBITMQ_LOG_BASE", folder.path())
            .env("RABBITMQ_LOGS", path("server.log"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", path("generated"))
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", arguments)
            // With this variable, the script replaces itself with the server, so that the child is the server's
            // process.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        Self { port, child, _epmd: epmd, folder }
    }
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", self.child.id())]).status();
        let _ = self.child.wait();
    }
}
