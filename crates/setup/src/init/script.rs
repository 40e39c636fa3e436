//! Writes accounts.sh, with which an administrator creates the accounts. Pure. The statements, the rights and the names
//! of the accounts come from ops/, other names from the configuration.
//!
//! The script contains no passwords: it reads them from their files. It never passes a password as an argument,
//! because other users of the machine could see it.

use std::fmt::Write;

use super::address::{ACCOUNT, host_and_port, is_here};
use super::plan::{Password, Plan, Server};
use tallyd_base::config::Config;
use tallyd_redis::topology::Topology;

const GRANTS: &str = include_str!("../../../../ops/mysql/grants.sql");
const PERMISSIONS: &str = include_str!("../../../../ops/rabbitmq/permissions.sh");
const ACL: &str = include_str!("../../../../ops/redis/accounts.txt");
const ACL_CLUSTER: &str = include_str!("../../../../ops/redis/cluster.txt");
const ACL_SENTINEL: &str = include_str!("../../../../ops/redis/sentinel.txt");

/// The key patterns for an empty `[redis] key_prefix`. The pattern of an empty prefix would match every key.
const WITHOUT_PREFIX: &str = "~c:* ~recent:* ~limit:* ~board:* ~filter:*";

const FRAME: &str = include_str!("accounts.sh");

pub(super) fn accounts(plan: &Plan) -> String {
    FRAME
        .replace("@PASSWORDS@", &folder_of_passwords(plan))
        .replace("@MYSQL_CLIENT@", &mysql_client(plan))
        .replace("@REDIS_CLIENT@", &redis_client(&plan.config))
        .replace("@REDIS_NODES@", &plan.redis_nodes().join(" "))
        .replace("@MYSQL_PASSWORDS@\n", &passwords(plan, Server::Mysql))
        .replace("@RABBITMQ_PASSWORDS@\n", &passwords(plan, Server::Rabbitmq))
        .replace("@REDIS_PASSWORDS@\n", &passwords(plan, Server::Redis))
        .replace("@SQL@\n", &sql(plan))
        .replace("@RABBITMQ@\n", &rabbitmq(plan))
        .replace("@REDIS@\n", &redis(plan))
}

fn folder_of_passwords(plan: &Plan) -> String {
    match plan.has_store() {
        true => plan.secrets.display().to_string(),
        // The user can move the folder, and with it the script.
        false => "$(dirname -- \"$0\")".to_owned(),
    }
}

fn variable(password: Password) -> String {
    password.file().trim_start_matches("tallyd.").replace('-', "_")
}

/// The script stops where it reads a password file that it can't use.
fn passwords(plan: &Plan, server: Server) -> String {
    let is_needed = |password: &Password| match password {
        Password::Daemon(of) => *of == server,
        Password::Migrate => server == Server::Mysql,
        Password::Api => true,
    };
    let needed = plan.passwords().into_iter().filter(is_needed);
    needed.map(|it| format!("    {}=$(password {})\n", variable(it), it.file())).collect()
}

fn mysql_client(plan: &Plan) -> String {
    let url = &plan.config.mysql.url;
    let program = match &plan.facts.mysql {
        Some(version) if version.contains("MariaDB") => "mariadb",
        _ => "mysql",
    };
    let address = host_and_port(url, 3_306);
    let (host, port) = address.rsplit_once(':').unwrap_or((&address, "3306"));
    match (is_here(url), port) {
        // The client connects to the socket and logs in as the operating system's user.
        (true, "3306") => program.to_owned(),
        _ => format!("{program} --host={} --port={port} --user=root --password", host.trim_matches(['[', ']'])),
    }
}

fn redis_client(config: &Config) -> String {
    let redis = &config.redis;
    let mut client = "redis-cli".to_owned();
    if redis.url.parts().is_ok_and(|url| url.scheme() == "rediss") {
        client += " --tls";
        for (option, file) in [
            ("cacert", &redis.login.tls_ca_file),
            ("cert", &redis.login.tls_cert_file),
            ("key", &redis.login.tls_key_file),
        ] {
            if let Some(file) = file {
                // Writing to a String can't fail, here and below.
                let _ = write!(client, " --{option} {file}");
            }
        }
    }
    client
}

fn sql(plan: &Plan) -> String {
    let database = plan.database();
    // In a right to a whole database, `_` would match any character. The shell reads the backslashes, too.
    let whole = format!("ON \\`{}\\`.*", database.replace('_', "\\\\_"));
    let sql = GRANTS
        .replace("CREATE DATABASE tally", &format!("CREATE DATABASE IF NOT EXISTS {database}"))
        .replace("ON tally.*", &whole)
        .replace("ON tally.", &format!("ON {database}."));
    [Password::Daemon(Server::Mysql), Password::Migrate, Password::Api]
        .into_iter()
        .zip(["choose-one", "choose-another", "choose-a-third"])
        .fold(sql, |sql, (password, text)| sql.replace(text, &format!("${}", variable(password))))
}

