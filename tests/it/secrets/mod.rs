//! No output of tallyd contains passwords, keys or tokens. The tests use secrets in all possible places, and search all
//! output for these secrets, also in other encodings.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod rights;
mod rotated;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::accounts::{PASSWORD, without_password};
use common::{Daemon, World, eventually, target};
use tallyd_base::config::Config;
use tallyd_core::model::UserId;
use tallyd_mysql::Store;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Every secret that the tests use contains this text.
const PLANTED: &str = "s3cr3t";

const TOKEN: &str = "s3cr3t-token-of-a-test";

/// The recorded output. Each entry has two values: the source of an output, and the text of the output.
#[derive(Default)]
struct Shown(Vec<(String, String)>);

impl Shown {
    fn note(&mut self, place: impl Into<String>, text: impl AsRef<[u8]>) {
        self.0.push((place.into(), String::from_utf8_lossy(text.as_ref()).into_owned()));
    }

    /// Runs a command, and records its output.
    fn run(&mut self, world: &World, arguments: &[&str], environment: &[(&str, &str)]) {
        let output = world
            .command()
            .args(arguments)
            .env("RUST_LOG", "trace")
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        let place = format!("{arguments:?} {:?}", environment.iter().map(|(name, _)| name).collect::<Vec<_>>());
        self.note(format!("stdout of {place}"), &output.stdout);
        self.note(format!("stderr of {place}"), &output.stderr);
    }

    /// Fails if any recorded output contains a secret.
    fn assert_clean(&self, more: &[String]) {
        assert!(
            self.0.iter().map(|(_, text)| text.len()).sum::<usize>() > 10_000,
            "there is too little output for a meaningful search"
        );
        let planted: Vec<String> = ways_of_writing(PLANTED).into_iter().chain(more.iter().cloned()).collect();
        for (place, text) in &self.0 {
            let found: Vec<(&String, usize)> =
                planted.iter().filter_map(|planted| text.find(planted.as_str()).map(|at| (planted, at))).collect();
            for (planted, at) in &found {
                let from = text.char_indices().map(|(at, _)| at).take_while(|it| it + 300 < *at).last().unwrap_or(0);
                eprintln!("{place} shows {planted}:\n{}", text[from..].chars().take(600).collect::<String>());
            }
            assert!(found.is_empty(), "{place} shows a secret");
        }
    }
}

/// Returns the text unchanged, as hex, as decimal bytes, and as three versions of base64. The base64 text depends on
/// the number of bytes before the text, so there are three versions.
fn ways_of_writing(text: &str) -> Vec<String> {
    let bytes = text.as_bytes();
    let numbers: Vec<String> = bytes.iter().map(u8::to_string).collect();
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut ways = vec![text.to_owned(), numbers.join(", "), numbers.join(","), hex.to_uppercase(), hex];
    for before in 0..3 {
        let encoded = BASE64_STANDARD.encode([vec![0; before], bytes.to_vec()].concat());
        // The first and last base64 letters can also depend on bytes next to the text, so this function removes them.
        let (from, to) = ((before * 8).div_ceil(6), (before + bytes.len()) * 8 / 6);
        ways.push(encoded[from..to].to_owned());
    }
    ways
}

