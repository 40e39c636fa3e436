//! Checks deny.toml without `cargo deny`, which takes minutes to build. Checks the sources and licences of
//! dependencies, and the banned crates. Only `cargo deny` itself can check security advisories. `.ci/run` runs `cargo
//! deny` on machines that have this command.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// All crates come from this source.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the packages that a build for a target needs, without the packages of this workspace.
fn packages(target: &str) -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", target])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nodes = told["resolve"]["nodes"].as_array().unwrap();
    let used: BTreeSet<&str> = nodes.iter().map(|node| node["id"].as_str().unwrap()).collect();
    let own = told["workspace_members"].as_array().unwrap();
    let packages = told["packages"].as_array().unwrap().iter();
    packages.filter(|it| used.contains(it["id"].as_str().unwrap()) && !own.contains(&it["id"])).cloned().collect()
}

/// Tells whether a licence expression is allowed. If OR joins several licences, one allowed licence is enough.
fn is_allowed(licence: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = licence.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    any_of(&mut words, allowed)
}

fn any_of<'a>(words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>, allowed: &BTreeSet<String>) -> bool {
    let mut is_allowed = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        is_allowed |= all_of(words, allowed);
    }
    is_allowed
}

fn all_of<'a>(words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>, allowed: &BTreeSet<String>) -> bool {
    let mut is_allowed = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        is_allowed &= one(words, allowed);
    }
    is_allowed
}

fn one<'a>(words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>, allowed: &BTreeSet<String>) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let inner = any_of(words, allowed);
        assert_eq!(words.next(), Some(")"));
        return inner;
    }
    let name = words.next().unwrap_or_default();
    // A licence with an exception counts as a different licence.
    let exception = words.next_if_eq(&"WITH").and_then(|_| words.next());
    exception.is_none() && allowed.contains(name)
}

#[test]
fn every_dependency_is_from_the_registry_under_a_licence_that_is_allowed_and_none_is_banned() {
    let deny: toml::Table = fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap();
    let texts = |list: &toml::Value| -> BTreeSet<String> {
        list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let allowed = texts(&deny["licenses"]["allow"]);
    let banned: BTreeSet<&str> =
        deny["bans"]["deny"].as_array().unwrap().iter().map(|it| it["crate"].as_str().unwrap()).collect();
    for target in texts(&deny["graph"]["targets"]) {
        let packages = packages(&target);
        assert!(packages.len() > 100, "{} packages", packages.len());
        for package in packages {
            let name = package["name"].as_str().unwrap();
            assert_eq!(package["source"], REGISTRY, "{name}");
            assert!(!banned.contains(name), "{name} is banned: cargo tree -i {name}");
            let licence = package["license"].as_str().unwrap_or_default();
            assert!(is_allowed(licence, &allowed), "{name} has the licence \"{licence}\"");
        }
    }
}

#[test]
fn licences_are_read_as_they_are_written() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "ISC".to_owned()]);
    for (licence, expected) in [
        ("MIT", true),
        ("MIT/Apache-2.0", true),
        ("Apache-2.0 OR MIT", true),
        ("Apache-2.0 AND MIT", false),
        ("ISC AND (GPL-2.0 OR MIT)", true),
        ("GPL-3.0-only", false),
        ("MIT WITH LLVM-exception", false),
        ("", false),
    ] {
        assert_eq!(is_allowed(licence, &allowed), expected, "{licence}");
    }
}
