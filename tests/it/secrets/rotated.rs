//! Passwords that change while the daemon runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use sqlx::AssertSqlSafe;
use tallyd_core::model::UserId;

use super::common::accounts::{PASSWORD, without_password};
use super::common::proxy::Proxy;
use super::common::servers::rabbitmqctl;
use super::common::{World, eventually, stack};

/// An account on RabbitMQ for this test alone.
struct Account(String);

impl Account {
    fn new(world: &World) -> Self {
        rabbitmqctl(&["add_user", &world.name, PASSWORD]);
        rabbitmqctl(&["set_permissions", &world.name, ".*", ".*", ".*"]);
        Self(world.name.clone())
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        rabbitmqctl(&["delete_user", &self.0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_that_change_in_their_files_need_no_restart() {
    let world = World::new("rotated", "").await;
    let account = Account::new(&world);
    let accounts = world.accounts.clone().unwrap();
    let (mysql, mysql_url) = Proxy::before(&accounts.of_daemon(world.config.mysql.url.expose())).await;
    let (redis, redis_url) = Proxy::before(&accounts.of_daemon(&stack("REDIS_URL"))).await;
    let (amqp, amqp_url) = Proxy::before(&stack("AMQP_URL").replace("tally:tally@", &format!("{}@", account.0))).await;
    let file = world.folder.path().join("password");
    let write = |password: &str| {
        fs::write(&file, password).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    };
    write(PASSWORD);
    let section = |name: &str, url: &str| {
        format!("[{name}]\nurl = \"{}\"\npassword_file = \"{}\"\n", without_password(url), file.display())
    };
    let settings = section("mysql", &mysql_url) + &section("redis", &redis_url) + &section("amqp", &amqp_url);
    world.write(&settings);
    let daemon = world.consuming().await;

    let new = "another-s3cr3t";
    write(new);
    let sql = format!("ALTER USER {} IDENTIFIED BY '{new}'", accounts.of_daemon_in_mysql());
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    let user = url::Url::parse(&redis_url).unwrap().username().to_owned();
    let mut change = redis::cmd("ACL");
    change.arg("SETUSER").arg(user).arg("resetpass").arg(format!(">{new}"));
    let () = change.query_async(&mut world.redis().await).await.unwrap();
    rabbitmqctl(&["change_password", &account.0, new]);
    for proxy in [&mysql, &redis, &amqp] {
        proxy.cut();
    }

    let publisher = world.publisher().await;
    let like = (UserId(7), br#"{"type":"like","kind":"video","target_id":"1","user_id":"7","at":1764000000000000}"#);
    world.publish(&publisher, &[(like.0, like.1.to_vec())]).await;
    eventually("the like is written", || async { world.count("SELECT COUNT(*) FROM like_record").await == 1 }).await;
    world.outbox_added().await;
    assert!(!daemon.log().contains("Access denied"), "{}", daemon.log());
}
