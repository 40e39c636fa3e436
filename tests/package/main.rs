//! The Debian package of this build, made by dev/package. The tests install, upgrade, remove and purge the package on a
//! separate machine.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod complete;
mod image;
mod kubernetes;
mod machine;
mod service;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use machine::Machine;
use tallyd_testkit as common;

/// A package of this build, and its path.
struct Package {
    folder: tempfile::TempDir,
    file: PathBuf,
}

impl Package {
    /// Returns a copy of the package that the first test of a run builds. The other tests wait for this package.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let run = std::env::var("NEXTEST_RUN_ID").unwrap_or_else(|_| format!("process-{}", std::process::id()));
        let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/package-tests");
        fs::create_dir_all(&all).unwrap();
        let lock = File::create(all.join("lock")).unwrap();
        lock.lock().unwrap();
        let shared = all.join(&run);
        if !shared.exists() {
            let older = fs::read_dir(&all).unwrap().map(|entry| entry.unwrap().path());
            older.filter(|path| path.is_dir()).for_each(|path| fs::remove_dir_all(path).unwrap());
            let built = all.join("building");
            build(&built);
            fs::rename(built, &shared).unwrap();
        }
        let made = fs::read_dir(shared).unwrap().next().unwrap().unwrap();
        let file = folder.path().join(made.file_name());
        fs::copy(made.path(), &file).unwrap();
        Self { folder, file }
    }

    /// Makes a package of a later version, whose configuration has one more comment.
    fn next(&self) -> PathBuf {
        let (whole, file) = (self.folder.path().join("next"), self.folder.path().join("next.deb"));
        let script = "set -e
            dpkg-deb --raw-extract \"$1\" \"$2\"
            sed -i 's/^Version: .*/Version: 1.1-1/' \"$2/DEBIAN/control\"
            echo '# A comment that is new.' >>\"$2/etc/tallyd/config.toml\"
            dpkg-deb --root-owner-group -Zgzip -z1 --build \"$2\" \"$3\"";
        let paths = [self.file.as_path(), &whole, &file];
        let output = Command::new("sh").args(["-c", script, "sh"]).args(paths).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        file
    }
}

/// Builds a package in `folder`, and returns the package's path.
fn build(folder: &Path) -> PathBuf {
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("dev/package"))
        .args(["--fast", "--version", "1.0-1", "--binary", env!("CARGO_BIN_EXE_tallyd"), "--output"])
        .arg(folder)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(said.trim_end())
}

/// Returns mode, owner and group of a file.
fn stat(machine: &Machine, path: &str) -> String {
    machine.run(&format!("stat -c '%a %U:%G' '{path}'")).trim_end().to_owned()
}

#[test]
fn the_package_brings_all_files_with_their_owners_and_starts_nothing() {
    let package = Package::new();
    let machine = Machine::new(package.folder.path());
    let said = machine.install(&package.file);
    assert!(said.contains("tallyd is installed and not started"), "{said}");
    for (path, expected) in [
        ("/usr/bin/tallyd", "755 root:root"),
        ("/etc/tallyd/config.toml", "640 root:tallyd"),
        ("/usr/lib/systemd/system/tallyd.service", "644 root:root"),
        ("/usr/lib/systemd/system/tallyd-gateway.service", "644 root:root"),
        ("/usr/share/man/man1/tallyd.1.gz", "644 root:root"),
        ("/usr/share/man/man1/tallyd-reconcile.1.gz", "644 root:root"),
        ("/usr/share/bash-completion/completions/tallyd", "644 root:root"),
        ("/usr/share/zsh/vendor-completions/_tallyd", "644 root:root"),
        ("/usr/share/fish/vendor_completions.d/tallyd.fish", "644 root:root"),
        ("/usr/share/tallyd/lua/like.lua", "644 root:root"),
        ("/usr/share/doc/tallyd/docs/operations/install.md", "644 root:root"),
        ("/usr/share/doc/tallyd/ops/prometheus/tallyd.rules.yml", "644 root:root"),
        ("/usr/share/doc/tallyd/ops/grafana/tallyd.json", "644 root:root"),
        ("/usr/share/doc/tallyd/clients/python/pyproject.toml", "644 root:root"),
        ("/usr/share/doc/tallyd/clients/python/src/tallyd/py.typed", "644 root:root"),
        ("/usr/share/doc/tallyd/copyright", "644 root:root"),
    ] {
        assert_eq!(stat(&machine, path), expected, "{path}");
    }
    assert_eq!(machine.run("getent passwd tallyd tallyd-gateway | cut -d: -f6,7"), "/:/usr/sbin/nologin\n".repeat(2));
    assert_eq!(machine.run("dpkg --verify tallyd"), "");
    machine.run("cmp /etc/tallyd/config.toml /usr/share/doc/tallyd/config.toml");
    machine.run("setpriv --reuid tallyd --regid tallyd --init-groups tallyd config check --offline");
    machine.run("! setpriv --reuid nobody --regid nogroup --clear-groups cat /etc/tallyd/config.toml 2>/dev/null");
    assert_eq!(machine.run("systemctl is-enabled tallyd.service || true"), "disabled\n");
    documents_lead_somewhere(&machine);
}

