//! Creates the accounts that daemons and commands use in tests. The rights of these accounts come from the files under
//! ops/, in which the names are replaced by the test's names. The account that created the world has all rights.
//! Programs that run in the world have only the rights in these files.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use sqlx::{AssertSqlSafe, MySqlPool};

use super::{root, stack};

/// The password of all test accounts. An output that contains this text shows a secret.
pub const PASSWORD: &str = "s3cr3t-of-a-test";

/// The name of the account on RabbitMQ. All tests share this account, because creating an account takes a second.
const RABBITMQ: &str = "tallyd";

#[derive(Clone, Debug)]
pub struct Accounts {
    world: String,
    short: String,
}

impl Accounts {
    pub fn new(world: &str, number: u32) -> Self {
        Self { world: world.to_owned(), short: format!("t{}_{number}", std::process::id()) }
    }

    pub async fn make_in_mysql(&self, admin: &MySqlPool) {
        let sql = fs::read_to_string(ops("mysql/grants.sql")).unwrap();
        let sql = sql.replace("CREATE DATABASE tally;", "").replace("ON tally.", &format!("ON {}.", self.world));
        let sql = sql.replace("'tallyd", &format!("'{}", self.short));
        let sql =
            ["choose-one", "choose-another", "choose-a-third"].iter().fold(sql, |sql, it| sql.replace(it, PASSWORD));
        // A failed test leaves its accounts behind. A later process can have the same process id, and so the same
        // account names.
        sqlx::raw_sql(AssertSqlSafe(self.drop_sql("IF EXISTS"))).execute(admin).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(admin).await.expect("create the accounts in MySQL");
    }

    pub fn make_in_redis(&self, settings: &toml::Table) {
        let mut redis = redis::Client::open(stack("REDIS_URL")).unwrap().get_connection().unwrap();
        for (account, name) in [("tallyd", self.short.clone()), ("tallyd_api", format!("{}_api", self.short))] {
            let mut rules = lines("accounts.txt", account);
            if has_plain_keys(settings) {
                rules.extend(lines("layouts.txt", account));
            }
            if settings.get("filter").is_some() {
                rules.extend(lines("filters.txt", account));
            }
            let rules = rules.join(" ").replace("~tally:", &format!("~{}:", self.world));
            let password = format!(">{PASSWORD}");
            let rules = rules.split(' ').map(|rule| if rule.starts_with('>') { &password } else { rule });
            let rules: Vec<&str> = rules.collect();
            let () = redis::cmd("ACL").arg("SETUSER").arg(name).arg(rules).query(&mut redis).unwrap();
        }
        // Save the accounts, because a test can kill the server and start it again.
        let () = redis::cmd("ACL")
            .arg("SAVE")
            .query(&mut redis)
            .expect("ACL SAVE failed: restart the stack with dev/down and dev/up");
    }

    /// Creates the accounts of the daemon and the API servers on the broker, once for all tests. The names of all
    /// worlds share a prefix, so one pattern covers them.
    pub fn make_in_rabbitmq() {
        let text = fs::read_to_string(ops("rabbitmq/permissions.sh")).unwrap();
        let text = text.replace("^tally\\.", "^t_[a-z0-9_]+\\.").replace("(tally\\.", "(t_[a-z0-9_]+\\.");
        let made = PathBuf::from(stack("DIR")).join("rabbitmq/accounts-of-tests");
        if fs::read_to_string(&made).is_ok_and(|found| found == text) {
            return;
        }
        for line in text.lines().filter_map(|line| line.strip_prefix("rabbitmqctl ")) {
            let words: Vec<&str> = line.split(' ').map(|word| word.trim_matches('\'')).collect();
            let words: Vec<&str> = if words[0] == "add_user" { vec![words[0], words[1], PASSWORD] } else { words };
            let mut output = rabbitmqctl(&words);
            if words[0] == "add_user" && !output.status.success() {
                // The account exists. This can fail because another test is creating the account, or because the
                // account has another password.
                output = rabbitmqctl(&["change_password", words[1], PASSWORD]);
            }
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        fs::write(made, text).unwrap();
    }

    pub fn of_daemon_in_mysql(&self) -> String {
        format!("'{}'@'%'", self.short)
    }

    pub fn of_daemon(&self, url: &str) -> String {
        logged_in(url, if url.starts_with("amqp") { RABBITMQ } else { &self.short })
    }

    pub fn of_migration(&self, url: &str) -> String {
        logged_in(url, &format!("{}_migrate", self.short))
    }

    pub fn of_api(&self, url: &str) -> String {
        let account = if url.starts_with("amqp") { RABBITMQ } else { &self.short };
        logged_in(url, &format!("{account}_api"))
    }

    fn drop_sql(&self, or_not: &str) -> String {
        let short = &self.short;
        format!("DROP USER {or_not} '{short}'@'%', '{short}_migrate'@'%', '{short}_api'@'%'")
    }

    pub async fn drop(&self, admin: &MySqlPool) {
        let short = &self.short;
        sqlx::raw_sql(AssertSqlSafe(self.drop_sql(""))).execute(admin).await.unwrap();
        let mut redis = redis::Client::open(stack("REDIS_URL")).unwrap().get_connection().unwrap();
        let () = redis::cmd("ACL").arg("DELUSER").arg(short).arg(format!("{short}_api")).query(&mut redis).unwrap();
    }
}

fn has_plain_keys(settings: &toml::Table) -> bool {
    let redis = settings.get("redis").and_then(toml::Value::as_table);
    let also = redis.and_then(|redis| redis.get("also")).and_then(toml::Value::as_table);
    let layout = |table: &toml::Table| table.get("layout").and_then(toml::Value::as_str).map(str::to_owned);
    [redis, also].into_iter().flatten().filter_map(layout).any(|layout| layout != "packed")
}

fn lines(file: &str, account: &str) -> Vec<String> {
    let text = fs::read_to_string(ops("redis").join(file)).unwrap();
    text.lines().filter_map(|line| line.strip_prefix(&format!("ACL SETUSER {account} "))).map(str::to_owned).collect()
}

fn ops(path: &str) -> PathBuf {
    root().join("ops").join(path)
}

fn rabbitmqctl(arguments: &[&str]) -> std::process::Output {
    Command::new(root().join("dev/rabbitmqctl")).args(arguments).output().unwrap()
}

pub fn without_password(url: &str) -> String {
    let mut url = url::Url::parse(url).unwrap();
    url.set_password(None).unwrap();
    url.to_string()
}

fn logged_in(url: &str, user: &str) -> String {
    let mut url = url::Url::parse(url).unwrap();
    url.set_username(user).unwrap();
    url.set_password(Some(PASSWORD)).unwrap();
    url.to_string()
}
