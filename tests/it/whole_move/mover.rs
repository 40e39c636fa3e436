//! Acts as an engineer who follows docs/moving.md. The engineer writes the page's settings into config.toml, and runs
//! the page's commands unchanged.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use sqlx::{AssertSqlSafe, MySqlPool};
use tokio::net::UnixDatagram;

use super::old_site::OldSite;
use super::page::{Block, Names, PAGE, Step, steps};
use crate::common::ports::free_port;
use crate::common::servers::rabbitmqctl;
use crate::common::size::pace;
use crate::common::{DEADLINE, Daemon, World, eventually_each, root, stack, stderr, stdout};

/// The exit code of a command if another run holds the lock or a server is unreachable. In this case the page tells the
/// reader to try again.
const TRY_LATER: i32 = 75;
/// The exit code of `--verify` if the sides differ. One side can lag behind the other by more than the ten seconds in
/// which `--verify` repeats its checks. In this case the page tells the reader to verify again.
const DIFFERENT: i32 = 2;

/// The pause between two looks that start a process.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub struct Mover {
    /// Before the world, so that it stops before its database is deleted.
    daemon: Option<Daemon>,
    pub world: World,
    pub site: OldSite,
    settings: toml::Table,
    steps: Vec<Step>,
    export: Option<Child>,
    /// The name of the daemon's account in RabbitMQ.
    account: String,
    /// The time that `date` printed in step 6.
    cutover: String,
    /// The output of the last command.
    pub said: String,
}

impl Mover {
    /// Makes a site and tallyd's accounts, but does not start tallyd.
    pub async fn new(name: &str) -> Self {
        let world = World::new(name, "").await;
        let account = format!("{}_d", world.name);
        let database = format!("{}_site", world.name);
        let site = OldSite::open(&database, world.broker.exchange(), &world.broker).await;
        let mut mover = Self {
            settings: toml::Table::new(),
            steps: steps(&names(&world, &account, &database)),
            world,
            site,
            daemon: None,
            export: None,
            account,
            cutover: String::new(),
            said: String::new(),
        };
        rabbitmqctl(&["add_user", &mover.account, "secret"]);
        for line in fs::read_to_string(root().join("ops/redis/accounts.txt")).unwrap().lines() {
            let mut redis = mover.site.redis.connect().await;
            let () = redis::Cmd::new().arg(line.split(' ').collect::<Vec<_>>()).query_async(&mut redis).await.unwrap();
        }
        let addresses = mover.addresses();
        mover.add(&addresses);
        mover.make_programs();
        mover
    }

    /// Returns settings that only the test needs: shorter times, and the addresses of the test's servers with the
    /// accounts from docs/moving.md.
    fn addresses(&self) -> String {
        let logged_in = |url: &str, user: &str, password: &str| {
            let mut url = url::Url::parse(url).unwrap();
            url.set_username(user).unwrap();
            url.set_password(Some(password)).unwrap();
            url.to_string()
        };
        let amqp = logged_in(&stack("AMQP_URL"), &self.account, "secret");
        let redis = logged_in(&self.site.redis.url(), "tallyd", "choose-one");
        let port = free_port();
        format!(
            "[amqp]\nurl = \"{amqp}\"\n[redis]\nurl = \"{redis}\"\n[admin]\nlisten = \"127.0.0.1:{port}\"\n\
             [reconcile]\nwatch_every = \"1s\"\n"
        )
    }

