//! Tests `tallyd init` with the default servers, and in a terminal.

use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use sqlx::MySqlPool;

use crate::common::first_day::FirstDay;
use crate::common::{DEADLINE, stack, stderr, stdout};

/// Returns the comment that tallyd must write into config.toml for the database: the server's product and version.
/// dev/lab runs either MySQL or MariaDB.
async fn mysql_name() -> String {
    let pool = MySqlPool::connect(&stack("MYSQL_URL")).await.unwrap();
    let version: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(&pool).await.unwrap();
    let name = if version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
    format!("# {name} {}.", version.split('-').next().unwrap())
}

/// Returns the comment that tallyd must write into config.toml for Redis: the server's product and version.
fn redis_name() -> String {
    let mut redis = redis::Client::open(stack("REDIS_URL")).unwrap().get_connection().unwrap();
    let info: redis::InfoDict = redis::cmd("INFO").arg("server").query(&mut redis).unwrap();
    let of = |name: &str| info.get::<String>(name);
    of("valkey_version")
        .map_or_else(|| format!("# Redis {}.", of("redis_version").unwrap()), |it| format!("# Valkey {it}."))
}

#[tokio::test(flavor = "multi_thread")]
async fn three_addresses_are_enough_for_a_first_like() {
    let day = FirstDay::new("init");
    let config = day.initialized(&day.environment(), &["--targets", "2000000"]);
    let (mysql, redis) = (mysql_name().await, redis_name());
    for said in ["# RabbitMQ ", &mysql, &redis, "bucket_bits = 14\n", "partitions = 1\n"] {
        assert!(config.contains(said), "{said}\n{config}");
    }
    day.accounts(&[], &stack("MYSQL_URL"), &[]);
    let denied = day.command().arg("--config").arg(day.path("config.toml")).arg("migrate").output().unwrap();
    let said = stderr(&denied);
    assert!(said.contains("use the account for migrations"), "{said}");
    assert_eq!(said.matches("command denied").count(), 1, "{said}");
    assert!(day.done("migrate.toml", &["migrate"]).contains("up to date after"));
    let checked = day.done("config.toml", &["config", "check"]);
    assert!(checked.contains("the configuration is valid"), "{checked}");
    day.likes(&day.api()).await;
    day.likes_over_http().await;

    // The command does not overwrite existing files.
    let before = fs::read_to_string(day.path("tallyd.mysql-password")).unwrap();
    let again = day.init(&day.environment(), &[]);
    assert_eq!((again.status.code(), stdout(&again).as_str()), (Some(1), ""));
    assert!(stderr(&again).contains("config.toml exists, and tallyd does not overwrite it"), "{}", stderr(&again));
    assert_eq!(fs::read_to_string(day.path("tallyd.mysql-password")).unwrap(), before);
    day.close().await;
}

#[test]
fn without_a_login_the_servers_are_seen_from_outside() {
    let day = FirstDay::new("outside");
    let environment: Vec<_> =
        day.environment().into_iter().filter(|(name, _)| !name.starts_with("TALLYD_INIT_")).collect();
    let config = day.initialized(&environment, &["--kinds", "post,video"]);
    // RabbitMQ and Redis report their versions without a login.
    for said in ["# RabbitMQ ", "# MySQL, unknown version.", &redis_name(), "post = 1\nvideo = 2\n"] {
        assert!(config.contains(said), "{said}\n{config}");
    }
}

