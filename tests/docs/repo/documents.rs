//! Checks that the documents agree with the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tallyd::cli;
use tallyd::jobs::archive::Outcome;
use tallyd::jobs::reconcile;
use tallyd_core::event::Reason;
use tallyd_recount as recount;

use super::{blocks, documents, first_column, read, root, sources, table};

#[test]
fn the_documents_list_every_reason_of_refusal() {
    let codes: Vec<&str> = Reason::ALL.iter().map(|reason| reason.code()).collect();
    assert_eq!(first_column(&table("docs/events.md", "Refused events")), codes);
}

#[test]
fn the_documents_list_every_destructive_command() {
    let rows = cli::rules::RULES
        .map(|rule| [rule.command, rule.takes, rule.checks, rule.back].map(|cell| cell.replace('`', "")).to_vec());
    assert_eq!(table("docs/operations/commands.md", "Commands that delete"), rows);
}

/// Returns the log events in the source code, with their levels.
fn logged_events() -> BTreeMap<String, String> {
    let mut events = BTreeMap::new();
    for (path, text) in ["src", "crates"].into_iter().flat_map(sources) {
        for (place, _) in text.match_indices("event = \"") {
            let (before, after) = text.split_at(place);
            let name = after["event = \"".len()..].split('"').next().unwrap();
            let level = ["error", "warn", "info", "debug", "trace"]
                .into_iter()
                .max_by_key(|level| before.rfind(&format!("{level}!(")))
                .unwrap();
            let known = events.insert(name.to_owned(), level.to_owned());
            assert!(known.is_none_or(|known| known == level), "{name} has two levels: {}", path.display());
        }
    }
    events
}

#[test]
fn the_documents_list_every_log_event_with_its_level() {
    let rows = table("docs/operations/logs.md", "Log events");
    let listed: BTreeMap<String, String> = rows.into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(listed, logged_events());
}

/// Fails unless the table under the heading has a row for each number of the report, and no other rows.
fn explained(document: &str, heading: &str, report: &Value) {
    let rows = table(document, heading);
    let explained: BTreeSet<&str> = first_column(&rows).into_iter().collect();
    let fields: BTreeSet<&str> = report.as_object().unwrap().keys().map(String::as_str).collect();
    let (lacks, extra) = (&fields - &explained, &explained - &fields);
    assert!(lacks.is_empty() && extra.is_empty(), "\"{heading}\" lacks {lacks:?}; the report lacks {extra:?}");
}

#[test]
fn the_documents_explain_every_number_of_a_reconcile() {
    let report = serde_json::to_value(reconcile::report::Report::default()).unwrap();
    explained("docs/reconciling.md", "The report of a reconcile", &report);
}

#[test]
fn the_documents_explain_every_verdict_of_a_reconcile() {
    let words: Vec<&str> = reconcile::report::Verdict::ALL.iter().map(|verdict| verdict.as_str()).collect();
    assert_eq!(first_column(&table("docs/reconciling.md", "The verdicts of a reconcile")), words);
}

#[test]
fn the_documents_explain_every_number_of_a_recount() {
    let report = serde_json::to_value(recount::report::Report::default()).unwrap();
    explained("docs/recounting.md", "The report of a recount", &report);
}

#[test]
fn the_documents_explain_every_outcome_of_an_archive() {
    let all = [
        Outcome::Archived,
        Outcome::Ended,
        Outcome::Waiting,
        Outcome::Saved,
        Outcome::Restored,
        Outcome::Forgotten,
        Outcome::Pruned,
        Outcome::Kept,
        Outcome::WouldArchive,
        Outcome::WouldEnd,
        Outcome::WouldPrune,
        Outcome::WouldRestore,
        Outcome::Open,
        Outcome::Nothing,
    ];
    let names: Vec<String> =
        all.iter().map(|outcome| serde_json::to_value(outcome).unwrap().as_str().unwrap().to_owned()).collect();
    assert_eq!(first_column(&table("docs/boards.md", "The report of an archive")), names);
}

#[test]
fn the_documents_explain_every_exit_code() {
    let codes =
        [cli::EXIT_DONE, cli::EXIT_FAILED, cli::EXIT_DRIFT, cli::EXIT_USAGE, cli::EXIT_TRY_LATER, cli::EXIT_CONFIG];
    let codes: Vec<String> = codes.iter().map(u8::to_string).collect();
    assert_eq!(first_column(&table("docs/operations/commands.md", "Exit codes")), codes);
}

