//! The repository's own promises: the sample configuration, the unit file and the documents say what the code does.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tallyd::archiver::Outcome;
use tallyd::config::{self, Config};
use tallyd::event::Reason;
use tallyd::{cli, reconciler, recounter};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The documents, by their paths.
fn documents() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md"].into_iter().map(PathBuf::from).collect();
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let path = Path::new("docs").join(entry.unwrap().file_name());
        if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

/// All Rust files under a folder, with their text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push((path.clone(), fs::read_to_string(path).unwrap()));
            }
        }
    }
    found
}

/// The rows of the table under a heading: each cell without its backticks.
fn table(document: &str, heading: &str) -> Vec<Vec<String>> {
    let text = read(document);
    let (_, after) =
        text.split_once(&format!("# {heading}\n")).unwrap_or_else(|| panic!("{document} has no {heading}"));
    let lines = after.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect();
    lines.skip(2).map(cells).collect()
}

/// The blocks of that language in a document.
fn blocks(document: &str, language: &str) -> Vec<String> {
    let text = read(document);
    let opening = format!("```{language}\n");
    text.split(&opening).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

fn first_column(rows: &[Vec<String>]) -> Vec<&str> {
    rows.iter().map(|row| row[0].as_str()).collect()
}

// ---------------------------------------------------------------------------------------------- config.toml

fn parsed(text: &str) -> Result<Config, String> {
    config::parse(text, "config.toml", []).map_err(|error| error.to_string())
}

/// The keys that the type behind a section has, as its own complaint of an unknown one lists them.
fn keys_of(section: &str) -> Vec<String> {
    let error = parsed(&format!("{section}\nnothing_is_called_so = 1")).unwrap_err();
    let (_, list) = error.split_once(": known are ").unwrap_or_else(|| panic!("{error}"));
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// config.toml with its commented settings in force.
fn with_examples() -> String {
    let setting = |line: &str| {
        line.strip_prefix('#').filter(|rest| !rest.is_empty() && !rest.starts_with([' ', ':'])).map(str::to_owned)
    };
    read("config.toml").lines().map(|line| setting(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

#[test]
fn config_toml_has_the_defaults() {
    assert_eq!(format!("{:#?}", parsed(&read("config.toml")).unwrap()), format!("{:#?}", Config::default()));
}

#[test]
fn config_toml_names_every_key_and_every_key_that_it_names_exists() {
    parsed(&with_examples()).unwrap();
    let text = with_examples();
    let written: toml::Table = text.parse().unwrap();
    let sections = keys_of("");
    assert_eq!(sections.iter().collect::<BTreeSet<_>>(), written.keys().collect::<BTreeSet<_>>());
    for section in sections {
        let (header, table) = match &written[&section] {
            toml::Value::Array(blocks) => (format!("[[{section}]]"), blocks[0].as_table().unwrap().clone()),
            table => (format!("[{section}]"), table.as_table().unwrap().clone()),
        };
        if matches!(section.as_str(), "kinds" | "metrics") {
            continue;
        }
        for key in keys_of(&header) {
            if key == "password_file" {
                let variable = format!("TALLYD__{}__PASSWORD", section.to_uppercase());
                assert!(text.contains(&variable), "config.toml does not name {variable}");
            }
            assert!(table.contains_key(&key), "config.toml has no {key} in {header}");
        }
    }
}

#[test]
fn the_board_in_config_toml_has_the_defaults_that_it_says() {
    let board = |text: &str| format!("{:?}", parsed(text).unwrap().boards);
    let written = board(&with_examples()).replace("Europe/Berlin", "UTC");
    assert_eq!(written, board("[[board]]\nname = \"likes\"\nperiod = \"week\""));
}

#[test]
fn the_rule_in_config_toml_has_the_defaults_that_it_says() {
    let rules = |text: &str| format!("{:?}", parsed(text).unwrap().rules);
    let written = rules(&with_examples());
    assert_eq!(written, rules("[[rule]]\nmetric = \"unread\"\nkind = \"video\"\nboard = \"likes\""));
}

#[test]
fn the_recount_in_config_toml_has_the_defaults_that_it_says() {
    let recounts = |text: &str| format!("{:?}", parsed(text).unwrap().recounts);
    let query = &parsed(&with_examples()).unwrap().recounts[0].query;
    let least = format!("[[recount]]\nkind = \"video\"\nmetric = \"comment\"\nquery = \"{query}\"");
    assert_eq!(recounts(&with_examples()), recounts(&least));
}

/// Loads the sample with one value changed; what is said of that key.
fn complaint(key: &str, line: &str, value: u64) -> Option<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), read("config.toml").replace(line, &format!("{key} = {value}"))).unwrap();
    let problems = config::load(file.path()).err()?.0;
    problems.into_iter().find(|problem| problem.contains(&format!("] {key} is {value}, allowed")))
}

#[test]
fn the_bounds_in_config_toml_are_the_bounds() {
    let text = read("config.toml");
    let (mut comment, mut checked) = (String::new(), 0);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            comment = format!("{comment} {rest}");
            continue;
        }
        if let Some((key, value)) = line.split_once(" = ")
            && value.parse::<u64>().is_ok()
            && let Some((least, most)) = bounds(&comment)
        {
            for value in [least, most] {
                assert_eq!(complaint(key, line, value), None);
            }
            assert!(complaint(key, line, most + 1).is_some(), "{key} = {} is not refused", most + 1);
            assert!(least == 0 || complaint(key, line, least - 1).is_some(), "{key} = {} is not refused", least - 1);
            checked += 1;
        }
        comment.clear();
    }
    assert_eq!(checked, 18, "keys with bounds");
}

