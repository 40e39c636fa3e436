//! The layers inside the daemon and its base: a module imports only from its own layer or from lower layers, and tasks
//! never call each other. Cargo ensures the same order between crates.

use std::collections::BTreeSet;
use std::fs;

use super::{root, sources};

/// The modules of a crate, from the highest layer down. Modules of the same layer can import each other, but a task must
/// not import another task.
const CRATES: [(&str, &[&[&str]]); 2] = [
    ("src", &[&["main", "app"], &["admin", "cli"], &TASKS, &["letter"]]),
    (
        "crates/base/src",
        &[
            &["cli"],
            &["jobs"],
            &["health", "servers"],
            &["boards", "config", "http", "partitions", "runtime", "telemetry", "version"],
        ],
    ),
];

/// No task imports another task.
const TASKS: [&str; 4] = ["consumer", "dead_letters", "jobs", "outbox"];

/// Returns the top module of a file, for instance `consumer` for `src/consumer/mod.rs` and `boards` for
/// `src/boards.rs`.
fn room(path: &str) -> &str {
    path.split('/').next().unwrap().trim_end_matches(".rs")
}

/// Returns the names that directly follow `crate::` in the text, without those in comments.
fn imported(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let word = |rest: &str| -> String {
        rest.trim_start().chars().take_while(|letter| letter.is_ascii_lowercase() || *letter == '_').collect()
    };
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            None => drop(found.insert(word(rest))),
            Some(list) => {
                // Keeps the names of the outer list, and drops the names in nested lists.
                let mut depth = 0;
                let own: String = list
                    .chars()
                    .take_while(|letter| {
                        depth += i32::from(*letter == '{') - i32::from(*letter == '}');
                        depth >= 0
                    })
                    .collect();
                let mut depth = 0;
                let parts = own.split(|letter| {
                    depth += i32::from(letter == '{') - i32::from(letter == '}');
                    letter == ',' && depth == 0
                });
                found.extend(parts.map(word));
            }
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

fn is_allowed(floors: &[&[&str]], from: &str, to: &str) -> bool {
    let floor = |room: &str| floors.iter().position(|rooms| rooms.contains(&room));
    let both_tasks = TASKS.contains(&from) && TASKS.contains(&to);
    from == to || (!both_tasks && floor(from) <= floor(to))
}

#[test]
fn imports_point_down_and_tasks_never_call_each_other() {
    let mut wrong = BTreeSet::new();
    for (folder, floors) in CRATES {
        for (path, text) in sources(folder) {
            let from = room(path.strip_prefix(root().join(folder)).unwrap().to_str().unwrap());
            if from == "lib" {
                continue;
            }
            for to in imported(&text).into_iter().chain([from.to_owned()]) {
                let is_known = floors.iter().any(|rooms| rooms.contains(&to.as_str()));
                assert!(is_known, "{}: the module {to} has no layer in tests/docs/repo/floors.rs", path.display());
                if !is_allowed(floors, from, &to) {
                    wrong.insert((folder, from.to_owned(), to));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "these imports point to a higher layer, or from one task to another task: {wrong:?}");
}

/// The crates that a crate of the daemon must not know: `main` alone knows the satellites, and only the gateway is an API
/// server, which counts and publishes.
#[test]
fn nobody_below_knows_a_satellite_and_only_the_gateway_is_a_client() {
    // A satellite has tests of its name beside it.
    let folders = fs::read_dir(root().join("crates")).unwrap().map(|folder| folder.unwrap());
    let names = folders.filter_map(|folder| Some((folder.path(), folder.file_name().into_string().ok()?)));
    let satellites = names.filter(|(path, name)| path.join("tests").join(name).join("main.rs").exists());
    let satellites: BTreeSet<String> = satellites.map(|(_, name)| format!("tallyd-{name}")).collect();
    assert!(satellites.len() >= 5, "{satellites:?}");
    let allowed = |name: &str, needed: &str| match (name, needed) {
        // `tallyd init` also writes the gateway's file.
        ("setup", "tallyd-gateway") | ("gateway", "tallyd-client") => true,
        _ => needed != "tallyd-client" && !satellites.contains(needed),
    };
    for folder in fs::read_dir(root().join("crates")).unwrap() {
        let folder = folder.unwrap();
        let name = folder.file_name().into_string().unwrap();
        let manifest: toml::Table = fs::read_to_string(folder.path().join("Cargo.toml")).unwrap().parse().unwrap();
        let Some(needed) = manifest.get("dependencies").and_then(toml::Value::as_table) else { continue };
        if name == "testkit" {
            continue;
        }
        for needed in needed.keys() {
            assert!(allowed(&name, needed), "crates/{name} must not need {needed}");
        }
    }
}

#[test]
fn imports_are_read_from_every_form() {
    let text = "use crate::store::likes;\n// crate::cli\nuse crate::{broker::{Link, nodes}, cache};\nlet x = crate::app::run();";
    let expected = ["app", "broker", "cache", "store"].map(str::to_owned);
    assert_eq!(imported(text), BTreeSet::from(expected));
}