fn rabbitmq(plan: &Plan) -> String {
    let mut lines = String::new();
    if plan.config.amqp.partitions > 1 && plan.facts.plugin != Some(true) {
        lines += "    # The plugin spreads events over several partitions.\n";
        lines += "    $RABBITMQ_PLUGINS enable rabbitmq_consistent_hash_exchange\n";
    }
    let vhost = plan.vhost();
    if vhost != "/" {
        let _ = writeln!(lines, "    $RABBITMQCTL -q add_vhost '{vhost}'");
    }
    let prefix = plan.config.amqp.prefix.replace('.', "\\.");
    for line in PERMISSIONS.lines().filter_map(|line| line.strip_prefix("rabbitmqctl ")) {
        let mut words = line.splitn(3, ' ');
        let (command, account) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let password = if account == ACCOUNT { Password::Daemon(Server::Rabbitmq) } else { Password::Api };
        let by_certificate = account == ACCOUNT && plan.is_by_certificate(Server::Rabbitmq);
        let _ = match command {
            "add_user" if by_certificate => writeln!(lines, "    rabbitmq_account_without_password {account}"),
            "add_user" => writeln!(lines, "    rabbitmq_account {account} \"${}\"", variable(password)),
            _ => {
                let rights = words.next().unwrap_or_default().replace("tally\\.", &format!("{prefix}\\."));
                writeln!(lines, "    $RABBITMQCTL -q {command} -p '{vhost}' {account} {rights}")
            }
        };
    }
    lines
}

