//! Tests the checks of `tallyd config check` that connect to the servers. The command reports the problems of each
//! server separately, and changes nothing on the servers.

use std::fs;
use std::process::{Command, Output};

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use serde_json::Value;
use sqlx::AssertSqlSafe;
use tallyd_base::cli::check::What;
use tallyd_rabbitmq::probe::Found;

use crate::common::ports::free_port;
use crate::common::{World, private::Private, proxy::Proxy, servers, stderr, stdout};

fn check(world: &World, environment: &[(&str, &str)]) -> (Option<i32>, Value) {
    let output: Output = world
        .command()
        .args(["config", "check", "--format", "json"])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
    (output.status.code(), report)
}

/// Returns the checks with that name.
fn named<'a>(report: &'a Value, name: &str) -> Vec<&'a Value> {
    report["checks"].as_array().unwrap().iter().filter(|check| check["check"] == name).collect()
}

#[track_caller]
fn assert_is(report: &Value, name: &str, status: &str, found: &str) {
    let checks = named(report, name);
    let fits = |check: &&Value| check["status"] == status && check["found"].as_str().unwrap().contains(found);
    assert!(checks.iter().any(fits), "{name} is not {status} with \"{found}\": {report:#}");
    // For each problem the report has a recommended action or a place in the configuration.
    assert!(checks.iter().all(|check| check["status"] == "ok" || check["do"].is_string() || check["at"].is_object()));
}

