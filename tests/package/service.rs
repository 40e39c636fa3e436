//! The daemon as the package has systemd run it.

use std::process::Stdio;

use super::common::{World, eventually};
use super::{Machine, Package};

/// Stands for systemd, which can't be a second one here: says that the daemon runs, and notes what it is told to do.
const SYSTEMCTL: &str = "#!/bin/sh\necho \"$(basename $0) $*\" >>/tmp/told\n";

/// Installs the package as the manual says: the configuration names servers, the passwords are credentials.
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
    // Into the file that is there, so that it keeps its owner.
    machine.write("/etc/tallyd/config.toml", &text);
}

fn setting(machine: &Machine, name: &str) -> String {
    machine.run(&format!("sed -n 's/^{name}=-\\?//p' /usr/lib/systemd/system/tallyd.service")).trim_end().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_units_command_runs_as_its_user_with_the_installed_configuration() {
    let world = World::new("package_unit", "").await;
    let package = Package::new();
    let machine = Machine::new(package.folder.path());
    machine.install(&package.file);
    configure(&machine, &world);
    // systemd gives the daemon the credentials in a folder that it alone can read.
    machine.run(
        "mkdir /run/credentials && cp /etc/credstore/tallyd.* /run/credentials && chown -R tallyd: /run/credentials",
    );
    let user = setting(&machine, "User");
    let as_user = format!(
        "export CREDENTIALS_DIRECTORY=/run/credentials; exec setpriv --reuid {user} --regid {user} --init-groups --no-new-privs "
    );
    machine.run(&format!("{as_user}{}", setting(&machine, "ExecStartPre")));
    let mut command = machine.command(&format!("{as_user}{} 2>>/tmp/log", setting(&machine, "ExecStart")));
    let mut daemon = command.stdin(Stdio::null()).spawn().unwrap();
    eventually("it listens to the queue", || async {
        machine.run("touch /tmp/log && cat /tmp/log").contains("\"consuming\"")
    })
    .await;
    machine.run("pkill -TERM -u tallyd -x tallyd");
    assert!(daemon.wait().unwrap().success(), "{}", machine.run("cat /tmp/log"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_restarts_the_daemon_only_if_the_new_version_can_run() {
    let world = World::new("package_upgrade", "").await;
    let package = Package::new();
    let next = package.next();
    let machine = Machine::new(package.folder.path());
    machine.install(&package.file);
    configure(&machine, &world);
    for program in ["systemctl", "deb-systemd-invoke"] {
        machine.write(&format!("/usr/local/bin/{program}"), SYSTEMCTL);
        machine.run(&format!("chmod 755 /usr/local/bin/{program}"));
    }
    machine.run("mkdir -p /run/systemd/system");
    let told = || machine.run("touch /tmp/told && cat /tmp/told && rm /tmp/told");

    machine.install(&next);
    assert!(told().contains("deb-systemd-invoke restart tallyd.service"));

    // The new version has a step more than the tables.
    sqlx::query("DELETE FROM _sqlx_migrations ORDER BY version DESC LIMIT 1").execute(&world.pool).await.unwrap();
    let said = machine.install(&next);
    assert!(said.contains("the former version goes on running") && said.contains("tallyd migrate"), "{said}");
    let told_then = told();
    assert!(!told_then.contains("restart") && !told_then.contains("stop"), "{told_then}");

    machine.run("dpkg --remove tallyd 2>&1");
    assert!(told().contains("deb-systemd-invoke stop tallyd.service"));
    world.close().await;
}