fn file(world: &World, name: &str, text: &str) -> String {
    let path = world.folder.path().join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Returns settings with the addresses of all servers, without passwords. The result of `more` is added to each
/// server's section.
fn settings(world: &World, more: impl Fn(&str) -> String, rest: &str) -> String {
    let accounts = world.accounts.as_ref().unwrap();
    let of = |section: &str, url: &str| {
        format!("[{section}]\nurl = \"{}\"\n{}", without_password(&accounts.of_daemon(url)), more(section))
    };
    let config = &world.config;
    [("amqp", config.amqp.url.expose()), ("mysql", config.mysql.url.expose()), ("redis", config.redis.url.expose())]
        .map(|(section, url)| of(section, url))
        .concat()
        + rest
}

async fn get(address: &str, path: &str, token: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// Requests all paths of the admin port.
async fn look(shown: &mut Shown, daemon: &Daemon) {
    daemon.logged("the admin port is ").await;
    let log = daemon.log();
    let address = log.split("the admin port is ").nth(1).unwrap().split(['"', ' ', '\n']).next().unwrap().to_owned();
    for path in ["/", "/metrics", "/livez", "/readyz", "/v1/status", "/v1/history", "/v1/counters/video/1"] {
        shown.note(path, get(&address, path, TOKEN).await);
        shown.note(path, get(&address, path, "s3cr3t-but-another-one").await);
    }
    shown.note("cmdline", fs::read(format!("/proc/{}/cmdline", daemon.child.id())).unwrap());
}

/// Runs a daemon and all commands. `environment` and the settings define where the passwords come from.
async fn work(shown: &mut Shown, world: &World, environment: &[(&str, &str)], likes: i64) {
    let trace =
        [environment, &[("RUST_LOG", "trace,lapin=trace,sqlx=trace,redis=trace,rustls=trace,hyper=trace")]].concat();
    let daemon = world.daemon_with(&trace);
    daemon.logged("listening on ").await;
    let client = world.api_server();
    client.like(target(1), UserId(likes.unsigned_abs()), &[]).await.unwrap();
    eventually("the like is in MySQL", || async {
        world.count("SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter").await == likes
    })
    .await;
    look(shown, &daemon).await;
    for arguments in [
        vec!["config", "check"],
        vec!["config", "check", "--format", "json"],
        vec!["config", "show"],
        vec!["config", "show", "--origin"],
        vec!["config", "show", "--origin", "--format", "json"],
        vec!["reconcile", "--full"],
        vec!["show", "video:1"],
        vec!["status"],
        vec!["dead", "list"],
    ] {
        shown.run(world, &arguments, &trace);
    }
    daemon.signal("HUP");
    daemon.logged("the configuration was reloaded").await;
    shown.note("the log", daemon.log());
}

/// Runs commands with wrong passwords, unreachable servers and invalid settings, and records their output.
async fn fail(shown: &mut Shown, world: &World) {
    let closed = "127.0.0.1:1";
    let wrong = ["AMQP", "MYSQL", "REDIS"].map(|section| format!("TALLYD__{section}__PASSWORD"));
    let wrong: Vec<(&str, &str)> = wrong.iter().map(|name| (name.as_str(), "s3cr3t-but-wrong%/@#")).collect();
    let sentinel = file(world, "sentinel-password", "s3cr3t-of-sentinels");
    let sentinels =
        [("TALLYD__REDIS__SENTINELS", "[\"127.0.0.1:1\"]"), ("TALLYD__REDIS__SENTINEL_PASSWORD_FILE", &sentinel)];
    let away = [
        ("TALLYD__AMQP__URL", format!("amqp://tallyd:s3cr3t@{closed}/%2f?token=s3cr3t")),
        ("TALLYD__MYSQL__URL", format!("mysql://tallyd:s3cr3t@{closed}/t?password=s3cr3t")),
        ("TALLYD__REDIS__URL", format!("redis://tallyd:s3cr3t@{closed}/0")),
    ];
    let away: Vec<(&str, &str)> = away.iter().map(|(name, url)| (*name, url.as_str())).collect();
    let unusable = [
        ("TALLYD__AMQP__URL", "amqp://tallyd:s3cr3t@"),
        ("TALLYD__MYSQL__URL", "mysql://u:s3cr3t@h#s3cr3t"),
        ("TALLYD__REDIS__URL", "redis://:s3cr3t#s3cr3t@h:s3cr3t/0"),
        ("TALLYD__ADMIN__TOKEN", "s3cr3t"),
    ];
    for environment in [wrong.as_slice(), &sentinels, &away, &unusable] {
        let environment = [environment, &[("TALLYD__MYSQL__CONNECT_TIMEOUT_MS", "500")]].concat();
        for arguments in
            [vec!["config", "check"], vec!["reconcile"], vec!["show", "video:1"], vec!["config", "show", "--origin"]]
        {
            shown.run(world, &arguments, &environment);
        }
    }
    let daemon = world.daemon_with(&[wrong.as_slice(), &[("RUST_LOG", "trace")]].concat());
    daemon.logged("mysql-away").await;
    look(shown, &daemon).await;
    shown.note("the log of a daemon with wrong passwords", daemon.log());
    daemon.kill();
}

/// Makes a key and its certificate. Returns the paths of both files, and the texts that would reveal the key.
fn key(world: &World) -> (String, String, Vec<String>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["tallyd".to_owned()]).unwrap().self_signed(&key).unwrap();
    let pem = key.serialize_pem();
    // The first line is the same in all keys.
    let lines = pem.lines().filter(|line| !line.starts_with("---")).skip(1).map(str::to_owned);
    let secret = &key.serialize_der()[40..60];
    let numbers: Vec<String> = secret.iter().map(u8::to_string).collect();
    let planted = lines.chain([numbers.join(", ")]).collect();
    (file(world, "certificate.pem", &certificate.pem()), file(world, "key.pem", &pem), planted)
}

fn loaded(path: &Path) -> Config {
    tallyd_base::config::load(path).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_is_in_logs_errors_commands_answers_or_the_command_line() {
    let world = World::new("secrets", "").await;
    let mut shown = Shown::default();
    let (token, password) = (file(&world, "token", TOKEN), file(&world, "password", PASSWORD));
    let rest = |format: &str| {
        format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"{token}\"\n[log]\nformat = \"{format}\"\n[reconcile]\nwatch_every = \"1s\"\n"
        )
    };
    // The test first puts the passwords into the addresses. Later it puts the passwords into files, and at last into
    // the environment.
    world.write(&rest("json"));
    work(&mut shown, &world, &[], 1).await;
    world.write(&settings(&world, |_| format!("password_file = \"{password}\"\n"), &rest("text")));
    work(&mut shown, &world, &[], 2).await;
    world.write(&settings(&world, |_| String::new(), &rest("json")));
    let variables = ["AMQP", "MYSQL", "REDIS"].map(|section| format!("TALLYD__{section}__PASSWORD"));
    let environment: Vec<(&str, &str)> = variables.iter().map(|name| (name.as_str(), PASSWORD)).collect();
    work(&mut shown, &world, &environment, 3).await;
    fail(&mut shown, &world).await;

    let (certificate, key, of_key) = key(&world);
    let tls = format!("tls_cert_file = \"{certificate}\"\ntls_key_file = \"{key}\"\n");
    let text = format!(
        "[amqp]\nurl = \"amqps://u:s3cr3t@127.0.0.1:1/%2f\"\n{tls}[mysql]\nurl = \"mysql://u:s3cr3t@127.0.0.1:1/t\"\n{tls}\
         [redis]\nurl = \"rediss://u:s3cr3t@127.0.0.1:1/0\"\n{tls}"
    );
    world.write(&text);
    for arguments in [vec!["config", "check"], vec!["config", "show", "--origin"], vec!["config", "schema"]] {
        shown.run(&world, &arguments, &[]);
    }
    let config = loaded(&world.config_path());
    shown.note("Debug", format!("{config:?} {config:#?} {:?}", Store::new(&config.mysql, 1).unwrap()));
    // If an operator sets the key's file instead of a certificate by mistake, an error could also reveal the key.
    world.write(&text.replace(&certificate, &key).replace("tls_key_file", "tls_ca_file"));
    shown.run(&world, &["config", "check"], &[]);
    world.write(&text.replace(&format!("tls_key_file = \"{key}\""), &format!("tls_key_file = \"{certificate}\"")));
    shown.run(&world, &["config", "check"], &[]);
    shown.assert_clean(&of_key);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_aborted_leaves_no_core_dump() {
    let world = World::new("secrets_core", "").await;
    let tallyd = format!(
        "ulimit -c unlimited; exec {} --config {} run",
        env!("CARGO_BIN_EXE_tallyd"),
        world.config_path().display()
    );
    let log = fs::File::create(world.folder.path().join("log")).unwrap();
    let mut child = Command::new("sh")
        .args(["-c", &tallyd])
        .env_remove("NOTIFY_SOCKET")
        .current_dir(world.folder.path())
        .stderr(log)
        .spawn()
        .unwrap();
    let said = || fs::read_to_string(world.folder.path().join("log")).unwrap();
    eventually("the daemon consumes", || async { said().contains("\"consuming\"") }).await;
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    // The watchdog of systemd sends this signal to a daemon that hangs.
    let sent = Command::new("kill").args(["-ABRT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let status = child.wait().unwrap();
    assert_eq!((status.signal(), status.core_dumped()), (Some(6), false));
}

/// Runs the program without root's special rights, because root can read every file.
fn without_powers(program: &str) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-all", "--inh-caps", "-all", program]);
    command
}

/// A program that stops when it is dropped.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns true if another program of the same user can read this file of the process.
fn is_readable(process: &Child, file: &str) -> bool {
    let mut command = without_powers("cat");
    command.arg(format!("/proc/{}/{file}", process.id())).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().unwrap().success()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_user_reads_neither_the_environment_nor_the_memory_map_of_a_daemon() {
    let world = World::new("secrets_user", "").await;
    let other = Ends(without_powers("sleep").arg("600").spawn().unwrap());
    let log = world.folder.path().join("log");
    let mut command = without_powers(env!("CARGO_BIN_EXE_tallyd"));
    command.arg("--config").arg(world.config_path()).arg("run").env_remove("NOTIFY_SOCKET");
    let daemon = Ends(command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap());
    eventually("the daemon consumes", || async { fs::read_to_string(&log).unwrap().contains("\"consuming\"") }).await;
    for file in ["environ", "maps", "auxv"] {
        // The other process has no protection, so its file must be readable. This shows that the check works.
        eventually("the other program's file is read", || async { is_readable(&other.0, file) }).await;
        assert!(!is_readable(&daemon.0, file), "{file}");
    }
    drop(daemon);
}
