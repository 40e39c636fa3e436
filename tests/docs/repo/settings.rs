//! Checks config.toml and the samples in the documents against the configuration that the code accepts.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use tallyd_base::config::{self, Config};

use super::{blocks, documents, parsed, read, with_examples};

/// Returns the keys of a section. The section's error message for an unknown key lists these keys.
fn keys_of(section: &str) -> Vec<String> {
    let error = parsed(&format!("{section}\nnothing_is_called_so = 1")).unwrap_err();
    let (_, list) = error.split_once("; known: ").unwrap_or_else(|| panic!("{error}"));
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn config_toml_has_the_defaults() {
    assert_eq!(format!("{:#?}", parsed(&read("config.toml")).unwrap()), format!("{:#?}", Config::default()));
}

#[test]
fn clients_name_keys_by_the_default_of_the_daemon() {
    let prefix = Config::default().redis.key_prefix;
    for (path, before, after) in [
        ("clients/node/src/index.js", "keyPrefix: '", "',"),
        ("clients/python/src/tallyd/settings.py", "key_prefix: str = \"", "\","),
        ("examples/node/client.js", "keyPrefix: '", "',"),
        ("examples/node/board.js", "keyPrefix = '", "'"),
        ("examples/python/like.py", "\"KEY_PREFIX\", \"", "\")"),
        ("examples/python/board.py", "key_prefix=\"", "\")"),
    ] {
        assert!(read(path).contains(&format!("{before}{prefix}{after}")), "{path} has a prefix other than {prefix}");
    }
}

#[test]
fn the_default_grace_is_as_long_as_clients_publish() {
    for (path, part) in [
        ("clients/node/src/index.js", "deadlineMs: 5_000,"),
        ("clients/python/src/tallyd/settings.py", "deadline_s: float = 5.0,"),
        ("examples/node/client.js", "const TRIES = 3;"),
        ("examples/node/client.js", "timeoutMs: 5_000,"),
        ("examples/python/like.py", "def publish(event, tries=3):"),
        ("examples/python/rows.py", "\"TIMEOUT_S\", \"5\""),
    ] {
        assert!(read(path).contains(part), "{path} lacks {part}: compute publish_grace again");
    }
    // In each of the three attempts, the client can spend 5 s to connect and 5 s to publish.
    let longest = Duration::from_secs(3 * (5 + 5));
    let Config { amqp, reconcile, .. } = Config::default();
    assert_eq!(reconcile.publish_grace.0, longest);
    // The next check is for the Rust client and the gateway.
    assert!(amqp.timeout() * 2 <= longest);
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

#[test]
fn the_map_in_the_page_on_moving_is_a_configuration_as_it_is() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &blocks("docs/moving-reference.md", "toml")[0]).unwrap();
    assert_eq!(config::load(file.path()).unwrap().maps[0].partition(), 60_001);
}

/// Loads the sample with one value changed. Returns the error message about that key.
pub fn complaint(key: &str, line: &str, value: u64) -> Option<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), read("config.toml").replace(line, &format!("{key} = {value}"))).unwrap();
    let problems = config::load(file.path()).err()?.0;
    problems.into_iter().find(|problem| problem.contains(&format!("] {key} is {value}, allowed")))
}

#[test]
fn the_bounds_in_config_toml_are_the_bounds() {
    let text = read("config.toml");
    let mut comment = String::new();
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
        }
        comment.clear();
    }
}

/// Reads the range in a comment, such as "(1 to 3600)". Skips the codes in [kinds] and [metrics], because their keys
/// are names.
fn bounds(comment: &str) -> Option<(u64, u64)> {
    if comment.contains("codes") {
        return None;
    }
    comment.split('(').find_map(|part| {
        let (least, most) = part.split_once(')')?.0.split_once(" to ")?;
        Some((least.parse().ok()?, most.parse().ok()?))
    })
}

fn of_a_move(block: &str) -> Result<(), String> {
    let text: String =
        block.lines().filter(|line| !line.starts_with("password_file")).map(|line| format!("{line}\n")).collect();
    let config = parsed("[kinds]\nvideo = 1\n[metrics]\nlike = 1\nview = 2\n")?;
    tallyd_moving::config::parse(&text, "move.toml", &config).map(drop).map_err(|error| error.to_string())
}

#[test]
fn every_sample_of_configuration_in_the_documents_is_read() {
    for document in documents() {
        // A test of `tallyd init` reads the sample of gateway.toml.
        for block in blocks(document.to_str().unwrap(), "toml").iter().filter(|block| !block.starts_with("[gateway]")) {
            let is_of_a_move = ["[[import]]", "[[export]]"].iter().any(|begin| block.starts_with(begin));
            let read = match is_of_a_move {
                // Its passwords are in files that are not on this machine.
                true => of_a_move(block),
                false => parsed(block).map(drop),
            };
            read.unwrap_or_else(|error| panic!("{}: {error}\n{block}", document.display()));
        }
    }
}
