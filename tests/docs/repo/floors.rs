//! The layers inside the daemon: a module imports only from its own layer or from lower layers, and tasks never call
//! each other. Cargo ensures the same order between crates.

use std::collections::BTreeSet;

use super::{root, sources};

/// The modules of a crate, from the highest layer down. Modules of the same layer can import each other, but a task must
/// not import another task.
const CRATES: [(&str, &[&[&str]]); 2] = [
    ("src", &[&["main", "app"], &["admin", "cli", "gateway"], &["moving"], &TASKS, &["letter"]]),
    (
        "crates/base/src",
        &[
            &["cli"],
            &["jobs"],
            &["servers"],
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

/// The gateway is an API server. The daemon itself must not count or publish as an API server does.
#[test]
fn only_the_gateway_uses_the_api_servers_side() {
    let src = root().join("src");
    let uses =
        |text: &str| text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains("tallyd_client"));
    let rooms: BTreeSet<String> = sources("src")
        .into_iter()
        .filter(|(_, text)| uses(text))
        .map(|(path, _)| room(path.strip_prefix(&src).unwrap().to_str().unwrap()).to_owned())
        .collect();
    assert_eq!(rooms, BTreeSet::from(["gateway".to_owned()]));
}

#[test]
fn imports_are_read_from_every_form() {
    let text = "use crate::store::likes;\n// crate::cli\nuse crate::{broker::{Link, nodes}, cache};\nlet x = crate::app::run();";
    let expected = ["app", "broker", "cache", "store"].map(str::to_owned);
    assert_eq!(imported(text), BTreeSet::from(expected));
}