#[test]
fn an_upgrade_takes_the_new_configuration_or_keeps_one_that_was_changed() {
    let package = Package::new();
    let (next, machine) = (package.next(), Machine::new(package.folder.path()));
    machine.install(&package.file);
    machine.install(&next);
    assert!(machine.run("cat /etc/tallyd/config.toml").contains("that is new"));
    assert_eq!(stat(&machine, "/etc/tallyd/config.toml"), "640 root:tallyd");
    // An administrator either replaced the configuration with a copy that the daemon cannot read, or gave the file
    // another group.
    for (given, kept) in [("root", "640 root:tallyd"), ("adm", "640 root:adm")] {
        machine.run(&format!("chgrp {given} /etc/tallyd/config.toml"));
        machine.install(&next);
        assert_eq!(stat(&machine, "/etc/tallyd/config.toml"), kept);
    }

    machine.run("dpkg --purge tallyd 2>&1");
    machine.install(&package.file);
    machine.run("sed -i 's/^drain_max_s = .*/drain_max_s = 30/' /etc/tallyd/config.toml");
    machine.run("systemctl enable tallyd.service 2>&1");
    machine.install(&next);
    let config = machine.run("cat /etc/tallyd/config.toml");
    assert!(config.contains("drain_max_s = 30") && !config.contains("that is new"), "{config}");
    assert_eq!(stat(&machine, "/etc/tallyd/config.toml"), "640 root:tallyd");
    assert!(machine.run("cat /etc/tallyd/config.toml.dpkg-dist").contains("that is new"));
    assert_eq!(machine.run("dpkg --verify tallyd || true"), "??5?????? c /etc/tallyd/config.toml\n");
    assert_eq!(machine.run("systemctl is-enabled tallyd.service"), "enabled\n");
}

#[test]
fn a_removed_package_leaves_its_configuration_and_a_purged_one_nothing() {
    let package = Package::new();
    let machine = Machine::new(package.folder.path());
    machine.install(&package.file);
    machine.run("systemctl enable tallyd.service 2>&1 && touch /etc/tallyd/ca.pem");
    machine.run("dpkg --remove tallyd 2>&1");
    machine.run("test -e /etc/tallyd/config.toml && ! test -e /usr/bin/tallyd");
    machine.install(&package.file);
    assert_eq!(stat(&machine, "/etc/tallyd/config.toml"), "640 root:tallyd");
    assert_eq!(machine.run("systemctl is-enabled tallyd.service"), "enabled\n", "the unit must be enabled");
    machine.run("dpkg --remove tallyd 2>&1 && dpkg --purge tallyd 2>&1");
    assert_eq!(machine.left(), "");
    machine.run("! test -e /etc/tallyd && ! test -e /usr/share/doc/tallyd && ! test -e /usr/share/tallyd");
}

/// Checks that each link of a document in the package leads to a file of the package.
fn documents_lead_somewhere(machine: &Machine) {
    // Links to sources, licences and the changelog are left out, because Debian has these files elsewhere.
    let left_out = [
        "CHANGELOG.md",
        "LICENSE-",
        "compose.yaml",
        "src/",
        "crates/",
        "tests/",
        "benches/",
        "dev/",
        "migrations",
        "systemd/",
        "examples/",
        "packaging/",
    ];
    let mut paths = String::new();
    for document in machine.run("cd /usr/share/doc/tallyd && find . -name '*.md'").lines() {
        let text = machine.run(&format!("cat /usr/share/doc/tallyd/{document}"));
        let folder = Path::new(document).parent().unwrap().display();
        for link in text.split("](").skip(1).map(|rest| rest.split([')', '#']).next().unwrap()) {
            let local = !link.is_empty() && !link.starts_with("http");
            if local && !left_out.iter().any(|folder| link.trim_start_matches("../").starts_with(folder)) {
                paths.push_str(&format!(" '{folder}/{link}'"));
            }
        }
    }
    machine.run(&format!("cd /usr/share/doc/tallyd && ls -d {paths} >/dev/null"));
}

#[test]
fn the_same_sources_make_the_same_package() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = [Package::new().file, build(folder.path())].map(|file| fs::read(file).unwrap());
    assert!(one == two, "{} and {} bytes", one.len(), two.len());
}

#[test]
fn lintian_finds_nothing_in_the_package() {
    let package = Package::new();
    let output = Command::new("lintian")
        .args(["--fail-on", "warning", "--allow-root"])
        .arg(&package.file)
        .output()
        .expect("lintian can't be run: apt-get install lintian (dev/test does)");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.is_empty(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}