#[test]
fn the_documents_name_every_table() {
    let mut tables = BTreeSet::new();
    for entry in fs::read_dir(root().join("migrations")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let names = text.split("CREATE TABLE IF NOT EXISTS ").skip(1);
        tables.extend(names.map(|rest| rest.split_whitespace().next().unwrap().to_owned()));
    }
    let rows = table("docs/schema.md", "The schema");
    assert_eq!(first_column(&rows).into_iter().map(str::to_owned).collect::<BTreeSet<_>>(), tables);
}

#[test]
fn the_code_in_the_documents_is_in_the_clients_that_are_tested() {
    let examples = [
        ("python", ["examples/python/like.py", "examples/python/board.py", "examples/python/sets.py"]),
        ("js", ["examples/node/client.js", "examples/node/board.js", "examples/node/sets.js"]),
    ];
    for (language, files) in examples {
        let example: String = files.iter().map(read).collect();
        for document in documents() {
            // Another test runs the blocks that import the packages.
            let of_packages = |block: &String| block.contains("from tallyd import");
            for block in blocks(document.to_str().unwrap(), language).into_iter().filter(|it| !of_packages(it)) {
                assert!(example.contains(block.trim()), "{}: not in {files:?}:\n{block}", document.display());
            }
        }
    }
    assert!(!blocks("README.md", "python").is_empty());
}

#[test]
fn the_manual_gives_the_accounts_of_the_files_under_ops() {
    assert_eq!(blocks("docs/operations/security.md", "sql")[0], read("ops/mysql/grants.sql"));
    let manual = read("docs/operations/security.md");
    for file in [
        "rabbitmq/permissions.sh",
        "redis/accounts.txt",
        "redis/cluster.txt",
        "redis/sentinel.txt",
        "redis/layouts.txt",
        "redis/filters.txt",
    ] {
        assert!(manual.contains(&format!("](../../ops/{file})")), "the manual does not name {file}");
        for line in read(format!("ops/{file}")).lines().filter(|line| !line.starts_with('#') && *line != "set -eu") {
            assert!(manual.lines().any(|known| known == line), "not in the manual: {line}");
        }
    }
    let of_files: Vec<String> = ["accounts", "cluster", "sentinel", "layouts", "filters"]
        .iter()
        .flat_map(|name| read(format!("ops/redis/{name}.txt")).lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let of_manual: Vec<&str> = manual.lines().filter(|line| line.starts_with("ACL SETUSER ")).collect();
    assert_eq!(of_manual, of_files);
}

#[test]
fn nothing_is_unsafe() {
    assert!(read("Cargo.toml").contains("unsafe_code = \"forbid\""));
    for folder in ["src", "crates", "tests", "benches", "torture", "examples"] {
        for (path, text) in sources(folder) {
            // This test's own source contains the lint's name, too. The filter skips that line, because it contains
            // `named`.
            let named = text.lines().filter(|line| {
                line.contains("unsafe_code") && !["forbid", "#![deny(", "named"].iter().any(|word| line.contains(word))
            });
            assert_eq!(named.count(), 0, "{} allows unsafe code", path.display());
        }
    }
}

#[test]
fn links_lead_somewhere() {
    for document in documents() {
        let text = read(&document);
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            if link.starts_with("http") {
                continue;
            }
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let path = match path {
                "" => document.clone(),
                path => document.parent().unwrap().join(path),
            };
            assert!(root().join(&path).exists(), "{}: {link} does not exist", document.display());
            assert!(
                heading.is_empty() || read(&path).lines().any(|line| slug(line) == heading),
                "{}: {link} has no such heading",
                document.display()
            );
        }
    }
}

/// Makes a heading's anchor as GitHub and other renderers do.
fn slug(line: &str) -> String {
    let Some(title) = line.strip_prefix('#') else { return String::new() };
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    title.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

#[test]
fn every_test_that_the_documents_name_exists() {
    let code: String =
        ["src", "crates", "tests", "torture"].into_iter().flat_map(sources).map(|(_, text)| text).collect();
    let mut named = 0;
    for document in documents() {
        let text = read(&document);
        // A test's name is a sentence: at least three words, joined by `_`.
        let spans = text.split('`').skip(1).step_by(2);
        let is_name = |span: &&str| {
            let is_letter = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
            span.matches('_').count() >= 3 && span.chars().all(is_letter)
        };
        // These names look like test names, but they are metrics, figures, settings of other programs, or plugins of
        // other programs.
        let others =
            ["innodb_flush_log_at_trx_commit", "rabbitmq_consistent_hash_exchange", "rabbitmq_auth_mechanism_ssl"];
        let is_metric = |name: &&str| ["tallyd_", "process_", "p99_"].iter().any(|it| name.starts_with(it));
        for name in spans.filter(is_name).filter(|name| !others.contains(name) && !is_metric(name)) {
            assert!(
                code.contains(&format!("fn {name}(")) || code.contains(&format!("{name}:")),
                "{}: there is no {name}",
                document.display()
            );
            named += 1;
        }
    }
    assert!(named > 20, "{named} names");
}

/// Finds `line` in the text, and returns the rows of the first table below this line.
fn rows_after<'a>(text: &'a str, line: &str) -> Vec<&'a str> {
    let (_, after) = text.split_once(line).unwrap_or_else(|| panic!("there is no {line}"));
    let section = after.split("\n#").next().unwrap();
    let table = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    table.skip(2).collect()
}

