//! docs/configuration-reference.md, generated from the JSON Schemas of config.toml and gateway.toml.

use std::fmt::Write;
use std::fs;

use serde_json::Value;
use tallyd_gateway::config::schema as gateway_schema;

use super::{read, root};

const PAGE: &str = "docs/configuration-reference.md";

const BEGINNING: &str = "# Configuration reference

Every section and key of config.toml, generated from the [JSON Schema](config.schema.json), of
[move.toml](#movetoml) and of [gateway.toml](#gatewaytoml). A section in double brackets can be repeated. Keys without values take text.
[Configuration](configuration.md) explains durations, schedules and the sources of settings.
";

/// Writes a value in backticks. Lists and long values are JSON, which is also valid TOML.
fn code(value: &Value) -> String {
    match value {
        Value::String(text) => format!("`\"{text}\"`"),
        Value::Null => String::new(),
        other => format!("`{other}`"),
    }
}

/// Describes the values that a key accepts: an enum's words with their meanings, or a range.
fn allowed(key: &Value) -> String {
    if let Some(words) = key["enum"].as_array() {
        let meanings = key["x-taplo"]["docs"]["enumValues"].as_array();
        let meaning =
            |place: usize| meanings.and_then(|all| all[place].as_str()).map(|text| text.trim_end_matches('.'));
        let word = |(place, word): (usize, &Value)| match meaning(place) {
            Some(meaning) if !meaning.is_empty() => format!("{}: {meaning}", code(word)),
            _ => code(word),
        };
        return words.iter().enumerate().map(word).collect::<Vec<_>>().join("; ");
    }
    match (&key["minimum"], &key["maximum"]) {
        (Value::Number(least), Value::Number(most)) => format!("{least} to {most}"),
        _ if key["format"] == "length-of-time" => match (key["x-minimum"].as_str(), key["x-maximum"].as_str()) {
            (Some(least), Some(most)) => format!("duration, {least} to {most}"),
            (Some(least), None) => format!("duration, {least} or more"),
            (None, Some(most)) => format!("duration, at most {most}"),
            (None, None) => "duration".to_owned(),
        },
        _ => match &key["type"] {
            Value::String(name) if name == "boolean" => "`true`, `false`".to_owned(),
            Value::String(name) if name == "array" => "list".to_owned(),
            Value::String(name) if name == "object" => "table".to_owned(),
            _ => String::new(),
        },
    }
}

/// Returns the part of the page about gateway.toml.
fn gateway(daemon: &Value) -> String {
    let own = &gateway_schema()["properties"];
    let mut page = "\n## gateway.toml\n\nThe settings of [`tallyd gateway`](gateway.md): `[log]`, `[amqp]`, `[mysql]`, `[redis]` and `[gateway]`. These\n\
        keys exist only in config.toml:\n\n"
        .to_owned();
    for name in ["amqp", "redis"] {
        let all = daemon["properties"][name]["properties"].as_object().unwrap().keys();
        let known = &own[name]["properties"];
        let lacks: Vec<String> = all.filter(|key| known.get(key).is_none()).map(|key| format!("`{key}`")).collect();
        writeln!(page, "* `[{name}]`: {}", lacks.join(", ")).unwrap();
    }
    page + &section("gateway", &own["gateway"])
}

fn moves() -> String {
    let sections = tallyd_moving::config::schema()["properties"].as_object().unwrap();
    let all: String = sections.iter().map(|(name, keys)| section(name, keys)).collect();
    format!("\n## move.toml\n\nBeside config.toml, while [a site moves](moving.md). No variable changes it.\n{all}")
}

fn page() -> String {
    let schema: Value = serde_json::from_str(&read("docs/config.schema.json")).unwrap();
    let sections = schema["properties"].as_object().unwrap();
    let daemons: String = sections.iter().map(|(name, keys)| section(name, keys)).collect();
    format!("{BEGINNING}{daemons}{}{}", moves(), gateway(&schema))
}

/// Returns the part of the page about one section.
fn section(name: &str, section: &Value) -> String {
    let mut page = String::new();
    let (header, keys) = match section["type"].as_str() {
        Some("array") => (format!("[[{name}]]"), &section["items"]["properties"]),
        _ if name == "server" => (format!("[{name}.NAME]"), &section["additionalProperties"]["properties"]),
        _ => (format!("[{name}]"), &section["properties"]),
    };
    let meaning = section["description"].as_str().unwrap();
    write!(page, "\n## {header}\n\n{meaning}\n").unwrap();
    let Some(keys) = keys.as_object() else { return page };
    page.push_str("\n| key | default | values | meaning |\n|---|---|---|---|\n");
    for (key, of_key) in keys {
        let allowed = allowed(of_key);
        let meaning = of_key["description"].as_str().unwrap().replace(['\n', '|'], " ");
        // config.toml has the range in its comments. This table has a column for the range instead.
        let meaning = meaning.replace(&format!(" ({allowed})"), "");
        writeln!(page, "| `{key}` | {} | {allowed} | {meaning} |", code(&of_key["default"])).unwrap();
    }
    page
}

/// Run with `TALLYD_UPDATE_SNAPSHOT=1` to write the page.
#[test]
fn the_configuration_reference_is_what_the_schema_says() {
    let page = page();
    if std::env::var_os("TALLYD_UPDATE_SNAPSHOT").is_some() {
        fs::write(root().join(PAGE), &page).unwrap();
    }
    assert!(read(PAGE) == page, "{PAGE} is outdated: run this test with TALLYD_UPDATE_SNAPSHOT=1");
}