#[test]
fn an_address_in_a_file_is_read_and_unset_afterwards() {
    let day = FirstDay::new("file");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("amqp-url");
    let mut environment = day.environment();
    let (name, url) = environment.iter_mut().find(|(name, _)| *name == "TALLYD__AMQP__URL").unwrap();
    fs::write(&path, format!("{url}\n")).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
    (*name, *url) = ("TALLYD__AMQP__URL_FILE", path.display().to_string());
    let output = day.init(&environment, &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let unset = "unset TALLYD__AMQP__URL_FILE TALLYD__MYSQL__URL TALLYD__REDIS__URL ";
    assert!(stdout(&output).contains(unset), "{}", stdout(&output));
}

#[test]
fn a_wrong_call_of_init_says_what_to_set_and_writes_nothing() {
    let day = FirstDay::new("wrong");
    let of = |name: &str, value: &str| {
        let mut environment = day.environment();
        environment.retain(|(found, _)| *found != name);
        if !value.is_empty() {
            environment.push((Box::leak(name.to_owned().into_boxed_str()), value.to_owned()));
        }
        environment.push(("TALLYD__MYSQL__CONNECT_TIMEOUT_MS", "500".to_owned()));
        let output = day.init(&environment, &[]);
        assert!(!day.path("").exists(), "the command must not write files");
        (output.status.code(), stderr(&output))
    };
    for (name, value, code, said) in [
        ("TALLYD__AMQP__URL", "", 64, "no terminal for questions: set TALLYD__AMQP__URL, TALLYD__MYSQL__URL"),
        ("TALLYD__MYSQL__URL", "mysql://tallyd:s3cr3t@127.0.0.1/t", 64, "has a password: remove it"),
        (
            "TALLYD__MYSQL__URL",
            "mysql://127.0.0.1:1/t",
            75,
            "check MySQL (its settings come from TALLYD__MYSQL__* in the environment): connect to MySQL: error communicating with \
             database: Connection refused (os error 111)\n",
        ),
        (
            "TALLYD_INIT_AMQP_URL",
            &stack("AMQP_URL").replace("tally:tally@", "tally:s3cr3t@"),
            78,
            "in the environment): the server refused the administrator's login: connect to RabbitMQ: ",
        ),
        (
            "TALLYD__MYSQL__URL",
            "mysql://app@127.0.0.1/t",
            64,
            "has the account app: remove it, because `tallyd init` creates",
        ),
        ("TALLYD__REDIS__URL", "http://127.0.0.1", 64, "[redis] url begins with http://"),
    ] {
        let (found, text) = of(name, value);
        assert_eq!(found, Some(code), "{text}");
        assert!(text.contains(said) && !text.contains("s3cr3t"), "{said}\n{text}");
    }
}

/// A terminal in which the test types as a user does.
struct Terminal {
    master: OwnedFd,
    shown: String,
}

impl Terminal {
    /// Reads the output until `question` appears. If the answer is secret, also waits until the terminal hides the
    /// input.
    fn expect(&mut self, question: &str, is_secret: bool) {
        let until = Instant::now() + DEADLINE;
        while !self.shown.contains(question) {
            self.read();
            assert!(Instant::now() < until, "{question} is not in {}", self.shown);
        }
        while is_secret && tcgetattr(&self.master).unwrap().local_modes.contains(LocalModes::ECHO) {
            assert!(Instant::now() < until, "the terminal would show the input");
            std::thread::yield_now();
        }
    }

    /// Reads what is shown within the next tenth of a second.
    fn read(&mut self) {
        let tenth = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        if poll(&mut [PollFd::new(&self.master, PollFlags::IN)], Some(&tenth)).unwrap() > 0 {
            let mut bytes = [0; 4_096];
            let read = rustix::io::read(&self.master, &mut bytes).unwrap_or(0);
            self.shown += &String::from_utf8_lossy(&bytes[..read]);
        }
    }

    fn answer(&mut self, question: &str, answer: &str, is_secret: bool) {
        self.expect(question, is_secret);
        self.shown.clear();
        rustix::io::write(&self.master, format!("{answer}\n").as_bytes()).unwrap();
    }
}

#[tokio::test]
async fn at_a_terminal_init_asks_and_shows_no_password() {
    let day = FirstDay::new("asked");
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    let slave = || fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut command = day.command();
    command.arg("init").arg("--dir").arg(day.path("")).stdin(slave()).stderr(slave()).stdout(Stdio::piped());
    for (name, value) in day.environment().iter().filter(|(name, _)| name.ends_with("PREFIX")) {
        command.env(name, value);
    }
    let mut child = command.spawn().unwrap();
    let mut terminal = Terminal { master, shown: String::new() };
    let address = |server: &str| stack(server).trim_end_matches("%2f").trim_end_matches('/').to_owned();
    let host = |url: &str| url.rsplit(['@', '/']).next().unwrap().to_owned();
    let mysql = url::Url::parse(&stack("MYSQL_URL")).unwrap();
    let password = mysql.password().unwrap().to_owned();
    let mut all = String::new();
    for (question, answer, is_secret) in [
        ("RabbitMQ, as tallyd will reach it", "http://x".to_owned(), false),
        ("RabbitMQ, as tallyd will reach it", host(&address("AMQP_URL")), false),
        ("Administrator of RabbitMQ", "tally:tally".to_owned(), true),
        ("MySQL, as tallyd will reach it", host(&address("MYSQL_URL")), false),
        ("Administrator of MySQL", format!("root:{password}"), true),
        ("Redis, as tallyd will reach it", host(&address("REDIS_URL")), false),
        ("Administrator of Redis", String::new(), true),
        ("Kinds that users can like", "post".to_owned(), false),
        ("Targets of one kind", "many".to_owned(), false),
        ("Targets of one kind", "9_000_000".to_owned(), false),
        ("Likes per second", String::new(), false),
    ] {
        terminal.expect(question, is_secret);
        all += &terminal.shown;
        terminal.answer(question, &answer, is_secret);
    }
    let until = Instant::now() + DEADLINE;
    while child.try_wait().unwrap().is_none() {
        terminal.read();
        assert!(Instant::now() < until, "init does not end: {all}{}", terminal.shown);
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{all}{}", terminal.shown);
    assert!(!all.contains(&password) && !stdout(&output).contains(&password), "the output contains a password");
    let config = fs::read_to_string(day.path("config.toml")).unwrap();
    for said in ["url = \"mysql://tallyd@127.0.0.1:", "post = 1\n", "bucket_bits = 17\n", &mysql_name().await] {
        assert!(config.contains(said), "{said}\n{config}");
    }
}
