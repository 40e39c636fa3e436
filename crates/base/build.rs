//! Passes the revision, the compiler and the target to the program (`src/version.rs`).
//!
//! The revision is the value of `TALLYD_REVISION`, the text that `git archive` wrote into `packaging/revision`, or the
//! commit of the checkout. Only a release build runs git. Otherwise each commit would compile the daemon and all its
//! tests again.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The repository, from this crate.
const ROOT: &str = "../..";

const ARCHIVED: &str = "packaging/revision";

/// The program's sources. When a source changes, cargo compiles the program again.
const SOURCES: [&str; 7] = ["Cargo.toml", "Cargo.lock", "src", "crates", "lua", "migrations", "ops"];

fn main() -> std::io::Result<()> {
    env::set_current_dir(ROOT)?;
    println!("cargo:rerun-if-env-changed=TALLYD_REVISION");
    println!("cargo:rerun-if-changed=build.rs");
    watch(ARCHIVED);
    let revision = given().or_else(archived).or_else(checked_out).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=TALLYD_BUILD_REVISION={revision}");
    println!("cargo:rustc-env=TALLYD_BUILD_RUSTC={}", compiler().unwrap_or_else(|| "unknown".to_owned()));
    println!("cargo:rustc-env=TALLYD_BUILD_TARGET={}", env::var("TARGET").unwrap_or_default());
    Ok(())
}

fn given() -> Option<String> {
    env::var("TALLYD_REVISION").ok().and_then(word)
}

fn archived() -> Option<String> {
    // In a checkout, `packaging/revision` contains a placeholder with a dollar sign.
    fs::read_to_string(ARCHIVED).ok().and_then(word).filter(|text| !text.contains('$'))
}

fn checked_out() -> Option<String> {
    // If the sources were unpacked inside another project's repository, the commit of that repository must not be used.
    if env::var("PROFILE").ok()? != "release" || !git(&["rev-parse", "--show-cdup"])?.is_empty() {
        return None;
    }
    let heads = ["HEAD", "logs/HEAD"].into_iter().filter_map(|name| git(&["rev-parse", "--git-path", name]));
    heads.chain(SOURCES.map(str::to_owned)).for_each(|path| watch(&path));
    let revision = word(git(&["rev-parse", "--short=12", "HEAD"])?)?;
    let changed = git(&[&["status", "--porcelain", "--"], &SOURCES[..]].concat())?;
    Some(if changed.is_empty() { revision } else { format!("{revision}-dirty") })
}

/// Skips a missing path: if cargo watched it, cargo would run this script at every build.
fn watch(path: &str) {
    if Path::new(path).exists() {
        println!("cargo:rerun-if-changed={ROOT}/{path}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    output("git", arguments)
}

/// `1.95.0` of `rustc 1.95.0 (59807616e 2026-04-14)`.
fn compiler() -> Option<String> {
    output(&env::var("RUSTC").ok()?, &["--version"])?.split_whitespace().nth(1).map(str::to_owned)
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Returns `None` if the text is empty or contains a space or a line break. Cargo reads the text as part of one line.
fn word(text: String) -> Option<String> {
    let text = text.trim();
    (!text.is_empty() && !text.contains(char::is_whitespace)).then(|| text.to_owned())
}