/// At its first start MySQL makes a certificate and writes its CA to a file. MariaDB writes no such file. dev/check-all
/// runs this test with MySQL.
#[tokio::test(flavor = "multi_thread")]
async fn the_certificate_that_mysql_makes_for_itself_is_enough() {
    let world = World::new("check_stock_tls", "").await;
    let (version, folder): (String, String) =
        sqlx::query_as("SELECT VERSION(), @@datadir").fetch_one(&world.pool).await.unwrap();
    if version.contains("MariaDB") {
        servers::not_run(&format!("{version} does not write its CA to a file"));
        return;
    }
    let (own, url) = (format!("{folder}/ca.pem"), world.config.mysql.url.expose().to_owned());
    let by_authority = format!("{url}?ssl-mode=VERIFY_CA");
    let others = "/etc/ssl/certs/ca-certificates.crt".to_owned();
    for (authority, url, status, found) in [
        (
            &own,
            &url,
            "error",
            "that names no server, like the ones MySQL generates: end [mysql] url with ?ssl-mode=VERIFY_CA",
        ),
        (&own, &by_authority, "ok", "mysql://"),
        (&others, &by_authority, "error", "set tls_ca_file to that"),
    ] {
        let (_, report) = check(&world, &[("TALLYD__MYSQL__TLS_CA_FILE", authority), ("TALLYD__MYSQL__URL", url)]);
        assert_is(&report, "mysql-answers", status, found);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_looked_at_and_nothing_changed() {
    let world = World::new("check_all", "[amqp]\npartitions = 2\n").await;
    let (code, report) = check(&world, &[]);
    assert_eq!((code, &report["valid"]), (Some(0), &Value::Bool(true)), "{report:#}");
    for what in What::ALL {
        let depends =
            matches!(what, What::Configuration | What::MysqlReplicas | What::MysqlRecounts | What::MysqlImports);
        let checks = named(&report, &what.name());
        assert_eq!(checks.is_empty(), depends, "{}: {report:#}", what.name());
        assert!(checks.iter().all(|check| what.name().starts_with(check["server"].as_str().unwrap())));
    }
    assert_is(&report, "rabbitmq-queues", "ok", "the daemon will declare ");
    assert_is(&report, "rabbitmq-plugin", "ok", "x-consistent-hash");
    let link = world.broker.connect("test").await.unwrap();
    let found = world.broker.probe_queues(&link).await.unwrap();
    assert!(found.iter().all(|(_, found)| *found == Found::Missing), "a check must not create queues: {found:?}");
    // The check compares existing queues with the queues that tallyd declares. Messages in the queues stay.
    let publisher = world.publisher().await;
    publisher.publish("", &world.broker.queue(0), b"{}").await.unwrap();
    let (code, report) = check(&world, &[]);
    assert_eq!(code, Some(0), "{report:#}");
    assert_is(&report, "rabbitmq-queues", "ok", &world.broker.queue(1));
    assert_is(&report, "rabbitmq-exchanges", "ok", &world.broker.exchange());
    assert_is(&report, "rabbitmq-permissions", "ok", "can publish to amq.default and ");
    assert_eq!(world.unconsumed(&world.broker.queue(0)).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_run_shows_what_is_wrong_with_every_server() {
    let world = World::new("check_away", "[mysql]\nconnect_timeout_ms = 500\n").await;
    let port = free_port();
    let redis = format!("redis://127.0.0.1:{port}/0");
    let mysql = format!("mysql://root@127.0.0.1:{port}/tally");
    let (code, report) = check(&world, &[("TALLYD__REDIS__URL", &redis), ("TALLYD__MYSQL__URL", &mysql)]);
    assert_eq!((code, &report["valid"]), (Some(75), &Value::Bool(false)));
    assert_is(&report, "redis-answers", "error", "refused");
    assert_is(&report, "mysql-answers", "error", "connect to MySQL");
    assert_is(&report, "rabbitmq-answers", "ok", "vhost");
    // If a permanent error and a temporary error occur together, the exit code shows the permanent error.
    let amqp = world.config.amqp.url.expose().replace("%2f", "nowhere");
    let (code, report) = check(&world, &[("TALLYD__REDIS__URL", &redis), ("TALLYD__AMQP__URL", &amqp)]);
    assert_eq!(code, Some(78));
    assert_is(&report, "rabbitmq-answers", "error", "nowhere");
    let text = world.command().args(["config", "check"]).env("TALLYD__REDIS__URL", &redis).output().unwrap();
    assert!(
        stderr(&text).contains("error    redis-answers") && stderr(&text).contains("do: start Redis"),
        "{}",
        stderr(&text)
    );
    assert!(stdout(&text).contains("ok       mysql-schema          up to date"), "{}", stdout(&text));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_leaves_unanswered_is_an_error_that_passes() {
    let world = World::new("check_silent", "").await;
    // The proxy stalls before it forwards the given text. So these requests never arrive: tx.select at RabbitMQ, the
    // last query for permissions at MySQL, and the script that checks permissions at Redis.
    for (name, url, words, check_name) in [
        ("TALLYD__AMQP__URL", &world.config.amqp.url, b"\0\x5a\0\x0a".as_slice(), "rabbitmq-permissions"),
        ("TALLYD__MYSQL__URL", &world.config.mysql.url, b"SHOW GRANTS", "mysql-permissions"),
        ("TALLYD__REDIS__URL", &world.config.redis.url, b"EVAL", "redis-permissions"),
    ] {
        let (proxy, url) = Proxy::before(url.expose()).await;
        proxy.hold_from(words);
        // The connection is not encrypted, because the proxy can't read TLS. MySQL still knows the account's password
        // from an earlier login.
        let url = if name.contains("MYSQL") { format!("{url}?ssl-mode=DISABLED") } else { url };
        // This account can read the settings of Redis. For other accounts the command prints "not known".
        let patience = [
            ("TALLYD__REDIS__URL", world.config.redis.url.expose()),
            ("TALLYD__AMQP__TIMEOUT_MS", "1000"),
            ("TALLYD__MYSQL__CONNECT_TIMEOUT_MS", "1000"),
            ("TALLYD__MYSQL__TRANSACTION_TIMEOUT_MS", "1000"),
            ("TALLYD__REDIS__TIMEOUT_MS", "1000"),
        ];
        let (code, report) = check(&world, &[patience.as_slice(), &[(name, &url)]].concat());
        assert_eq!((code, &report["valid"]), (Some(75), &Value::Bool(false)), "{check_name}: {report:#}");
        assert_is(&report, check_name, "error", "");
        let (server, _) = check_name.split_once('-').unwrap();
        assert_is(&report, &format!("{server}-answers"), "ok", "");
        let unknown = |check: &Value| check["found"].as_str().unwrap().starts_with("not known");
        assert!(!report["checks"].as_array().unwrap().iter().any(unknown), "{report:#}");
        if server == "rabbitmq" {
            let advice = named(&report, check_name)[0]["do"].as_str().unwrap();
            assert!(advice.contains("memory or disk alarm"), "{advice}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_with_other_arguments_is_an_error_and_left_alone() {
    let world = World::new("check_queue", "").await;
    let link = world.broker.connect("test").await.unwrap();
    let queue = world.broker.queue(0);
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    link.channel.queue_declare(queue.as_str().into(), durable, FieldTable::default()).await.unwrap();
    let (code, report) = check(&world, &[]);
    assert_eq!(code, Some(78));
    assert_is(&report, "rabbitmq-queues", "error", "inequivalent arg");
    let (code, report) = check(&world, &[("TALLYD__AMQP__DECLARE", "false")]);
    assert_eq!(code, Some(78), "the other queues are missing: {report:#}");
    assert_is(&report, "rabbitmq-queues", "error", &format!("[amqp] declare is false: {}.returned", world.name));
    link.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_that_an_account_lacks_are_named() {
    let world = World::new("check_rights", "").await;
    let (name, user) = (world.name.clone(), format!("check_{}", std::process::id()));
    for sql in [
        format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'narrow'"),
        format!("GRANT SELECT, INSERT, UPDATE ON {name}.* TO '{user}'@'%'"),
        format!("GRANT CREATE ON {name}.* TO '{user}'@'%'"),
        format!("GRANT ALTER, DROP ON {name}.recent_delta TO '{user}'@'%'"),
        format!("GRANT ALL ON {name}_of_others.* TO '{user}'@'%'"),
    ] {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    let server = Private::start(&["--save", "", "--maxmemory-policy", "allkeys-lru"]).await;
    let mut admin = redis::Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap();
    let rights = ["on", ">narrow", "~*", "+ping", "+eval", "+info", "+hget", "+time", "+exists"];
    let () = redis::cmd("ACL").arg("SETUSER").arg(&user).arg(&rights).query_async(&mut admin).await.unwrap();
    let login = |url: &str| {
        let mut url = url::Url::parse(url).unwrap();
        url.set_username(&user).unwrap();
        url.set_password(Some("narrow")).unwrap();
        url.to_string()
    };
    let (mysql, redis) = (login(world.config.mysql.url.expose()), login(&server.url()));
    let (code, report) = check(&world, &[("TALLYD__MYSQL__URL", &mysql), ("TALLYD__REDIS__URL", &redis)]);
    assert_eq!(code, Some(78));
    assert_is(&report, "mysql-permissions", "error", "DELETE on counter;");
    assert_is(&report, "mysql-permissions", "error", "; ALTER, DROP on applied_event");
    let said = report.to_string();
    assert!(!said.contains("INSERT on") && !said.contains("DROP on recent_delta"), "{said}");
    assert_is(&report, "redis-permissions", "error", "HDEL, HGETALL, HKEYS, HLEN, HMGET, HSET, ");
    assert_is(&report, "redis-eviction", "warning", "allkeys-lru");
    assert_is(&report, "redis-persistence", "ok", "not known: the account has no right to run CONFIG GET");
    assert_is(&report, "redis-listpack", "ok", "not known: the account has no right to run CONFIG GET");
    // An account with the right to read settings.
    let (_, report) = check(&world, &[("TALLYD__REDIS__URL", &server.url())]);
    assert_is(&report, "redis-persistence", "warning", "Redis saves nothing to disk");
    assert_is(&report, "redis-permissions", "ok", "the account has all rights");
    // Now the login to MySQL fails.
    let wrong = mysql.replace("narrow", "wrong");
    let (code, report) = check(&world, &[("TALLYD__MYSQL__URL", &wrong)]);
    assert_eq!(code, Some(78));
    assert_is(&report, "mysql-answers", "error", "Access denied");
    sqlx::raw_sql(AssertSqlSafe(format!("DROP USER '{user}'@'%'"))).execute(&world.pool).await.unwrap();
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_refuses_the_scripts_of_tallyd_is_an_error() {
    let world = World::new("check_scripts", "").await;
    let without = Private::start(&["--rename-command", "EVAL", ""]).await;
    let (code, report) = check(&world, &[("TALLYD__REDIS__URL", &without.url())]);
    assert_eq!(code, Some(78));
    assert_is(&report, "redis-scripts", "error", "Redis runs no Lua scripts");
    // A proxy that reads scripts refuses keys that are no literals.
    let (proxy, url) = Proxy::before(world.config.redis.url.expose()).await;
    let script = "local found = 0\nfor _, key in ipairs(KEYS) do\n";
    let refuses = "do do return {err='ERR bad lua script'} end --";
    proxy.replace(script.as_bytes(), format!("{refuses:<width$}", width = script.len()).as_bytes());
    let (code, report) = check(&world, &[("TALLYD__REDIS__URL", &url)]);
    assert_eq!(code, Some(78));
    assert_is(&report, "redis-scripts", "error", "whose keys are not written as KEYS[1]");
    assert!(report.to_string().contains("script_check_enable = 0"), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_keeps_the_sessions_of_mysql_open_is_reported() {
    let world = World::new("check_idle", "").await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    proxy.replace(b"wait_timeout = 10 ", b"wait_timeout = 99 ");
    let url = format!("{url}?ssl-mode=DISABLED");
    let (code, report) = check(&world, &[("TALLYD__MYSQL__URL", &url)]);
    assert_eq!(code, Some(0));
    assert_is(&report, "mysql-answers", "warning", "a proxy ignores SET wait_timeout");
    assert!(report.to_string().contains("freezes for 99 s"), "{report}");
}

#[test]
fn mistakes_in_the_file_are_checks_with_their_places() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    let text = "[amqp]\nprefech = 5\nprefetch = 19999\n[kinds]\nvideo = 0\n[[board]]\nname = \"a\"\nperiod = \"day\"\nscore = [\"view\"]\n\
                [log]\nlevel = \"info\"\n";
    fs::write(&path, text).unwrap();
    let mut command = Command::new(crate::common::program());
    command.arg("--config").arg(&path).args(["config", "check", "--format", "json"]);
    let output = command.env("TALLYD__REDIS__SEEDS", "[\"h\"]").output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let problems = named(&report, "configuration");
    let places: Vec<(Option<u64>, &str)> = problems
        .iter()
        .map(|problem| (problem["at"]["line"].as_u64(), problem["at"]["key"].as_str().unwrap()))
        .collect();
    let expected =
        [(Some(2), "amqp.prefech"), (Some(3), "amqp.prefetch"), (Some(5), "kinds.video"), (Some(9), "board.0.score")];
    assert_eq!(places[..4], expected, "{report:#}");
    assert!(places[4..].iter().all(|(line, key)| line.is_none() && key.starts_with("redis.seeds")), "{report:#}");
    assert_eq!(problems[4]["at"]["variable"], "TALLYD__REDIS__SEEDS");
    assert_eq!(report["valid"], false);
}

#[test]
fn the_manual_explains_every_check() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md")).unwrap();
    let (_, table) = text.split_once("## The checks\n").unwrap();
    let rows = table.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|')).skip(2);
    let explained: Vec<String> = rows.map(|row| row.split('`').nth(1).unwrap().to_owned()).collect();
    assert_eq!(explained, What::ALL.map(What::name));
}
