//! Tests the first day of a new user: `tallyd init`, accounts.sh, `tallyd migrate`, `tallyd config check`, a daemon, a
//! like, a gateway.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use sqlx::{AssertSqlSafe, MySqlPool};
use tallyd_base::config::{Amqp, ServerUrl};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};
use tallyd_rabbitmq::Broker;

use super::gateway::Gateway;
use super::{Daemon, body, eventually, program, root, stack, stderr, stdout, target, unit_environment};

pub struct FirstDay {
    pub name: String,
    folder: tempfile::TempDir,
}

impl FirstDay {
    pub fn new(name: &str) -> Self {
        Self { name: format!("t{name}{}", std::process::id()), folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join("tallyd").join(file)
    }

    /// Returns the environment variables of the daemon. They contain the addresses of the stack's servers, and a
    /// database, queues and keys that no other test uses.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let Self { name, .. } = self;
        let of = |server: &str| stack(server).rsplit('@').next().unwrap().to_owned();
        let redis = stack("REDIS_URL").trim_start_matches("redis://").to_owned();
        vec![
            ("TALLYD__AMQP__URL", format!("amqp://{}", of("AMQP_URL"))),
            ("TALLYD__MYSQL__URL", format!("mysql://{}{name}", of("MYSQL_URL"))),
            ("TALLYD__REDIS__URL", format!("redis://{redis}")),
            ("TALLYD__AMQP__PREFIX", name.clone()),
            ("TALLYD__REDIS__KEY_PREFIX", format!("{name}:")),
            ("TALLYD_INIT_AMQP_URL", stack("AMQP_URL")),
            ("TALLYD_INIT_MYSQL_URL", stack("MYSQL_URL")),
        ]
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(program());
        command.envs(unit_environment()).env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
        command
    }