/// "(1 to 3600)", but not of the codes in [kinds] and [metrics], which have no key of their own.
fn bounds(comment: &str) -> Option<(u64, u64)> {
    if comment.contains("codes") {
        return None;
    }
    comment.split('(').find_map(|part| {
        let (least, most) = part.split_once(')')?.0.split_once(" to ")?;
        Some((least.parse().ok()?, most.parse().ok()?))
    })
}

#[test]
fn every_sample_of_configuration_in_the_documents_is_read() {
    for document in documents() {
        for block in blocks(document.to_str().unwrap(), "toml") {
            parsed(&block).unwrap_or_else(|error| panic!("{}: {error}\n{block}", document.display()));
        }
    }
}

// ---------------------------------------------------------------------------------------------- the documents

#[test]
fn the_documents_list_every_reason_of_refusal() {
    let codes: Vec<&str> = Reason::ALL.iter().map(|reason| reason.code()).collect();
    assert_eq!(first_column(&table("docs/events.md", "Refused events")), codes);
}

/// The events that the sources log, with their levels.
fn logged_events() -> BTreeMap<String, String> {
    let mut events = BTreeMap::new();
    for (path, text) in sources("src") {
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
    let rows = table("docs/operations.md", "Log events");
    let listed: BTreeMap<String, String> = rows.into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(listed, logged_events());
}

#[test]
fn the_documents_explain_every_number_of_a_reconcile() {
    let report = serde_json::to_value(reconciler::report::Report::default()).unwrap();
    let rows = table("docs/operations.md", "The report of a reconcile");
    let explained: BTreeSet<&str> = first_column(&rows).into_iter().collect();
    assert_eq!(explained, report.as_object().unwrap().keys().map(String::as_str).collect());
}

#[test]
fn the_documents_explain_every_number_of_a_recount() {
    let report = serde_json::to_value(recounter::report::Report::default()).unwrap();
    let rows = table("docs/operations.md", "The report of a recount");
    let explained: BTreeSet<&str> = first_column(&rows).into_iter().collect();
    assert_eq!(explained, report.as_object().unwrap().keys().map(String::as_str).collect());
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
    assert_eq!(first_column(&table("docs/operations.md", "The report of an archive")), names);
}

#[test]
fn the_documents_explain_every_exit_code() {
    let codes =
        [cli::EXIT_DONE, cli::EXIT_FAILED, cli::EXIT_DRIFT, cli::EXIT_USAGE, cli::EXIT_TRY_LATER, cli::EXIT_CONFIG];
    let codes: Vec<String> = codes.iter().map(u8::to_string).collect();
    assert_eq!(first_column(&table("docs/operations.md", "Exit codes")), codes);
}

#[test]
fn the_documents_name_every_table() {
    let mut tables = BTreeSet::new();
    for entry in fs::read_dir(root().join("migrations")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let names = text.split("CREATE TABLE IF NOT EXISTS ").skip(1);
        tables.extend(names.map(|rest| rest.split_whitespace().next().unwrap().to_owned()));
    }
    let rows = table("docs/migration.md", "The schema");
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
            for block in blocks(document.to_str().unwrap(), language) {
                assert!(example.contains(block.trim()), "{}: not in {files:?}:\n{block}", document.display());
            }
        }
    }
    assert!(!blocks("README.md", "python").is_empty());
}

#[test]
fn the_readme_gives_the_same_rights_as_the_operations_manual() {
    let readme = read("README.md");
    for line in blocks("docs/operations.md", "sql")[0].lines() {
        assert!(readme.contains(line), "not in README.md: {line}");
    }
}

