//! The daemon as systemd runs it with the package's unit.

use std::process::{Child, Command, Stdio};

use super::common::first_day::FirstDay;
use super::common::{World, eventually};
use super::{Machine, Package, stat};

/// This script replaces systemctl, because a second systemd can't run here. The script reports that the daemon is
/// running, with the daemon's process id, and records the commands that it receives. While `/tmp/broken` exists, a
/// restart of a daemon fails.
const SYSTEMCTL: &str = "#!/bin/sh\necho \"$(basename $0) $*\" >>/tmp/told\n\
    case $* in *is-active*gateway*) exit 3 ;; show*) cat /tmp/pid ;; restart*) ! test -e /tmp/broken ;; esac\n";

fn stand_for_systemd(machine: &Machine) {
    for program in ["systemctl", "deb-systemd-invoke"] {
        machine.write(&format!("/usr/local/bin/{program}"), SYSTEMCTL);
        machine.run(&format!("chmod 755 /usr/local/bin/{program}"));
    }
    machine.run("mkdir -p /run/systemd/system");
}

/// Returns the commands to systemd since the last call.
fn told(machine: &Machine) -> String {
    machine.run("touch /tmp/told && cat /tmp/told && rm /tmp/told")
}

/// Installs the package as in the manual: the configuration has the servers' addresses, and the passwords are
/// credentials.
fn configure(machine: &Machine, world: &World) {
    let mut config: toml::Table = std::fs::read_to_string(world.config_path()).unwrap().parse().unwrap();
    machine.run("install -d -m 700 /etc/credstore");
    for section in ["amqp", "mysql"] {
        let settings = config[section].as_table_mut().unwrap();
        let mut url: url::Url = settings["url"].as_str().unwrap().parse().unwrap();
        let file = format!("tallyd.{section}-password");
        machine.write(&format!("/etc/credstore/{file}"), url.password().unwrap());
        url.set_password(None).unwrap();
        settings.insert("url".to_owned(), url.as_str().into());
        settings.insert("password_file".to_owned(), file.into());
    }
    let text = toml::to_string(&config).unwrap();
    // Writes to the existing file, so the file keeps its owner.
    machine.write("/etc/tallyd/config.toml", &text);
}

fn setting(machine: &Machine, name: &str) -> String {
    setting_of(machine, "tallyd", name)
}

fn setting_of(machine: &Machine, unit: &str, name: &str) -> String {
    let sed = format!("sed -n 's/^{name}=-\\?//p' /usr/lib/systemd/system/{unit}.service");
    machine.run(&sed).trim_end().to_owned()
}

/// Passes a unit's credentials as systemd does: in a folder that only the unit's user can read. Returns the folder.
fn pass_credentials(machine: &Machine, unit: &str) -> String {
    let (user, folder) = (setting_of(machine, unit, "User"), format!("/run/passed/{unit}"));
    machine.run(&format!("install -d -m 700 -o {user} {folder}"));
    for credential in setting_of(machine, unit, "LoadCredential").lines() {
        let (name, source) = credential.split_once(':').unwrap_or((credential, credential));
        let source = format!("/etc/credstore/{source}");
        machine.run(&format!("test ! -e {source} || install -m 400 -o {user} {source} {folder}/{name}"));
    }
    folder
}

/// Builds a command that runs with the daemon's user and credentials. The command writes its process id into `/tmp/pid`.
fn as_unit(machine: &Machine, environment: &str, command: &str) -> Command {
    let user = setting(machine, "User");
    machine.command(&format!(
        "echo $$ >/tmp/pid; export CREDENTIALS_DIRECTORY=/run/passed/tallyd {environment}; \
         exec setpriv --reuid {user} --regid {user} --init-groups --no-new-privs {command} 2>>/tmp/log"
    ))
}