fn redis(plan: &Plan) -> String {
    let more = match &plan.facts.topology {
        Topology::Single => "",
        Topology::Cluster(_) => ACL_CLUSTER,
        Topology::Sentinel(_) => ACL_SENTINEL,
    };
    let default = format!("~{}*", Config::default().redis.key_prefix);
    let patterns = match plan.config.redis.key_prefix.as_str() {
        "" => WITHOUT_PREFIX.to_owned(),
        prefix => format!("~{prefix}*"),
    };
    let mut lines = String::new();
    for (account, password) in
        [(ACCOUNT.to_owned(), Password::Daemon(Server::Redis)), (format!("{ACCOUNT}_api"), Password::Api)]
    {
        let start = format!("ACL SETUSER {account} ");
        let rules: Vec<&str> =
            [ACL, more].into_iter().flat_map(str::lines).filter_map(|line| line.strip_prefix(&start)).collect();
        let rules = rules.join(" ").replace(&default, &patterns);
        let with_password =
            |rule| if str::starts_with(rule, '>') { format!(">${}", variable(password)) } else { rule.to_owned() };
        let rules: Vec<String> = rules.split(' ').map(with_password).collect();
        let _ = writeln!(lines, "    redis_account \"$1\" \"{start}{}\"", rules.join(" "));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::super::plan::Facts;
    use super::super::plan::tests::{daemon, load};
    use super::*;

    fn plan(config: &Config, facts: Facts) -> Plan {
        Plan::new(Path::new("/etc/tallyd"), config, facts, load()).unwrap()
    }

    #[track_caller]
    fn has(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn names_of_the_site_stand_in_every_statement() {
        let urls = ["amqp://mq/v1", "mysql://db:3307/my_likes", "redis://cache:6380"];
        let mut config = daemon(urls);
        (config.amqp.prefix, config.redis.key_prefix) = ("like.s".to_owned(), "shop:".to_owned());
        config.amqp.partitions = 2;
        let text = accounts(&plan(&config, Facts::default()));
        has(
            &text,
            &[
                "CREATE DATABASE IF NOT EXISTS my_likes;\n",
                "CREATE USER 'tallyd'@'%' IDENTIFIED BY '$mysql_password';\n",
                "CREATE USER 'tallyd_migrate'@'%' IDENTIFIED BY '$migrate_password';\n",
                "ON my_likes.applied_event TO 'tallyd'@'%';\n",
                "GRANT SELECT ON \\`my\\\\_likes\\`.* TO 'tallyd_api'@'%';\n",
                "$RABBITMQ_PLUGINS enable rabbitmq_consistent_hash_exchange\n",
                "$RABBITMQCTL -q add_vhost 'v1'\n",
                "rabbitmq_account tallyd \"$amqp_password\"\n",
                "set_permissions -p 'v1' tallyd '^like\\.s\\.' '^(like\\.s\\.|amq\\.default$)' '^like\\.s\\.'\n",
                "ACL SETUSER tallyd on >$redis_password ~shop:",
                "ACL SETUSER tallyd_api on >$api_password ~shop:",
                "MYSQL:=mysql --host=db --port=3307 --user=root --password}",
                "REDIS_NODES:=cache:6380}",
            ],
        );
        // The script contains no placeholder, no password and no other name from the files of ops/.
        assert!(!text.contains("choose-") && !text.contains("@SQL@") && !text.contains("tally."), "{text}");
        let lines = text.lines().map(str::trim);
        assert!(
            lines.clone().all(
                |line| !line.contains("ACL SETUSER") || line.matches('~').count() == line.matches("~shop:").count()
            )
        );
    }

    #[test]
    fn what_is_there_already_needs_no_line_in_the_script() {
        let facts = Facts { mysql: Some("10.11.14-MariaDB".to_owned()), plugin: Some(true), ..Facts::default() };
        let mut config = daemon(["127.0.0.1", "127.0.0.1", "rediss://h"]);
        config.amqp.partitions = 2;
        config.redis.login.tls_ca_file = Some("/ca.pem".to_owned());
        let text = accounts(&plan(&config, facts));
        has(&text, &["MYSQL:=mariadb}", "REDIS_CLI:=redis-cli --tls --cacert /ca.pem}"]);
        assert!(!text.contains("enable rabbitmq_consistent_hash") && !text.contains("add_vhost"), "{text}");
    }

    #[test]
    fn every_node_of_redis_gets_what_its_kind_needs() {
        let config = daemon(["h", "h", "a:6379"]);
        let topology = Topology::Cluster(vec!["a:6379".to_owned(), "b:6379".to_owned()]);
        let text = accounts(&plan(&config, Facts { topology, ..Facts::default() }));
        has(&text, &["REDIS_NODES:=a:6379 b:6379}", "+cluster|slots +asking\""]);
    }

    #[test]
    fn an_account_by_certificate_has_no_password() {
        let text = accounts(&plan(&daemon(["amqps://h/%2f?auth_mechanism=external", "h", "h"]), Facts::default()));
        has(&text, &["rabbitmq_account_without_password tallyd\n", "rabbitmq_account tallyd_api \"$api_password\"\n"]);
        assert!(!text.contains("tallyd.amqp-password") && !text.contains("amqp_password"));
    }

    #[test]
    fn the_passwords_of_the_units_are_read_where_the_units_read_them() {
        let text = accounts(&plan(&daemon(["h", "h", "h"]), Facts::default()));
        has(&text, &[": \"${PASSWORDS:=/etc/credstore}\"\n", "cd -- \"$PASSWORDS\" ||"]);
    }

    #[test]
    fn without_a_prefix_redis_gives_its_own_keys_alone() {
        let mut config = daemon(["h", "h", "h"]);
        config.redis.key_prefix = String::new();
        let text = accounts(&plan(&config, Facts::default()));
        has(&text, &["on >$redis_password ~c:* ~recent:* ~limit:* ~board:* ~filter:* +ping"]);
        assert!(!text.contains("~*"), "{text}");
    }

    /// Runs accounts.sh for MySQL with this password of the daemon, or without a password. Returns three values:
    /// whether the script succeeded, the script's output, and the SQL.
    fn run(password: Option<&str>) -> (bool, String, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let config = daemon(["h", "mysql://h/a_b", "h"]);
        let plan = Plan::new(folder.path(), &config, Facts::default(), load()).unwrap();
        fs::write(path("accounts.sh"), accounts(&plan)).unwrap();
        for name in ["tallyd.migrate-password", "tallyd.api-password"] {
            fs::write(path(name), "Ab1._~-\n").unwrap();
        }
        if let Some(password) = password {
            fs::write(path("tallyd.mysql-password"), password).unwrap();
        }
        let mut script = Command::new("sh");
        script.arg(path("accounts.sh")).arg("mysql").env("MYSQL", "tee sql");
        let output = script.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), stderr, fs::read_to_string(path("sql")).unwrap_or_default())
    }

    #[test]
    fn a_password_that_is_missing_or_unsafe_stops_the_script() {
        for (password, expected) in [
            (None, "is missing, empty or not readable"),
            (Some(""), "is missing, empty or not readable"),
            (Some("\n"), "write a password of letters"),
            (Some("it's"), "write a password of letters"),
            (Some("a\\b"), "write a password of letters"),
            (Some("a b"), "write a password of letters"),
            (Some("a\nb\n"), "write a password of letters"),
        ] {
            let (is_done, stderr, sql) = run(password);
            assert!(
                !is_done && stderr.contains("tallyd.mysql-password") && stderr.contains(expected),
                "{password:?}: {stderr}"
            );
            assert_eq!(sql, "", "{password:?}");
        }
        let (is_done, stderr, sql) = run(Some("Secret-1\n"));
        assert!(is_done, "{stderr}");
        has(&sql, &["CREATE USER 'tallyd'@'%' IDENTIFIED BY 'Secret-1';\n", "IDENTIFIED BY 'Ab1._~-';\n"]);
        has(&sql, &["INDEX ON `a\\_b`.* TO", "DROP ON a_b.recent_delta TO"]);
    }

    #[test]
    fn a_shell_reads_the_script_without_complaint() {
        let text = accounts(&plan(&daemon(["h", "h", "h"]), Facts::default()));
        let mut shell = Command::new("sh").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut shell.stdin.take().unwrap(), text.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
    }
}
