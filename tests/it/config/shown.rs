//! `tallyd config show` prints the values in force, and where each value comes from.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::common::{stderr, stdout};

struct File(tempfile::TempDir);

impl File {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.toml"), text).unwrap();
        Self(folder)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("config.toml")
    }

    fn show(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
        command.arg("--config").arg(self.path()).args(["config", "show"]).args(arguments);
        command.env_remove("RUST_LOG").env_remove("CREDENTIALS_DIRECTORY").envs(environment.iter().copied());
        command.output().unwrap()
    }
}

const SOME: &str = "[amqp]\npartitions = 4\nurl = \"amqp://u:hunter2@h/%2f\"\n[metrics]\nlike = 1\nview = 2\n\
                    [redis.also]\nbucket_bits = 14\n[[board]]\nname = \"a\"\nperiod = \"week\"\narchive_grace = \"90m\"\n\
                    [[board]]\nname = \"b\"\nperiod = \"day\"\n[[recount]]\nkind = \"video\"\nmetric = \"view\"\n\
                    query = \"\"\"SELECT \"id\", n\nFROM t WHERE id > :after ORDER BY id LIMIT :limit\"\"\"\n";

#[test]
fn the_configuration_is_shown_as_a_file_that_says_the_same() {
    let file = File::new(SOME);
    let shown = stdout(&file.show(&[], &[]));
    assert!(shown.starts_with("[daemon]\ndrain_max_s = 45\n"), "in the order of config.toml: {shown}");
    let again = File::new(&shown);
    assert_eq!(stdout(&again.show(&[], &[])), shown);
    let with_origins = File::new(&stdout(&file.show(&["--origin"], &[])));
    assert_eq!(stdout(&with_origins.show(&[], &[])), shown);
    // The command shows every setting of config.toml.
    let default = stdout(&File::new("").show(&[], &[]));
    let whole: toml::Table = fs::read_to_string("config.toml").unwrap().parse().unwrap();
    let shown: toml::Table = default.parse().unwrap();
    for (section, keys) in &whole {
        for key in keys.as_table().unwrap().keys() {
            assert!(shown[section].get(key).is_some(), "[{section}] {key} is not shown");
        }
    }
}

#[test]
fn each_setting_says_where_it_comes_from() {
    let file = File::new(SOME);
    let environment = [("TALLYD__AMQP__PREFIX", "shop"), ("TALLYD__KINDS__VIDEO", "2"), ("RUST_LOG", "debug")];
    let output = file.show(&["--origin"], &environment);
    let path = file.path();
    let at = |line: u32| format!("{}:{line}:1", path.display());
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = stdout(&output).lines().map(words).collect();
    for line in [
        "drain_max_s = 45 # default".to_owned(),
        "level = \"debug\" # RUST_LOG".to_owned(),
        format!("partitions = 4 # {}", at(2)),
        "prefix = \"shop\" # TALLYD__AMQP__PREFIX".to_owned(),
        "video = 2 # TALLYD__KINDS__VIDEO".to_owned(),
        "event_clock = \"producer\" # because of [redis.also]".to_owned(),
        format!("archive_grace = \"90m\" # {}", at(12)),
        format!("name = \"b\" # {}", at(14)),
        "tie = \"member\" # default".to_owned(),
    ] {
        assert!(lines.contains(&line), "{line} is not in {lines:#?}");
    }
    let json: Value =
        serde_json::from_slice(&file.show(&["--origin", "--format", "json"], &environment).stdout).unwrap();
    let settings = json["settings"].as_array().unwrap();
    let setting = |key: &str| settings.iter().find(|it| it["key"] == key).unwrap_or_else(|| panic!("{key}: {json}"));
    assert_eq!(setting("daemon.drain_max_s")["origin"], "default");
    assert_eq!(
        setting("amqp.partitions"),
        &json!({"key": "amqp.partitions", "value": 4, "origin": "file", "at": at(2)})
    );
    assert_eq!(setting("amqp.prefix")["at"], "TALLYD__AMQP__PREFIX");
    assert_eq!(setting("board.1.name")["at"], at(14));
    let plain: Value = serde_json::from_slice(&file.show(&["--format", "json"], &environment).stdout).unwrap();
    assert_eq!((&plain["amqp"]["partitions"], &plain["board"][0]["archive_grace"]), (&json!(4), &json!("90m")));
}

#[test]
fn secrets_are_masked_wherever_they_come_from() {
    let file = File::new(SOME);
    let secrets = [("TALLYD__MYSQL__PASSWORD", "hunter2"), ("TALLYD__REDIS__URL", "redis://hunter2@h/0")];
    for arguments in [&[][..], &["--origin"], &["--format", "json"], &["--origin", "--format", "json"]] {
        let output = file.show(arguments, &secrets);
        let text = stdout(&output) + &stderr(&output);
        assert!(output.status.success() && !text.contains("hunter2"), "{text}");
        assert!(text.contains("amqp://u:***@h/%2f") && text.contains("mysql://tallyd:***@127.0.0.1"), "{text}");
    }
    assert!(stdout(&file.show(&[], &secrets)).contains("#password = \"***\""));
}

#[test]
fn a_configuration_that_is_wrong_is_not_shown() {
    let output = File::new("[amqp]\nprefech = 5\n").show(&[], &[]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(78), ""));
    assert!(stderr(&output).contains("config.toml:2:1: unknown key `prefech` in [amqp]"), "{}", stderr(&output));
}
