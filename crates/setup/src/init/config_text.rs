//! Makes the texts of config.toml, migrate.toml and gateway.toml. A comment gives the reason for each setting. Pure.

use std::fmt::Write;

use toml::Value;

use super::address::{ACCOUNT, is_here};
use super::plan::{Password, Plan, Server};
use tallyd_base::config::{Amqp, Config, ServerUrl, ssl_mode};
use tallyd_gateway::config::GatewayConfig;
use tallyd_redis::topology::Topology;

struct Text(String);

impl Text {
    fn section(&mut self, name: &str) {
        // Writing to a String can't fail, here and below.
        let _ = write!(self.0, "\n[{name}]\n");
    }

    fn set(&mut self, reason: &str, key: &str, value: impl Into<Value>) {
        // The reason can contain a version text from a server. A line break in this text would begin a new setting.
        let reason = reason.replace(char::is_control, " ");
        let _ = writeln!(self.0, "# {reason}\n{key} = {}", value.into());
    }

    fn set_if(&mut self, is_needed: bool, reason: &str, key: &str, value: impl Into<Value>) {
        if is_needed {
            self.set(reason, key, value);
        }
    }

    fn certificates(&mut self, files: [&Option<String>; 3]) {
        let names = ["tls_ca_file", "tls_cert_file", "tls_key_file"];
        let reasons = [
            "The authority that signs the server's certificate.",
            "The server requires a client certificate.",
            "The certificate's key.",
        ];
        for ((file, name), reason) in files.into_iter().zip(names).zip(reasons) {
            if let Some(file) = file {
                self.set(reason, name, file.as_str());
            }
        }
    }
}

pub(super) fn config(plan: &Plan) -> String {
    let mut text = Text(
        "# Written by `tallyd init`. Other keys have their defaults: docs/configuration-reference.md explains every key.\n"
            .to_owned(),
    );
    rabbitmq(plan, &mut text);
    mysql(plan, Server::Mysql.url(&plan.config).expose(), Password::Daemon(Server::Mysql), &mut text);
    redis(plan, &mut text);
    text.section("kinds");
    let _ = writeln!(
        text.0,
        "# Kinds that users can like, each with its code in MySQL. Never change the meaning of a code."
    );
    for kind in &plan.load.kinds {
        let _ = writeln!(text.0, "{kind} = {}", plan.config.kinds.0.get(kind).copied().unwrap_or_default());
    }
    text.0
}

pub(super) fn migrate(plan: &Plan) -> String {
    let mut text = Text("# Written by `tallyd init`, only for `tallyd migrate`.\n".to_owned());
    let mut url = plan.config.mysql.url.expose().to_owned();
    if let Ok(mut parts) = plan.config.mysql.url.parts() {
        // This can't fail, because the address has a host.
        let _ = parts.set_username(&format!("{ACCOUNT}_migrate"));
        url = parts.to_string();
    }
    mysql(plan, &url, Password::Migrate, &mut text);
    text.0
}

pub(super) fn gateway(plan: &Plan) -> String {
    let mut text = Text("# Written by `tallyd init`, only for `tallyd gateway`.\n".to_owned());
    text.section("gateway");
    let reason = "Only this machine reaches this address. Others need a token.";
    text.set(reason, "listen", GatewayConfig::default().gateway.listen);
    let Config { amqp, mysql, redis, .. } = &plan.config;
    let servers = [(Server::Rabbitmq, &amqp.login), (Server::Mysql, &mysql.login), (Server::Redis, &redis.login)];
    for (server, login) in servers {
        text.section(server.section());
        text.set("The account of API servers.", "url", api_url(plan, server));
        password(plan, Password::Api, &mut text);
        text.certificates([&login.tls_ca_file, &None, &None]);
        if login.tls_cert_file.is_some() {
            text.0 += "# The server requires a client certificate. The gateway's user can't read the daemon's key: make another one.\n\
                       #tls_cert_file = \"/etc/tallyd/tallyd-gateway.crt\"\n#tls_key_file = \"/etc/tallyd/tallyd-gateway.key\"\n";
        }
        if server == Server::Rabbitmq {
            prefix(amqp, &mut text);
        }
    }
    nodes(plan, &mut text);
    text.0
}

fn prefix(amqp: &Amqp, text: &mut Text) {
    let reason = "First part of the name of every exchange and queue.";
    text.set_if(amqp.prefix != Amqp::default().prefix, reason, "prefix", amqp.prefix.as_str());
}