/// Starts the daemon, and waits until it consumes.
async fn start(machine: &Machine, environment: &str, command: &str) -> Child {
    let daemon = as_unit(machine, environment, command).stdin(Stdio::null()).spawn().unwrap();
    eventually("the daemon consumes from the queue", || async {
        machine.run("touch /tmp/log && cat /tmp/log").contains("\"consuming\"")
    })
    .await;
    daemon
}

/// Stops only that daemon. The machine can run other daemons.
fn stop(machine: &Machine, mut daemon: Child) {
    machine.run("kill -TERM $(cat /tmp/pid)");
    assert!(daemon.wait().unwrap().success(), "{}", machine.run("cat /tmp/log"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_units_command_runs_as_its_user_with_the_installed_configuration() {
    let world = World::new("package_unit", "").await;
    let package = Package::new();
    let machine = Machine::new(package.folder.path());
    machine.install(&package.file);
    configure(&machine, &world);
    pass_credentials(&machine, "tallyd");
    let checked = as_unit(&machine, "", &setting(&machine, "ExecStartPre")).status().unwrap();
    assert!(checked.success(), "{}", machine.run("cat /tmp/log"));
    let daemon = start(&machine, "", &setting(&machine, "ExecStart")).await;
    stop(&machine, daemon);
}

/// Deletes the note about the last migration, as if a new version had added this migration.
async fn lack_a_migration(world: &World) {
    sqlx::query("DELETE FROM _sqlx_migrations ORDER BY version DESC LIMIT 1").execute(&world.pool).await.unwrap();
}

#[test]
fn what_the_first_installation_prints_leads_to_a_configuration() {
    let package = Package::new();
    let machine = Machine::new(package.folder.path());
    let said = machine.install(&package.file);
    let printed: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("    ")).collect();
    assert_eq!(printed, ["tallyd init"]);
    let environment = FirstDay::new("package").environment();
    let variables: Vec<String> = environment.iter().map(|(name, value)| format!("{name}='{value}'")).collect();
    let said = machine.run(&format!("{} {}", variables.join(" "), printed[0]));
    assert!(said.contains("systemctl enable --now tallyd"), "{said}");
    assert_eq!(stat(&machine, "/etc/credstore"), "700 root:root");
    assert_eq!(stat(&machine, "/etc/credstore/tallyd.mysql-password"), "600 root:root");
    pass_credentials(&machine, "tallyd");
    let checked = as_unit(&machine, "", "tallyd config check --offline").status().unwrap();
    assert!(checked.success(), "{}", machine.run("cat /tmp/log"));
    // Root's commands find the same passwords.
    machine.run("tallyd config check --offline");
    for (file, owner) in [("config.toml", "640 root:tallyd"), ("gateway.toml", "640 root:tallyd-gateway")] {
        assert_eq!(stat(&machine, &format!("/etc/tallyd/{file}")), owner);
    }
    let passed = pass_credentials(&machine, "tallyd-gateway");
    assert_eq!(machine.run(&format!("ls {passed}")), "tallyd.api-password\n");
    let user = setting_of(&machine, "tallyd-gateway", "User");
    let as_gateway = format!("setpriv --reuid {user} --regid {user} --init-groups");
    machine.run(&format!("{as_gateway} cat /etc/tallyd/gateway.toml {passed}/* >/dev/null"));
    let others = "/etc/tallyd/config.toml /etc/credstore /run/passed/tallyd";
    machine.run(&format!("for it in {others}; do ! {as_gateway} test -r $it || exit 1; done"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drop_in_admits_a_group_to_the_gateways_socket() {
    let package = Package::new();
    let machine = Machine::new(package.folder.path());
    machine.install(&package.file);
    let environment = FirstDay::new("package_socket").environment();
    let variables: Vec<String> = environment.iter().map(|(name, value)| format!("{name}='{value}'")).collect();
    machine.run(&format!("{} tallyd init", variables.join(" ")));
    let socket = "/run/tallyd-gateway/http.sock";
    machine.run(&format!("sed -i 's|^listen = .*|listen = \"unix:{socket}\"|' /etc/tallyd/gateway.toml"));
    let setting = |name: &str| {
        let sed = format!("sed -n 's/^ *{name}=//p' /usr/share/doc/tallyd/docs/gateway.md");
        machine.run(&sed).trim_end().to_owned()
    };
    let (group, more, umask) = (setting("Group"), setting("SupplementaryGroups"), setting("UMask"));
    // As systemd does for RuntimeDirectory=.
    let user = setting_of(&machine, "tallyd-gateway", "User");
    machine.run(&format!("install -d -o {user} -g {group} /run/tallyd-gateway"));
    let command = format!("exec setpriv --reuid {user} --regid {group} --groups {more} --no-new-privs");
    let credentials = format!("export CREDENTIALS_DIRECTORY={}", pass_credentials(&machine, "tallyd-gateway"));
    let command = format!(
        "{credentials}; umask {umask} && {command} tallyd --config /etc/tallyd/gateway.toml gateway 2>/tmp/log"
    );
    let mut gateway = machine.command(&format!("echo $$ >/tmp/pid; {command}")).stdin(Stdio::null()).spawn().unwrap();
    let ask = |user: &str, group: &str| {
        let curl = format!("curl --silent --fail --unix-socket {socket} http://localhost/livez");
        let user = format!("setpriv --reuid {user} --regid {group} --clear-groups");
        machine.command(&format!("{user} {curl}")).output().unwrap().status.success()
    };
    eventually("a member of the group reaches the gateway", async || ask("www-data", &group)).await;
    assert!(!ask("nobody", "nogroup"), "only the group is admitted");
    machine.run("kill -TERM $(cat /tmp/pid)");
    assert!(gateway.wait().unwrap().success(), "{}", machine.run("cat /tmp/log"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_restarts_the_daemon_only_if_the_new_version_can_run() {
    let world = World::new("package_upgrade", "").await;
    let package = Package::new();
    let next = package.next();
    let machine = Machine::new(package.folder.path());
    machine.install(&package.file);
    configure(&machine, &world);
    pass_credentials(&machine, "tallyd");
    // The test sets up the machine as if a drop-in had changed the unit. The unit then has another configuration file,
    // and one password in the environment. The other password is in a file that root's shell doesn't find.
    let config = "/etc/tallyd/other.toml";
    machine
        .run(&format!("mv /etc/tallyd/config.toml {config} && cp -p /usr/share/doc/tallyd/config.toml /etc/tallyd/"));
    machine.run("mv /etc/credstore/tallyd.mysql-password /run/mysql-password && rm -r /etc/credstore /run/passed/tallyd/tallyd.mysql*");
    let environment = "TALLYD__MYSQL__PASSWORD=\"$(cat /run/mysql-password)\"";
    let command = setting(&machine, "ExecStart").replace("/etc/tallyd/config.toml", config);
    let daemon = start(&machine, environment, &command).await;
    stand_for_systemd(&machine);

    machine.install(&next);
    assert!(told(&machine).contains("deb-systemd-invoke restart tallyd.service"));

    machine.run("touch /tmp/broken");
    let said = machine.install(&next);
    assert!(said.contains("did not start") && told(&machine).contains("restart"), "{said}");
    assert_eq!(machine.run("dpkg-query --show --showformat '${Status}' tallyd"), "install ok installed");

    lack_a_migration(&world).await;
    let said = machine.install(&next);
    assert!(said.contains("THE FORMER VERSION KEEPS RUNNING") && said.contains("tallyd migrate"), "{said}");
    let told_then = told(&machine);
    assert!(!told_then.contains("restart") && !told_then.contains("stop"), "{told_then}");

    stop(&machine, daemon);
    machine.run("dpkg --remove tallyd 2>&1");
    assert!(told(&machine).contains("deb-systemd-invoke stop tallyd-gateway.service tallyd.service"));
}
