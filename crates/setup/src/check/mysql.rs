//! Checks that MySQL answers, has everything that the daemon needs, and has safe settings.

use tallyd_base::config::{Config, ConfigError, Key, Problem};
use tallyd_base::partitions::noted;
use tallyd_base::servers::Servers;
use tallyd_base::servers::code_registry;
use tallyd_mysql::schema::Schema;
use tallyd_mysql::{Store, StoreError, WAIT_TIMEOUT_S};

use tallyd_base::cli::check::{Check, MYSQL_AWAY as AWAY, MYSQL_REFUSED as REFUSED, What, clock};

/// The smallest accepted packet size: twice the size of tallyd's largest statement.
const PACKET_MIN: u64 = 4 << 20;

const SILENT: &str = "look for long queries (SHOW FULL PROCESSLIST), and check again";

const OTHER_PLUGIN: &str = "ALTER USER the account with one of these plugins, as docs/operations/security.md says";

pub(super) async fn check(config: &Config, servers: &Servers) -> Vec<Check> {
    let mut checks = Vec::new();
    match servers.store.settings().await {
        Err(error) => {
            let refused = if matches!(error, StoreError::UnknownPlugin(_)) { OTHER_PLUGIN } else { REFUSED };
            checks.push(Check::failed(What::MysqlAnswers, error, AWAY, refused));
        }
        Ok(settings) => {
            checks.push(Check::ok(What::MysqlAnswers, config.mysql.url.to_string()));
            if settings.wait_timeout_s != WAIT_TIMEOUT_S {
                let found = format!(
                    "a proxy ignores SET wait_timeout: MySQL keeps the locks of a daemon that freezes for {} s",
                    settings.wait_timeout_s
                );
                let advice = "limit idle transactions in the proxy, for example with mysql-max_transaction_idle_time of ProxySQL";
                checks.push(Check::warning(What::MysqlAnswers, found, advice));
            }
            checks.push(version(&settings.version));
            schema(config, servers, &mut checks).await;
            server(&servers.store, &mut checks).await;
            checks.push(match settings.packet_max {
                ..PACKET_MIN => Check::warning(
                    What::MysqlPacket,
                    format!(
                        "max_allowed_packet is {} bytes, but a batch's statements can be larger",
                        settings.packet_max
                    ),
                    "set max_allowed_packet to 16M or more",
                ),
                packet_max => Check::ok(What::MysqlPacket, format!("max_allowed_packet is {packet_max} bytes")),
            });
        }
    }
    replicas(config, &mut checks).await;
    checks
}

fn version(version: &str) -> Check {
    let mut numbers = version.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let of = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (name, least) = if version.contains("MariaDB") { ("MariaDB", (10, 11)) } else { ("MySQL", (8, 0)) };
    if of >= least {
        return Check::ok(What::MysqlVersion, version);
    }
    let found = format!("tallyd is not tested with {version}");
    Check::warning(What::MysqlVersion, found, format!("use {name} {}.{} or later", least.0, least.1))
}

async fn schema(config: &Config, servers: &Servers, checks: &mut Vec<Check>) {
    let advice = match servers.store.schema().await {
        Ok(Schema::TooNew) => "install the tallyd version that created the schema, or a later one",
        _ => "run `tallyd --config /etc/tallyd/migrate.toml migrate`, or use another account that can create tables",
    };
    match servers.check_schema().await {
        Err(error) => {
            checks.push(Check::failed(What::MysqlSchema, error, AWAY, advice));
            return;
        }
        Ok(Schema::Newer(steps)) => {
            let found = format!("a newer tallyd applied {steps} more schema steps, and this version supports them");
            checks.push(Check::ok(What::MysqlSchema, found));
        }
        Ok(_) => checks.push(Check::ok(What::MysqlSchema, "up to date")),
    }
    match code_registry::compare(&servers.store, config).await {
        Ok(changes) if changes.is_empty() => {
            checks.push(Check::ok(What::MysqlNames, "all codes have the same meaning as in MySQL"))
        }
        Ok(changes) => checks.extend(changes.iter().map(|change| {
            Check::ok(
                What::MysqlNames,
                format!("{change}: a daemon writes this change to MySQL at its next start or reload"),
            )
        })),
        Err(error) => match error.downcast::<ConfigError>() {
            Ok(ConfigError(problems)) => checks.extend(
                problems
                    .into_iter()
                    .map(|problem| Check::error(What::MysqlNames, problem, "use a code that was never used before")),
            ),
            Err(error) => checks.push(Check::failed(What::MysqlNames, error, AWAY, REFUSED)),
        },
    }
    checks.push(partitions(config, servers).await);
    maps(config, servers, checks).await;
    checks.push(match servers.store.missing_rights().await {
        Ok(missing) if missing.is_empty() => {
            Check::ok(What::MysqlPermissions, "the account has all rights that the daemon needs")
        }
        Ok(missing) => {
            let found = format!("the account lacks {}", missing.join("; "));
            Check::error(What::MysqlPermissions, found, "GRANT the missing rights, as docs/operations/security.md says")
        }
        Err(error) => Check::unanswered(What::MysqlPermissions, error, SILENT),
    });
}

