//! The JSON Schema for editors agrees with config.toml.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn schema() -> Value {
    serde_json::from_str(&read("docs/config.schema.json")).unwrap()
}

#[test]
fn the_schema_in_the_documents_is_the_one_that_is_printed() {
    let output = Command::new(env!("CARGO_BIN_EXE_tallyd")).args(["config", "schema"]).output().unwrap();
    assert!(output.status.success());
    let written = String::from_utf8(output.stdout).unwrap();
    assert!(
        read("docs/config.schema.json") == written,
        "docs/config.schema.json is outdated: docs/development.md says how to print it"
    );
}

#[test]
fn config_toml_names_its_schema() {
    let text = read("config.toml");
    let path = text.lines().next().unwrap().strip_prefix("#:schema ").unwrap();
    assert_eq!(read(path), read("docs/config.schema.json"));
}

/// Returns each setting of config.toml, together with the part of the schema that describes it.
fn settings() -> Vec<(String, toml::Value, Value)> {
    let (schema, mut found) = (schema(), Vec::new());
    let written: toml::Table = read("config.toml").parse().unwrap();
    for (section, keys) in written {
        let of_section = &schema["properties"][&section];
        for (key, value) in keys.as_table().unwrap() {
            if !matches!(section.as_str(), "kinds" | "metrics") {
                found.push((format!("[{section}] {key}"), value.clone(), of_section["properties"][key].clone()));
            }
        }
    }
    found
}

#[test]
fn the_schema_has_the_defaults_of_config_toml() {
    let settings = settings();
    for (key, value, schema) in &settings {
        let (written, default) = (serde_json::to_value(value).unwrap(), &schema["default"]);
        let pause = |value: &Value| value.as_str().and_then(|text| tallyd_base::config::parse_pause(text).ok());
        let is_length = schema["format"] == "length-of-time";
        assert!(
            *default == written || is_length && pause(default) == pause(&written),
            "{key}: {default} is not {written}"
        );
    }
    assert!(settings.len() > 60, "{}", settings.len());
}

#[test]
fn everything_in_the_schema_is_described() {
    fn described(path: &str, schema: &Value) {
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}/{name}");
            let text = inner["description"].as_str().unwrap_or_else(|| panic!("{path} has no description"));
            assert!(text.len() > 5 && !text.contains("likewise") && !text.contains("[`"), "{path}: {text}");
            described(&path, inner);
            described(&path, &inner["items"]);
            assert_ne!(inner["additionalProperties"], Value::Bool(true), "{path}");
        }
    }
    let schema = schema();
    described("", &schema);
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["properties"]["amqp"]["additionalProperties"], false);
    assert!(schema["properties"]["amqp"]["properties"]["password"].is_null(), "passwords must not be in the file");
}

/// The test does not look for these three maximums in the comments of config.toml. Two of them are the maximums of
/// integer types, and the third is the largest number that tallyd stores.
const NATURAL: [i64; 3] = [u16::MAX as i64, u32::MAX as i64, 1 << 62];

#[test]
fn the_schema_has_the_bounds_of_config_toml() {
    let (schema, mut section, mut comment) = (schema(), String::new(), String::new());
    for line in read("config.toml").lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            comment = format!("{comment} {rest}");
            continue;
        }
        let line = line.trim_start_matches('#');
        if let Some(name) = line.strip_prefix('[') {
            name.trim_matches(['[', ']']).clone_into(&mut section);
        } else if let Some((key, _)) = line.split_once(" = ") {
            let of_section = &schema["properties"][&section]["properties"][key];
            let of_block = &schema["properties"][&section]["items"]["properties"][key];
            for (known, before, after) in [(of_section, "(", ")"), (of_block, "from ", "")] {
                if let (Some(least), Some(most)) = (known["minimum"].as_i64(), known["maximum"].as_i64())
                    && !NATURAL.contains(&most)
                {
                    let bound = format!("{before}{least} to {most}{after}");
                    assert!(comment.contains(&bound), "[{section}] {key} lacks \"{bound}\":{comment}");
                }
            }
        }
        comment.clear();
    }
}

#[test]
fn a_word_that_can_be_chosen_is_offered_with_what_it_means() {
    let schema = schema();
    let format = &schema["properties"]["log"]["properties"]["format"];
    assert_eq!(format["enum"], serde_json::json!(["auto", "text", "json", "journald"]));
    let meanings = format["x-taplo"]["docs"]["enumValues"].as_array().unwrap();
    assert_eq!(meanings[2], "One JSON object per event.");
}