#[test]
fn every_promise_and_every_defence_names_a_test_that_holds_it() {
    let code: String =
        ["src", "crates", "tests", "torture"].into_iter().flat_map(sources).map(|(_, text)| text).collect();
    let (guarantees, security) = (read("docs/guarantees.md"), read("SECURITY.md"));
    let mut rows = rows_after(&guarantees, "# Guarantees\n");
    assert!(rows.len() > 15, "{} promises", rows.len());
    for role in [
        "A client that may publish events",
        "A client of Redis",
        "A client of MySQL",
        "A client of the admin port",
        "Users of the control socket",
        "A client of the gateway",
        "An author of the configuration",
    ] {
        let attacks = rows_after(&security, &format!("### {role}\n"));
        assert!(!attacks.is_empty(), "{role}");
        // Some rows say that tallyd has no defence against the attack. Such rows name no test.
        rows.extend(attacks.into_iter().filter(|row| !row.contains("nothing in tallyd")));
    }
    for row in rows {
        let tests = row.strip_suffix('|').unwrap().rsplit('|').next().unwrap().trim();
        let mut spans = tests.split('`').skip(1).step_by(2);
        let has_one = spans.any(|name| code.contains(&format!("fn {name}(")));
        assert!(has_one || tests == "the same", "no test is named: {row}");
    }
}

#[test]
fn the_rust_sample_of_the_documents_is_the_one_that_is_compiled() {
    let program = read("crates/client/examples/first_like.rs");
    let inside = program.lines().filter(|line| line.starts_with("use ") || line.starts_with("    "));
    let compiled: Vec<&str> = inside.map(str::trim_start).filter(|line| *line != "Ok(())").collect();
    let [shown] = &*blocks("docs/clients.md", "rust") else { panic!("one sample") };
    assert_eq!(shown.lines().filter(|line| !line.is_empty()).collect::<Vec<_>>(), compiled);
}

/// Returns the paths of the documents for developers. These documents refer to source files.
fn for_developers() -> Vec<PathBuf> {
    let named = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/development.md"];
    documents()
        .into_iter()
        .filter(|path| named.map(Path::new).contains(&&**path) || path.starts_with("docs/decisions"))
        .collect()
}

#[test]
fn every_file_that_the_documents_for_developers_name_exists() {
    let folders = "src crates lua tests torture benches dev migrations docs ops systemd examples fuzz .ci .config";
    for document in for_developers() {
        let text = read(&document);
        for span in text.split('`').skip(1).step_by(2) {
            // In a command, the first word is the program.
            let path = span.split(' ').next().unwrap();
            let folder = path.split_once('/').map(|(folder, _)| folder);
            let is_named = folder.is_some_and(|folder| folders.split(' ').any(|known| known == folder));
            // A path with one of these marks stands for many files, or for a file that a developer will create.
            let is_pattern = path.contains(['*', '{']) || path.contains("NNNN");
            assert!(
                !is_named || is_pattern || root().join(path).exists(),
                "{}: there is no {path}",
                document.display()
            );
        }
    }
}

#[test]
fn the_changelog_keeps_its_format() {
    let text = read("CHANGELOG.md");
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("# Changelog"));
    let versions: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(versions.first(), Some(&"[Unreleased]"));
    for version in &versions[1..] {
        let (number, date) = version.split_once(" - ").unwrap_or_else(|| panic!("{version}: no date"));
        assert!(number.starts_with('[') && number.ends_with(']'), "{version}");
        assert!(date.len() == 10 && date.split('-').count() == 3, "{version}");
    }
    let kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];
    for kind in text.lines().filter_map(|line| line.strip_prefix("### ")) {
        assert!(kinds.contains(&kind), "{kind}");
    }
}