async fn partitions(config: &Config, servers: &Servers) -> Check {
    let here = config.amqp.partitions;
    match servers.store.noted_partitions().await {
        Err(error) => Check::unanswered(What::MysqlPartitions, error, SILENT),
        Ok(Some(noted)) if noted.partitions > here => Check {
            at: Some(Problem {
                origin: None,
                key: Some(Key::from("amqp").then("partitions")),
                text: format!("{} partitions are in use", noted.partitions),
            }),
            ..Check::error(
                What::MysqlPartitions,
                format!(
                    "[amqp] partitions is {here}, but {} partitions are in use since {} raised the number",
                    noted.partitions, noted.raised_by
                ),
                format!("set it to {}; docs/operations/partitions.md says how to change it", noted.partitions),
            )
        },
        Ok(Some(noted)) if noted.partitions < here => Check::ok(
            What::MysqlPartitions,
            format!(
                "{} partitions are in use: the first daemon with this configuration raises the number to {here}",
                noted.partitions
            ),
        ),
        Ok(noted) => Check::ok(
            What::MysqlPartitions,
            noted.map_or_else(
                || "no daemon has run yet".to_owned(),
                |noted| format!("{} partitions are in use, as configured", noted.partitions),
            ),
        ),
    }
}

async fn maps(config: &Config, servers: &Servers, checks: &mut Vec<Check>) {
    let in_use = match servers.store.noted_maps().await {
        Ok(in_use) => in_use,
        Err(error) => return checks.push(Check::unanswered(What::MysqlPartitions, error, SILENT)),
    };
    for map in &config.maps {
        if let Some(problem) = noted(map, &servers.broker, "").conflict(&in_use) {
            let advice = "give the map its old name and number, or a number that was never used before";
            checks.push(Check::error(What::MysqlPartitions, problem, advice));
        }
    }
    for map in in_use.iter().filter(|it| config.maps.iter().all(|map| map.name != it.name && map.number != it.number)) {
        checks.push(Check::warning(
            What::MysqlPartitions,
            format!("the map {}, introduced by {}, is in use but not in the configuration", map.name, map.noted_by),
            format!("add its [[map]], or run `tallyd admin map remove {}`", map.name),
        ));
    }
}

async fn server(store: &Store, checks: &mut Vec<Check>) {
    match store.durability().await {
        Ok((_, warnings)) if warnings.is_empty() => {
            checks.push(Check::ok(What::MysqlDurability, "commits survive a crash of the host"));
        }
        Ok((_, warnings)) => checks.extend(warnings.into_iter().map(|warning| {
            let setting = warning.split(' ').next().unwrap_or_default().to_owned();
            Check::warning(
                What::MysqlDurability,
                warning,
                format!("SET GLOBAL {setting} = 1, and set it in the server's configuration"),
            )
        })),
        Err(error @ StoreError::StatementLog) => {
            checks.push(Check::error(
                What::MysqlDurability,
                error.to_string(),
                "SET GLOBAL binlog_format = 'ROW', and set it in the server's configuration",
            ));
        }
        Err(error) => checks.push(Check::unanswered(What::MysqlDurability, error, SILENT)),
    }
    let before = tallyd_base::runtime::clock::now();
    match store.clock().await {
        Ok((now, writable)) => {
            checks.push(match writable {
                true => Check::ok(What::MysqlWritable, "MySQL accepts writes"),
                false => Check {
                    passes: true,
                    ..Check::error(
                        What::MysqlWritable,
                        "read_only is set: the server is a replica, or a failover is not complete",
                        "set [mysql] url to the primary; meanwhile the daemon waits",
                    )
                },
            });
            checks.push(clock(What::MysqlClock, now, before, tallyd_base::runtime::clock::now()));
        }
        Err(error) => checks.push(Check::unanswered(What::MysqlClock, error, SILENT)),
    }
}

async fn replicas(config: &Config, checks: &mut Vec<Check>) {
    let replicas = Store::replicas(&config.mysql, &config.reconcile.replicas).unwrap_or_default();
    for (name, store) in replicas {
        let answer = store.stamp_seen(0).await;
        store.close().await;
        checks.push(match answer {
            Ok(_) => Check::ok(What::MysqlReplicas, format!("the replica {name} answers")),
            Err(error) => {
                let error = anyhow::Error::from(error).context(format!("the replica {name}"));
                let away = "start the replica, or remove it from [reconcile] replicas; until then, reconcile runs wait";
                Check::failed(What::MysqlReplicas, error, away, "also GRANT SELECT to the account on the replica")
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_base::cli::check::Status;

    #[test]
    fn old_versions_are_warned_of() {
        for (text, status) in [
            ("8.4.3", Status::Ok),
            ("10.11.14-MariaDB-0+deb12u2", Status::Ok),
            ("12.1.2-MariaDB", Status::Ok),
            ("5.7.44-log", Status::Warning),
            ("10.6.20-MariaDB", Status::Warning),
        ] {
            assert_eq!(version(text).status, status, "{text}");
        }
    }
}