#[test]
fn the_manual_gives_the_accounts_of_the_files_under_ops() {
    assert_eq!(blocks("docs/operations.md", "sql")[0], read("ops/mysql/grants.sql"));
    let manual = read("docs/operations.md");
    for file in [
        "rabbitmq/permissions.sh",
        "redis/accounts.txt",
        "redis/cluster.txt",
        "redis/sentinel.txt",
        "redis/layouts.txt",
        "redis/filters.txt",
    ] {
        assert!(manual.contains(&format!("](../ops/{file})")), "the manual does not name {file}");
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
    for folder in ["src", "tests", "benches", "torture", "examples"] {
        for (path, text) in sources(folder) {
            // This line names it, too.
            let named = text
                .lines()
                .filter(|line| line.contains("unsafe_code") && !line.contains("forbid") && !line.contains("named"));
            assert_eq!(named.count(), 0, "{} allows what is forbidden", path.display());
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
            assert!(root().join(&path).exists(), "{}: {link} is not there", document.display());
            assert!(
                heading.is_empty() || read(&path).lines().any(|line| slug(line) == heading),
                "{}: {link} has no such heading",
                document.display()
            );
        }
    }
}

/// A heading's anchor, as GitHub and others make it.
fn slug(line: &str) -> String {
    let Some(title) = line.strip_prefix('#') else { return String::new() };
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    title.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

#[test]
fn every_test_that_the_documents_name_exists() {
    let code: String = ["src", "tests", "torture"].into_iter().flat_map(sources).map(|(_, text)| text).collect();
    let mut named = 0;
    for document in documents() {
        let text = read(&document);
        // A test's name is a statement: three words at least, joined.
        let spans = text.split('`').skip(1).step_by(2);
        let is_name = |span: &&str| {
            span.matches('_').count() >= 3 && span.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_')
        };
        // Names of other programs' settings and plugins, and of metrics, that look like it.
        let others =
            ["innodb_flush_log_at_trx_commit", "rabbitmq_consistent_hash_exchange", "rabbitmq_auth_mechanism_ssl"];
        let is_metric = |name: &&str| name.starts_with("tallyd_") || name.starts_with("process_");
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

#[test]
fn every_file_that_the_architecture_names_exists() {
    let text = read("ARCHITECTURE.md");
    for span in text.split('`').skip(1).step_by(2) {
        let is_path =
            ["src/", "lua/", "tests/", "torture/", "dev/", "migrations/", "docs/", "systemd/", "examples/", ".ci/"]
                .iter()
                .any(|folder| span.starts_with(folder))
                && !span.contains([' ', '*', '{']);
        assert!(!is_path || root().join(span).exists(), "there is no {span}");
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

// ---------------------------------------------------------------------------------------------- the unit

fn settings(name: &str) -> Vec<String> {
    let unit = read("systemd/tallyd.service");
    unit.lines().filter_map(|line| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned())).collect()
}

/// The unit with the program where this build has it, under its own name.
fn built_unit(folder: &Path) -> PathBuf {
    let program = folder.join("tallyd");
    fs::copy(env!("CARGO_BIN_EXE_tallyd"), &program).unwrap();
    let unit = folder.join("tallyd.service");
    let text = read("systemd/tallyd.service").replace("/usr/bin/tallyd", program.to_str().unwrap());
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
    let folder = tempfile::tempdir().unwrap();
    let (valid, said) = systemd_analyze(&["verify", "--man=no"], &built_unit(folder.path()));
    assert!(valid && !said.contains("tallyd.service"), "{said}");
}

#[test]
fn the_unit_may_do_no_more_than_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    // In tenths: at most 1.2, as Redis' own unit.
    let (narrow, said) =
        systemd_analyze(&["security", "--offline=yes", "--no-pager", "--threshold=12"], &built_unit(folder.path()));
    assert!(narrow, "{said}");
}

#[test]
fn the_unit_calls_the_program_as_it_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, read("config.toml")).unwrap();
    let start = &settings("ExecStart")[0];
    let check = settings("ExecStartPre")[0].strip_prefix('-').unwrap().to_owned();
    assert_eq!(check, format!("{start} check-config --offline"));
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
    // The watchdog is fed every third of its time, and no more while what is open is written.
    assert!(seconds("WatchdogSec") * 2 / 3 > drain);
}

#[test]
fn the_unit_restarts_all_but_what_no_restart_helps() {
    assert_eq!(settings("Restart"), ["always"]);
    assert_eq!(settings("StartLimitIntervalSec"), ["0"]);
    assert_eq!(settings("RestartPreventExitStatus"), [format!("{} {}", cli::EXIT_USAGE, cli::EXIT_CONFIG)]);
}

#[test]
fn the_unit_reloads_by_the_signal_that_the_daemon_reloads_at() {
    // Of these systemd 252 knows the first alone.
    assert_eq!(settings("Type"), ["notify"]);
    assert_eq!(settings("ExecReload"), ["/bin/kill -HUP $MAINPID"]);
}

#[test]
fn the_unit_passes_the_credentials_that_config_toml_names() {
    let config = parsed(&with_examples()).unwrap();
    let (amqp, mysql, redis) = (config.amqp, config.mysql, config.redis);
    let passwords = [amqp.password_file, mysql.password_file, redis.password_file, redis.sentinel_password_file];
    let keys = [amqp.tls_key_file, mysql.tls_key_file, redis.tls_key_file, config.admin.token_file];
    let files: Vec<Option<String>> = passwords.into_iter().chain(keys).collect();
    assert_eq!(settings("LoadCredential"), files.into_iter().map(Option::unwrap).collect::<Vec<_>>());
}
