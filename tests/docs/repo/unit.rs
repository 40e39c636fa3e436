//! Compares systemd's units with the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tallyd::cli;
use tallyd_base::config::Config;
use tallyd_gateway::config::{GATEWAY_PATH, GatewayConfig};

use super::settings::complaint;
use super::{parsed, read, with_examples};

const UNITS: [&str; 2] = ["tallyd.service", "tallyd-gateway.service"];

fn settings(name: &str) -> Vec<String> {
    settings_of("tallyd.service", name)
}

fn settings_of(unit: &str, name: &str) -> Vec<String> {
    let unit = read(format!("systemd/{unit}"));
    unit.lines().filter_map(|line| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned())).collect()
}

/// Copies the unit and the built program into the folder. The unit keeps its name and starts that program.
fn built_unit(name: &str, folder: &Path) -> PathBuf {
    let program = folder.join("tallyd");
    fs::copy(env!("CARGO_BIN_EXE_tallyd"), &program).unwrap();
    let unit = folder.join(name);
    let text = read(format!("systemd/{name}")).replace("/usr/bin/tallyd", program.to_str().unwrap());
    fs::write(&unit, text).unwrap();
    unit
}

fn systemd_analyze(arguments: &[&str], unit: &Path) -> (bool, String) {
    let output = Command::new("systemd-analyze")
        .args(arguments)
        .arg(unit)
        .output()
        .expect("systemd-analyze can't be run: apt-get install systemd (dev/test does)");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn the_unit_file_is_valid() {
    for unit in UNITS {
        let folder = tempfile::tempdir().unwrap();
        let (valid, said) = systemd_analyze(&["verify", "--man=no"], &built_unit(unit, folder.path()));
        assert!(valid && !said.contains(unit), "{said}");
    }
}

#[test]
fn the_unit_may_do_no_more_than_it_needs() {
    for unit in UNITS {
        let folder = tempfile::tempdir().unwrap();
        // systemd's exposure score must be at most 1.2, like the score of Redis' unit. The argument is in tenths.
        let arguments = ["security", "--offline=yes", "--no-pager", "--threshold=12"];
        let (narrow, said) = systemd_analyze(&arguments, &built_unit(unit, folder.path()));
        assert!(narrow, "{said}");
    }
}

#[test]
fn the_unit_calls_the_program_as_it_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, read("config.toml")).unwrap();
    let start = settings("ExecStart")[0].clone();
    let start = start.strip_suffix(" run").unwrap();
    let check = settings("ExecStartPre")[0].strip_prefix('-').unwrap().to_owned();
    assert_eq!(check, format!("{start} config check --offline"));
    let arguments = check.replace("/etc/tallyd/config.toml", file.to_str().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
    let output = command.args(arguments.split(' ').skip(1)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_unit_waits_longer_than_the_drain_takes() {
    let seconds = |name: &str| settings(name)[0].strip_suffix('s').unwrap().parse::<u64>().unwrap();
    let drain = Config::default().daemon.drain_max_s;
    let too_long = seconds("TimeoutStopSec") - 9;
    assert!(complaint("drain_max_s", &format!("drain_max_s = {drain}"), too_long).is_some(), "{too_long} s is allowed");
    // The daemon feeds the watchdog three times in each `WatchdogSec`, but not while it writes the last batches at a
    // stop.
    assert!(seconds("WatchdogSec") * 2 / 3 > drain);
}

#[test]
fn the_unit_restarts_all_but_what_no_restart_helps() {
    assert_eq!(settings("Restart"), ["always"]);
    assert_eq!(settings("StartLimitIntervalSec"), ["0"]);
    assert_eq!(settings("RestartPreventExitStatus"), [format!("{} {}", cli::EXIT_USAGE, cli::EXIT_CONFIG)]);
}

#[test]
fn the_gateways_unit_is_narrowed_as_the_daemons_is() {
    let hardening = |unit: &str| {
        let text = read(format!("systemd/{unit}"));
        text.split_once("\nCapabilityBoundingSet=").unwrap().1.to_owned()
    };
    assert_eq!(hardening(UNITS[1]), hardening(UNITS[0]));
    for name in ["Type", "DynamicUser", "UMask", "LimitCORE", "Restart", "RestartPreventExitStatus"] {
        assert_eq!(settings_of(UNITS[1], name), settings_of(UNITS[0], name), "{name}");
    }
    assert_eq!(settings_of(UNITS[1], "ExecStart"), [format!("/usr/bin/tallyd --config {GATEWAY_PATH} gateway")]);
    let files: usize = settings_of(UNITS[1], "LimitNOFILE")[0].parse().unwrap();
    assert!(files >= GatewayConfig::default().gateway.connections_max + 1_000, "{files}");
}

#[test]
fn the_gateway_has_a_user_of_its_own_and_no_secret_of_the_daemon() {
    let users = UNITS.map(|unit| settings_of(unit, "User").concat());
    assert_ne!(users[0], users[1]);
    let made = read("packaging/sysusers.d/tallyd.conf");
    let made: Vec<_> = made.lines().filter_map(|line| line.strip_prefix("u ")?.split(' ').next()).collect();
    assert_eq!(made, users);
    let script = read("packaging/rpm/pre-install.sh");
    assert!(users.iter().all(|user| script.contains(&format!("\nmake_user {user} "))), "{script}");

    let of_daemon = settings("LoadCredential");
    let of_gateway = settings_of(UNITS[1], "LoadCredential");
    let sources = of_gateway.iter().map(|credential| credential.split(':').next_back().unwrap().to_owned());
    // Clients of a sentinel share its password.
    let shared: Vec<_> = sources.filter(|file| of_daemon.contains(file)).collect();
    assert_eq!(shared, ["tallyd.sentinel-password"]);
}

#[test]
fn the_gateways_unit_passes_the_credentials_that_gateway_toml_names() {
    let manual = read("docs/gateway.md");
    let (_, sample) = manual.split_once("```toml\n").unwrap();
    let sample: toml::Table = sample.split_once("```").unwrap().0.parse().unwrap();
    let mut named: Vec<_> = sample.values().filter_map(|keys| keys.get("password_file")?.as_str()).collect();
    named.dedup();
    let config = parsed(&with_examples()).unwrap();
    let (amqp, mysql, redis) = (config.amqp, config.mysql, config.redis);
    let files =
        [redis.sentinel_password_file, amqp.login.tls_key_file, mysql.login.tls_key_file, redis.login.tls_key_file];
    named.extend(files.iter().map(|file| file.as_deref().unwrap()).chain(["tallyd.gateway-token"]));
    let passed = settings_of(UNITS[1], "LoadCredential");
    let passed: Vec<_> = passed.iter().map(|credential| credential.split(':').next().unwrap()).collect();
    assert_eq!(passed, named);
}

/// One partition needs 256 MiB, and each further partition needs 128 MiB (tests/it/limits). To parse the deepest
/// headers, each partition needs another 48 MiB for its stack.
#[test]
fn the_unit_has_memory_for_four_partitions() {
    let gib: u64 = settings("MemoryMax")[0].strip_suffix('G').unwrap().parse().unwrap();
    assert!(gib * 1_024 >= 256 + 3 * 128 + 4 * 48, "{gib} GiB");
}

#[test]
fn the_unit_reloads_by_the_signal_that_the_daemon_reloads_at() {
    // systemd 252 supports this type, but not `notify-reload`.
    assert_eq!(settings("Type"), ["notify"]);
    assert_eq!(settings("ExecReload"), ["/bin/kill -HUP $MAINPID"]);
}

#[test]
fn the_unit_passes_the_credentials_that_config_toml_names() {
    let config = parsed(&with_examples()).unwrap();
    let (amqp, mysql, redis) = (config.amqp, config.mysql, config.redis);
    let passwords =
        [amqp.login.password_file, mysql.login.password_file, redis.login.password_file, redis.sentinel_password_file];
    let keys = [amqp.login.tls_key_file, mysql.login.tls_key_file, redis.login.tls_key_file, config.admin.token_file];
    let files: Vec<Option<String>> = passwords.into_iter().chain(keys).collect();
    assert_eq!(settings("LoadCredential"), files.into_iter().map(Option::unwrap).collect::<Vec<_>>());
}