    pub fn init(&self, environment: &[(&'static str, String)], arguments: &[&str]) -> Output {
        let folder = self.folder.path().join("tallyd");
        let mut command = self.command();
        command.arg("init").arg("--dir").arg(folder).args(arguments).envs(environment.iter().cloned());
        command.output().unwrap()
    }

    /// Runs `tallyd init`, and checks the files and the output of this command. Only password files may contain a
    /// secret. Returns config.toml.
    pub fn initialized(&self, environment: &[(&'static str, String)], arguments: &[&str]) -> String {
        let output = self.init(environment, arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        let mut files = Vec::new();
        for entry in fs::read_dir(self.path("")).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            files.push((path.file_name().unwrap().to_str().unwrap().to_owned(), text, mode));
        }
        let (secret, plain): (Vec<_>, Vec<_>) = files.iter().partition(|(name, ..)| name.ends_with("-password"));
        assert!(secret.len() >= 4, "{files:?}");
        let administrators = environment.iter().filter(|(name, _)| name.starts_with("TALLYD_INIT_"));
        let administrators =
            administrators.filter_map(|(_, url)| Some(url::Url::parse(url).ok()?.password()?.to_owned()));
        // The administrator's password on RabbitMQ is an ordinary word. The output can contain this word for other
        // reasons.
        let administrators: Vec<String> = administrators.filter(|password| password != "tally").collect();
        let passwords: Vec<&str> =
            secret.iter().map(|(_, text, _)| text.trim()).chain(administrators.iter().map(String::as_str)).collect();
        let text = format!("{}{}", stdout(&output), stderr(&output));
        for password in &passwords {
            assert!(password.len() >= 32, "a short password");
            assert!(!text.contains(password), "a password is shown");
            assert!(
                plain.iter().all(|(_, text, _)| !text.contains(password)),
                "a file that is not a password file contains a password"
            );
        }
        for (name, _, mode) in &files {
            let expected = match name.as_str() {
                "config.toml" | "gateway.toml" => 0o640,
                "accounts.sh" => 0o700,
                _ => 0o600,
            };
            assert_eq!(*mode, expected, "{name}");
        }
        let config = fs::read_to_string(self.path("config.toml")).unwrap();
        let settings = config.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count();
        assert!(settings <= 20, "{config}");
        self.rename_accounts();
        config
    }

    /// Gives the accounts the name of this test, in the files of `tallyd init`. All tests use the same servers, and
    /// accounts.sh takes over no account that exists.
    fn rename_accounts(&self) {
        for file in ["accounts.sh", "config.toml", "migrate.toml", "gateway.toml"] {
            let mut text = fs::read_to_string(self.path(file)).unwrap();
            for (before, after) in
                [("//", "@"), ("//", "_"), (" ", "_"), (" ", " "), (" ", ";"), (" ", "\n"), ("'", "'"), ("'", "_")]
            {
                let new = format!("{before}{}{after}", self.name);
                text = text.replace(&format!("{before}tallyd{after}"), &new);
            }
            fs::write(self.path(file), text).unwrap();
        }
    }

    /// Runs accounts.sh for the given servers, with an administrator's rights. Then runs accounts.sh again, and the
    /// second run must stop at the accounts that exist.
    pub fn accounts(&self, servers: &[&str], mysql_url: &str, more: &[&str]) {
        let url = url::Url::parse(mysql_url).unwrap();
        let (host, port) = (url.host_str().unwrap(), url.port().unwrap());
        let client = format!("mariadb --protocol=tcp --host={host} --port={port} --user=root {}", more.join(" "));
        let run = || {
            let output = Command::new("sh")
                .arg(self.path("accounts.sh"))
                .args(servers)
                .env("MYSQL", &client)
                .env("MYSQL_PWD", url.password().unwrap_or_default())
                .env("RABBITMQCTL", root().join("dev/rabbitmqctl"))
                .output()
                .unwrap();
            (output.status.success(), stdout(&output) + &stderr(&output))
        };
        let (is_done, text) = run();
        assert!(is_done, "{text}");
        let (is_done, text) = run();
        assert!(!is_done && text.contains("exists"), "{text}");
    }

    #[track_caller]
    pub fn done(&self, file: &str, arguments: &[&str]) -> String {
        let output = self.command().arg("--config").arg(self.path(file)).args(arguments).output().unwrap();
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert!(output.status.success(), "{arguments:?}: {text}");
        text
    }

    fn started(&self, file: &str, command: &str, variable: (&str, &str)) -> Daemon {
        let log_path = self.folder.path().join(format!("{command}.log"));
        let log = File::create(&log_path).unwrap();
        let mut process = self.command();
        process.arg("--config").arg(self.path(file)).arg(command).env(variable.0, variable.1);
        Daemon::new(process.stderr(log).spawn().unwrap(), log_path)
    }

    pub async fn daemon(&self) -> Daemon {
        let daemon = self.started("config.toml", "run", ("TALLYD__ADMIN__LISTEN", ""));
        daemon.logged("\"consuming\"").await;
        daemon
    }

    /// Starts the daemon, and a gateway with gateway.toml. Sends a like to the gateway, and waits until the gateway reads
    /// this like from MySQL and from Redis.
    pub async fn likes_over_http(&self) {
        let daemon = self.daemon().await;
        let listen = ("TALLYD__GATEWAY__LISTEN", "127.0.0.1:0");
        let gateway = Gateway::started(self.started("gateway.toml", "gateway", listen)).await;
        let answer = gateway.post(r#"{"type":"like","kind":"video","target_id":"43","user_id":"7"}"#).await;
        assert_eq!((answer.status, answer.verdicts()), (202, vec!["confirmed".to_owned()]), "{answer:?}");
        eventually("the gateway is ready", || async { gateway.get("/readyz").await.status == 200 }).await;
        eventually("the like is in MySQL and in Redis", || async {
            let likes = gateway.get("/v1/likes?user=7&kind=video&ids=43").await;
            let counters = gateway.get("/v1/counters?kind=video&ids=43").await;
            likes.body.contains(r#""liked":true,"source":"mysql""#)
                && counters.body.contains(r#""source":"redis","like":1"#)
        })
        .await;
        for process in [gateway.process, daemon] {
            let log = process.log();
            assert!(process.stop().success(), "{log}");
        }
    }

    /// Starts the daemon, publishes a like, waits until the daemon has written and counted the like, and stops the
    /// daemon.
    pub async fn likes(&self, amqp: &Amqp) {
        let daemon = self.daemon().await;
        let broker = Broker::new(amqp).unwrap();
        let publisher = broker.connect_publisher("test").await.unwrap();
        let like = LikeEvent { target: target(42), user: UserId(7), at: Micros(1_700_000_000_000_000), liked: true };
        publisher.publish(&broker.exchange(), "7", &body(&like).1).await.unwrap();
        eventually("the like is in MySQL and in Redis", || async {
            let shown = self.done("config.toml", &["show", "video:42", "--format", "json"]);
            ["\"redis\":1", "\"counter\":1", "\"rows\":1"].iter().all(|number| shown.contains(number))
        })
        .await;
        let log = daemon.log();
        assert!(daemon.stop().success(), "{log}");
    }

    pub fn api(&self) -> Amqp {
        let url = self.as_api(&stack("AMQP_URL"));
        Amqp { url: ServerUrl::from(url.as_str()), prefix: self.name.clone(), ..Amqp::default() }
    }

    pub fn as_api(&self, address: &str) -> String {
        let password = fs::read_to_string(self.path("tallyd.api-password")).unwrap();
        let mut url = url::Url::parse(address).unwrap();
        url.set_username(&format!("{}_api", self.name)).unwrap();
        url.set_password(Some(password.trim())).unwrap();
        url.to_string()
    }

    pub async fn close(self) {
        let Self { name, .. } = &self;
        let admin = Amqp { url: stack("AMQP_URL").as_str().into(), ..self.api() };
        let broker = Broker::new(&admin).unwrap();
        let link = broker.connect("test").await.unwrap();
        for queue in [broker.queue(0), format!("{name}.returned")] {
            let _ = link.channel.queue_delete(queue.into(), Default::default()).await;
        }
        for exchange in ["events", "partitions"] {
            let _ = link.channel.exchange_delete(format!("{name}.{exchange}").into(), Default::default()).await;
        }
        for account in [name.clone(), format!("{name}_api")] {
            super::servers::rabbitmqctl(&["delete_user", &account]);
        }
        let mysql = MySqlPool::connect(&format!("{}mysql", stack("MYSQL_URL"))).await.unwrap();
        let sql = format!("DROP DATABASE {name}; DROP USER '{name}'@'%', '{name}_migrate'@'%', '{name}_api'@'%'");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mysql).await.unwrap();
        let mut redis = redis::Client::open(stack("REDIS_URL")).unwrap().get_connection().unwrap();
        let () = redis::cmd("ACL").arg("DELUSER").arg(name).arg(format!("{name}_api")).query(&mut redis).unwrap();
        let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{name}:*")).query(&mut redis).unwrap();
        for keys in keys.chunks(1_000) {
            let _: i64 = redis::cmd("UNLINK").arg(keys).query(&mut redis).unwrap();
        }
    }
}