/// Returns the address with the API servers' account. This account has a password even if the daemon's account uses a
/// certificate.
fn api_url(plan: &Plan, server: Server) -> String {
    let url = server.url(&plan.config);
    let Ok(mut parts) = url.parts() else { return url.expose().to_owned() };
    // This can't fail, because the address has a host.
    let _ = parts.set_username(&format!("{ACCOUNT}_api"));
    if plan.is_by_certificate(server) {
        let query = parts.query().unwrap_or_default().split('&').filter(|pair| !pair.starts_with("auth_mechanism="));
        let query = query.collect::<Vec<_>>().join("&");
        parts.set_query((!query.is_empty()).then_some(&query));
    }
    parts.to_string()
}

fn rabbitmq(plan: &Plan, text: &mut Text) {
    let Config { amqp, .. } = &plan.config;
    text.section("amqp");
    let way = way(&amqp.url, "amqps");
    text.set(&format!("{}. {way}", found(plan.facts.rabbitmq.as_deref(), Server::Rabbitmq)), "url", amqp.url.expose());
    if !plan.is_by_certificate(Server::Rabbitmq) {
        password(plan, Password::Daemon(Server::Rabbitmq), text);
    }
    text.certificates([&amqp.login.tls_ca_file, &amqp.login.tls_cert_file, &amqp.login.tls_key_file]);
    prefix(amqp, text);
    let reason = match amqp.partitions {
        1 => format!(
            "One queue is enough for {} events per second. You can raise the number later, while events arrive.",
            plan.load.events_per_s
        ),
        many => format!("{} events per second need {many} queues.", plan.load.events_per_s),
    };
    text.set(&reason, "partitions", i64::from(amqp.partitions));
}

fn mysql(plan: &Plan, url: &str, account: Password, text: &mut Text) {
    let Config { mysql, .. } = &plan.config;
    text.section("mysql");
    let version = plan.facts.mysql.as_ref().map(|version| {
        let name = if version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
        format!("{name} {}", version.split('-').next().unwrap_or(version))
    });
    let reason = format!("{}. {}", found(version.as_deref(), Server::Mysql), mysql_way(plan));
    text.set(&reason, "url", url);
    password(plan, account, text);
    text.certificates([&mysql.login.tls_ca_file, &mysql.login.tls_cert_file, &mysql.login.tls_key_file]);
}

fn mysql_way(plan: &Plan) -> String {
    let mysql = &plan.config.mysql;
    match (ssl_mode(&mysql.url).as_deref(), &plan.facts.mysql_tls) {
        (Some("disabled"), _) => PLAIN.to_owned(),
        (Some("verify_ca"), _) => "TLS: the certificate's authority is verified, its name is not.".to_owned(),
        (None, Some(tls)) if is_here(&mysql.url) && mysql.login.tls_ca_file.is_none() => {
            format!("{tls}, not verified, because the server is on this machine.")
        }
        (None, None) if is_here(&mysql.url) && mysql.login.tls_ca_file.is_none() => {
            "On this machine: TLS if the server supports it.".to_owned()
        }
        (_, tls) => format!("{}: certificate and name are verified.", tls.as_deref().unwrap_or("TLS")),
    }
}

fn redis(plan: &Plan, text: &mut Text) {
    let Config { redis, .. } = &plan.config;
    text.section("redis");
    let version = found(plan.facts.redis.as_deref(), Server::Redis);
    let way = way(&redis.url, "rediss");
    let of = match &plan.facts.topology {
        Topology::Single => "",
        Topology::Cluster(_) => " A node of a Redis Cluster. tallyd finds the other nodes through it.",
        Topology::Sentinel(_) => " tallyd asks the sentinels for the master, and uses only this account.",
    };
    text.set(&format!("{version}. {way}{of}"), "url", redis.url.expose());
    password(plan, Password::Daemon(Server::Redis), text);
    text.certificates([&redis.login.tls_ca_file, &redis.login.tls_cert_file, &redis.login.tls_key_file]);
    text.set_if(redis.cluster, "The server is a Redis Cluster.", "cluster", true);
    nodes(plan, text);
    let targets = plan.load.targets;
    let reason = format!("Enough for {targets} targets of a kind. API servers that call scripts need the same number.");
    text.set(&reason, "bucket_bits", i64::from(redis.bucket_bits));
}

fn nodes(plan: &Plan, text: &mut Text) {
    let (redis, default) = (&plan.config.redis, Config::default().redis);
    let list = |list: &[String]| list.iter().map(|it| Value::from(it.as_str())).collect::<Vec<_>>();
    text.set_if(
        !redis.seeds.is_empty(),
        "Other nodes, used if the first node is unreachable.",
        "seeds",
        list(&redis.seeds),
    );
    let watched = !redis.sentinels.is_empty();
    text.set_if(watched, "tallyd asks these sentinels for the master.", "sentinels", list(&redis.sentinels));
    text.set_if(watched, "The master's name in the sentinels.", "sentinel_master", redis.sentinel_master.as_str());
    if let Some(file) = &redis.sentinel_password_file {
        text.set("The password of the sentinels.", "sentinel_password_file", file.as_str());
    }
    let prefix = "Prefix of every key.";
    text.set_if(redis.key_prefix != default.key_prefix, prefix, "key_prefix", redis.key_prefix.as_str());
}