    /// The page's commands call several programs. For each of these programs, makes a script with the same name. The
    /// script calls the program with the test's servers.
    fn make_programs(&self) {
        let folder = self.folder().join("bin");
        fs::create_dir(&folder).unwrap();
        let accounts = self.world.accounts.as_ref().unwrap();
        let migrate = accounts.of_migration(self.world.config.mysql.url.expose());
        let (tallyd, config) = (crate::common::program(), self.world.config_path());
        let tallyd = format!(
            "[ \"$1\" != migrate ] || export TALLYD__MYSQL__URL='{migrate}'\n\
             TALLYD_TEST_PACE={} exec '{}' --config '{}' \"$@\"",
            pace(),
            tallyd.display(),
            config.display()
        );
        let path = std::env::var("PATH").unwrap();
        let redis = format!("PATH='{path}' exec redis-cli -e -u '{}' \"$@\"", self.site.redis.url());
        let rabbitmq = format!("exec '{}' \"$@\"", root().join("dev/rabbitmqctl").display());
        for (name, script) in [("tallyd", tallyd), ("redis-cli", redis), ("rabbitmqctl", rabbitmq)] {
            let file = folder.join(name);
            fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    fn folder(&self) -> &std::path::Path {
        self.world.folder.path()
    }

    /// Returns the blocks of a step. Steps are numbered from 1.
    pub fn step(&self, number: usize) -> Step {
        self.steps[number - 1].clone()
    }

    /// Follows the instructions of a step.
    pub async fn forward(&mut self, number: usize) {
        for block in self.step(number).forward {
            self.run(block).await;
        }
    }

    /// Follows the page's instructions that undo a step.
    pub async fn back(&mut self, number: usize) {
        for block in self.step(number).back {
            self.run(block).await;
        }
    }

    pub async fn run(&mut self, block: Block) {
        match block {
            Block::Toml(text) => self.add(&text),
            Block::Json(text) => fs::write(self.folder().join("sample.json"), text).unwrap(),
            Block::Sql(text) => {
                let admin = MySqlPool::connect(&stack("MYSQL_URL")).await.unwrap();
                sqlx::raw_sql(AssertSqlSafe(text)).execute(&admin).await.unwrap();
                admin.close().await;
            }
            Block::Sh(line) => self.shell(&line).await,
        }
    }

    async fn shell(&mut self, line: &str) {
        match line.strip_prefix("systemctl ") {
            Some("enable --now tallyd") => self.start().await,
            Some("disable --now tallyd") => self.stop(),
            Some("restart tallyd") => {
                self.stop();
                self.start().await;
            }
            Some(other) => panic!("systemctl {other}"),
            None if line.contains(" --every ") => {
                let line = line.replace(PAGE_TIME, &self.cutover);
                let report = fs::File::create(self.folder().join("export.log")).unwrap();
                let mut command = self.command(&format!("exec {line}"));
                self.export = Some(command.stdout(report).spawn().unwrap());
            }
            None => self.ends(line, 0).await,
        }
    }

    /// Runs a command until it exits with this code, as the page tells the reader: the command waits its turn, and
    /// `--verify` waits until neither side lags.
    pub async fn ends(&mut self, line: &str, code: i32) {
        let output = std::cell::RefCell::new(None::<Output>);
        // On a terminal these commands ask.
        let asks = ["map remove", "layout drop", "--deletions", "--force"].iter().any(|words| line.contains(words));
        let line = &if asks { format!("{line} --yes") } else { line.to_owned() };
        eventually_each(LOOK_EVERY, line, || async {
            let found = self.command(line).output().unwrap();
            let code = found.status.code();
            output.replace(Some(found));
            code != Some(TRY_LATER) && (code != Some(DIFFERENT) || !line.ends_with(" --verify"))
        })
        .await;
        let output = output.into_inner().unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {} {}", stdout(&output), stderr(&output));
        self.said = stdout(&output);
        if line.starts_with("date ") {
            self.said.trim().clone_into(&mut self.cutover);
        }
    }

    /// Returns true if the page contains this text.
    pub fn page_says(&self, text: &str) -> bool {
        fs::read_to_string(root().join(PAGE)).unwrap().contains(text)
    }

    /// Starts the daemon as its systemd unit does, and waits until the daemon is ready.
    async fn start(&mut self) {
        let path = self.folder().join("notify.sock");
        let _ = fs::remove_file(&path);
        let socket = UnixDatagram::bind(&path).unwrap();
        self.daemon = Some(self.world.daemon_with(&[("NOTIFY_SOCKET", path.to_str().unwrap())]));
        let mut message = [0; 1_024];
        let ready = async {
            while !message.starts_with(b"READY=1") {
                socket.recv(&mut message).await.unwrap();
            }
        };
        tokio::time::timeout(DEADLINE, ready).await.expect("the daemon becomes ready");
        tokio::spawn(async move { while socket.recv(&mut message).await.is_ok() {} });
    }

    fn stop(&mut self) {
        assert!(self.daemon.take().unwrap().stop().success());
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("bash");
        let path = format!("{}:{}", self.folder().join("bin").display(), std::env::var("PATH").unwrap());
        command.args(["-o", "pipefail", "-c", line]).current_dir(self.folder()).env("PATH", path);
        command.envs(crate::common::unit_environment()).env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
        command
    }

    /// Adds this TOML text to the settings.
    fn add(&mut self, text: &str) {
        let given: toml::Table = text.parse().unwrap();
        for (section, value) in given {
            match (self.settings.get_mut(&section), value) {
                (Some(toml::Value::Table(known)), toml::Value::Table(more)) => known.extend(more),
                (Some(toml::Value::Array(known)), toml::Value::Array(more)) => known.extend(more),
                (_, value) => drop(self.settings.insert(section, value)),
            }
        }
        self.world.set(&toml::to_string(&self.settings).unwrap());
    }

    /// Removes these sections from the settings.
    pub fn take_out(&mut self, sections: &[&str]) {
        for section in sections {
            assert!(self.settings.remove(*section).is_some(), "{section}");
        }
        self.world.set(&toml::to_string(&self.settings).unwrap());
    }

    /// Connects to tallyd's database again after the test has recreated the database.
    pub async fn reconnect(&mut self) {
        self.world.pool = MySqlPool::connect(self.world.config.mysql.url.expose()).await.unwrap();
    }

    /// Waits until `tallyd status` reports that the daemon writes the map's events.
    pub async fn map_is_written(&self) {
        eventually_each(LOOK_EVERY, "the daemon writes the map's events", || async {
            self.map_row().first().is_some_and(|it| it == "writing")
        })
        .await;
    }

    /// Waits until `tallyd status` shows that the map's queue is empty and that no message of the map is
    /// unacknowledged.
    pub async fn map_is_empty(&self) {
        let is_empty = |row: &[String]| row.len() > 3 && (row[1].as_str(), row[3].as_str()) == ("0", "-");
        eventually_each(LOOK_EVERY, "no message of the map is left", || async { is_empty(&self.map_row()) }).await;
    }

    /// Returns the map's state, the number of messages in its queue, the number of its consumers, and the age of its
    /// oldest unacknowledged message.
    fn map_row(&self) -> Vec<String> {
        let status = self.status();
        let row = status.lines().find_map(|line| line.trim_start().strip_prefix("map site "));
        row.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }

    /// Waits until `tallyd status` reports that the outbox is empty.
    pub async fn outbox_is_empty(&self) {
        let is_empty = || async { self.status().contains("outbox   empty") };
        eventually_each(LOOK_EVERY, "the outbox is empty", is_empty).await;
    }

    fn status(&self) -> String {
        stdout(&self.command("tallyd status").output().unwrap())
    }

    /// Stops the export as `systemctl stop` does.
    pub fn stop_export(&mut self) {
        let export = self.export.take().unwrap();
        let pid = export.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let output = export.wait_with_output().unwrap();
        let report = fs::read_to_string(self.folder().join("export.log")).unwrap();
        assert!(output.status.success() && report.contains("--resume continues"), "{report}");
    }

    pub async fn close(mut self) {
        self.site.stop_users().await;
        if self.daemon.is_some() {
            self.stop();
        }
        rabbitmqctl(&["delete_user", &self.account]);
        let link = self.world.broker.connect("test").await.unwrap();
        let _ = link.channel.queue_delete(self.world.broker.map_queue("site").into(), Default::default()).await;
        self.site.close().await;
    }
}

/// The time that the page's commands contain as an example.
const PAGE_TIME: &str = "2026-11-25T10:00:00Z";

/// Returns the texts of the page that the test replaces, each with its replacement. The test changes no other text of
/// the page.
fn names(world: &World, account: &str, database: &str) -> Names {
    let of_mysql = world.accounts.as_ref().unwrap().of_daemon_in_mysql();
    let now = (tallyd_base::runtime::clock::now().0 / 1_000).to_string();
    vec![
        // The site.
        ("site.events", format!("{database}.events")),
        ("site.worker", format!("{database}.worker")),
        ("site.likes", format!("{database}.likes")),
        (r"(tally\.|site\.events$)", format!(r"({0}\.|{database}\.events$)", world.name)),
        (r"(tally\.|amq\.default$)", format!(r"({}\.|amq\.default$)", world.name)),
        // These are the names that tallyd uses on the servers. All tests use the same servers, so each test needs its
        // own names.
        ("set_permissions tallyd ", format!("set_permissions {account} ")),
        (r"'^tally\.'", format!(r"'^{}\.'", world.name)),
        ("DATABASE tally;", format!("DATABASE {};", world.name)),
        ("'tallyd'@'%'", of_mysql),
        // The test uses the current time in the samples, fewer buckets, and a shorter pause before the second pass.
        ("1795251385004", now),
        ("packed:13", "packed:4".to_owned()),
        ("--deletions", "--deletions --look-again 2s".to_owned()),
    ]
}