fn password(plan: &Plan, password: Password, text: &mut Text) {
    let name = password.file();
    let file = if plan.has_store() { name } else { plan.secrets.join(name).display().to_string() };
    text.set("The account's password, set by accounts.sh.", "password_file", file);
}

fn found(version: Option<&str>, server: Server) -> String {
    version.map_or_else(|| format!("{}, unknown version", server.name()), str::to_owned)
}

const PLAIN: &str = "Plain text: only for a private network.";

fn way(url: &ServerUrl, tls: &str) -> String {
    let is_tls = url.parts().is_ok_and(|url| url.scheme() == tls);
    match (is_tls, is_here(url)) {
        (true, _) => "TLS: certificate and name are verified.".to_owned(),
        (false, true) => "Plain text, because the server is on this machine.".to_owned(),
        (false, false) => format!("{PLAIN} For TLS use {tls}://."),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::super::plan::tests::{daemon, load};
    use super::super::plan::{Facts, Load};
    use super::*;
    use tallyd_base::config::parse;

    fn plan(urls: [&str; 3], facts: Facts) -> Plan {
        Plan::new(Path::new("/etc/tallyd"), &daemon(urls), facts, load()).unwrap()
    }

    fn settings(text: &str) -> usize {
        text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count()
    }

    #[test]
    fn a_configuration_is_short_and_gives_its_reasons() {
        let facts = Facts {
            rabbitmq: Some("RabbitMQ 3.10.8".to_owned()),
            mysql: Some("10.11.14-MariaDB-0+deb12u2".to_owned()),
            redis: Some("Redis 7.0.15".to_owned()),
            ..Facts::default()
        };
        let text = config(&plan(["127.0.0.1", "127.0.0.1", "127.0.0.1"], facts));
        assert!(settings(&text) <= 15, "{text}");
        for expected in [
            "# RabbitMQ 3.10.8. Plain text, because the server is on this machine.\nurl = \"amqp://tallyd@127.0.0.1/%2f\"\n",
            "# MariaDB 10.11.14. On this machine: TLS if the server supports it.\n",
            "# Redis 7.0.15. Plain text",
            "password_file = \"tallyd.redis-password\"\n",
            "bucket_bits = 13\n",
            "partitions = 1\n",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
    }

    #[test]
    fn a_version_of_a_server_can_not_begin_a_setting() {
        let version = Some("Redis 7\n[amqp]\r\u{1b}[2J".to_owned());
        let text = config(&plan(["h", "h", "h"], Facts { redis: version, ..Facts::default() }));
        assert!(text.contains("# Redis 7 [amqp]  [2J. Plain text"), "{text}");
    }

    #[test]
    fn the_way_to_each_server_is_said_beside_its_address() {
        let text = config(&plan(["amqps://mq", "mysql://db/t?ssl-mode=VERIFY_CA", "rediss://cache"], Facts::default()));
        assert_eq!(text.matches("TLS: certificate and name are verified.").count(), 2, "{text}");
        assert!(text.contains("TLS: the certificate's authority is verified, its name is not."), "{text}");
        let text = config(&plan(["amqp://mq", "mysql://db/t?ssl-mode=DISABLED", "redis://cache"], Facts::default()));
        assert_eq!(text.matches("Plain text: only for a private network.").count(), 3, "{text}");
        assert!(text.contains("For TLS use rediss://."), "{text}");
    }

    #[test]
    fn the_migration_has_an_account_of_its_own_in_mysql() {
        let text = migrate(&plan(["mq", "mysql://db:3307/likes", "cache"], Facts::default()));
        let mysql = parse(&text, "migrate.toml", []).unwrap().mysql;
        assert_eq!(mysql.url.expose(), "mysql://tallyd_migrate@db:3307/likes");
        assert_eq!(mysql.login.password_file.as_deref(), Some("tallyd.migrate-password"));
    }

    #[test]
    fn the_gateway_has_accounts_of_its_own_on_every_server() {
        let urls = ["amqps://mq/%2f?auth_mechanism=external&frame_max=9000", "db:3307", "cache"];
        let mut plan = plan(urls, Facts::default());
        plan.config.amqp.prefix = "shop".to_owned();
        plan.config.redis.key_prefix = "shop:".to_owned();
        plan.config.redis.seeds = vec!["b:6379".to_owned()];
        let written: toml::Table = gateway(&plan).parse().unwrap();
        for (section, url) in [
            ("amqp", "amqps://tallyd_api@mq/%2f?frame_max=9000"),
            ("mysql", "mysql://tallyd_api@db:3307/tally"),
            ("redis", "redis://tallyd_api@cache/0"),
        ] {
            assert_eq!(written[section]["url"].as_str(), Some(url));
            assert_eq!(written[section]["password_file"].as_str(), Some("tallyd.api-password"));
        }
        assert_eq!(written["amqp"]["prefix"].as_str(), Some("shop"));
        assert_eq!(written["redis"]["key_prefix"].as_str(), Some("shop:"));
        // The gateway refuses keys that the site card contains.
        for (section, keys) in written {
            let known = &tallyd_gateway::config::schema()["properties"][&section]["properties"];
            assert!(keys.as_table().unwrap().keys().all(|key| known.get(key).is_some()), "[{section}] {keys}");
        }
    }

    #[test]
    fn the_gateways_unit_loads_each_file_that_its_configuration_names() {
        let mut plan = plan(["amqps://mq", "mysql://db", "rediss://cache"], Facts::default());
        plan.config.redis.sentinel_password_file = Some("tallyd.sentinel-password".to_owned());
        plan.config.mysql.login.tls_cert_file = Some("/etc/tallyd/mysql.crt".to_owned());
        plan.config.mysql.login.tls_key_file = Some("tallyd.mysql-key".to_owned());
        let text = gateway(&plan);
        assert!(
            text.contains("#tls_key_file = ") && !text.contains("mysql.crt"),
            "the daemon's key is not the gateway's"
        );
        let written: toml::Table = text.parse().unwrap();
        let unit = include_str!("../../../../systemd/tallyd-gateway.service");
        let loaded: Vec<&str> = unit.lines().filter_map(|line| line.strip_prefix("LoadCredential=")).collect();
        let keys = written.values().flat_map(|section| section.as_table().unwrap());
        let named: Vec<&str> =
            keys.filter(|(key, _)| key.ends_with("_file")).map(|(_, it)| it.as_str().unwrap()).collect();
        assert_eq!(named.len(), 4);
        for name in named {
            let is_loaded = loaded.iter().any(|it| it.split(':').next() == Some(name));
            assert!(is_loaded, "{name} is not in {loaded:?}");
        }
    }

    #[test]
    fn the_manual_shows_the_gateways_file_as_it_is_written() {
        let text = gateway(&plan(["127.0.0.1", "127.0.0.1", "127.0.0.1"], Facts::default()));
        let (_, settings) = text.split_once("\n\n").unwrap();
        let manual = include_str!("../../../../docs/gateway.md");
        assert!(manual.contains(&format!("```toml\n{settings}```\n")), "{settings}");
    }

    proptest! {
        #[test]
        fn a_configuration_is_read_back_as_it_was_planned(
            hosts in prop::collection::vec("[a-z]{1,8}(:[1-9][0-9]{3})?", 3),
            tls: bool,
            cluster: bool,
            targets in 0_u64..1 << 40,
            events_per_s in 0_u32..20_000_000,
            kinds in prop::collection::btree_set("[a-z0-9_-]{1,32}", 1..5),
            folder in "/[a-z \"\\\\]{1,10}",
        ) {
            let s = if tls { "s" } else { "" };
            let urls = [format!("amqp{s}://{}", hosts[0]), format!("mysql://{}", hosts[1]), format!("redis{s}://{}", hosts[2])];
            let mut daemon = daemon([&urls[0], &urls[1], &urls[2]]);
            daemon.redis.key_prefix = "x:".to_owned();
            daemon.mysql.login.tls_ca_file = tls.then(|| "/ca.pem".to_owned());
            let topology =
                if cluster { Topology::Cluster(vec!["a:1".to_owned(), "b:2".to_owned()]) } else { Topology::Single };
            super::super::plan::topology(&mut daemon, &topology).unwrap();
            let load = Load { targets, events_per_s, kinds: kinds.into_iter().collect() };
            let plan = Plan::new(Path::new(&folder), &daemon, Facts { topology, ..Facts::default() }, load);
            let Ok(plan) = plan else { return Ok(()) };
            let read = parse(&config(&plan), "config.toml", []).unwrap();
            let planned = &plan.config;
            for server in Server::ALL {
                prop_assert_eq!(server.url(&read).expose(), server.url(planned).expose());
            }
            prop_assert_eq!(read.amqp.partitions, planned.amqp.partitions);
            prop_assert_eq!(&read.kinds.0, &planned.kinds.0);
            prop_assert_eq!(&read.mysql.login.tls_ca_file, &planned.mysql.login.tls_ca_file);
            let of = |redis: &tallyd_base::config::Redis| {
                (redis.bucket_bits, redis.key_prefix.clone(), redis.cluster, redis.seeds.clone())
            };
            prop_assert_eq!(of(&read.redis), of(&planned.redis));
            let expected = plan.folder.join("tallyd.amqp-password").display().to_string();
            prop_assert_eq!(read.amqp.login.password_file, Some(expected));
        }
    }
}
