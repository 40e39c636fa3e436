//! The JSON Schemas of files with settings. Editors use the schema of config.toml, and tallyd checks the
//! values of each file and of the environment. The schemas are generated from the types, with their descriptions,
//! bounds and defaults.

use std::fmt::Write;
use std::sync::LazyLock;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use tallyd_core::day::{DAY, Day};
use tallyd_core::mapping::{PLACE, Place, WrongPlace};
use tallyd_core::pause::{LENGTH_OF_TIME, Pause, parse_pause};

use super::key::Key;
use super::{Amqp, Config, Mysql, Redis};

static SCHEMA: LazyLock<Value> = LazyLock::new(|| schema_of::<Config>("tallyd's config.toml"));

/// The schema of config.toml in draft 7, which Taplo (Even Better TOML) and most other editors understand.
pub fn schema() -> &'static Value {
    &SCHEMA
}

/// A file with settings. Variables belong to the file that the process reads.
#[derive(Clone, Copy, Debug)]
pub struct File {
    pub schema: fn() -> &'static Value,
    /// The file of a key that this file must not have.
    pub elsewhere: fn(&Key) -> Option<&'static str>,
    /// Whether `TALLYD__SECTION__KEY` sets a key.
    pub has_variables: bool,
}

pub(crate) const CONFIG_FILE: File = File {
    schema,
    elsewhere: |key| match key.section() {
        "gateway" => Some("gateway.toml, which only `tallyd gateway` reads: docs/gateway.md"),
        "import" | "export" | "server" => Some("move.toml, beside config.toml: docs/moving.md"),
        _ => None,
    },
    has_variables: true,
};

/// For a file that lacks keys of config.toml.
pub fn of_daemon(key: &Key) -> Option<&'static str> {
    key.parts().iter().try_fold(schema(), |schema, part| below(schema, part)).map(|_| "the daemon's config.toml")
}

/// The schema of a file with these settings.
pub fn schema_of<T: JsonSchema>(title: &str) -> Value {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    mend(&mut schema);
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("title".to_owned(), json!(title));
        schema.insert("description".to_owned(), json!("You can leave out every key. A missing key has its default."));
    }
    // The serialized addresses lack the users' names, so the names are added here.
    for (section, url) in
        [("amqp", Amqp::default().url), ("mysql", Mysql::default().url), ("redis", Redis::default().url)]
    {
        if let Some(known) = schema.pointer_mut(&format!("/properties/{section}/properties/url/default")) {
            *known = json!(url.expose());
        }
    }
    // The keys have defaults, so the section needs no default.
    for section in schema.get_mut("properties").and_then(Value::as_object_mut).into_iter().flatten() {
        if let Some(section) = section.1.as_object_mut() {
            section.remove("default");
        }
    }
    schema
}

/// Removes parts that TOML doesn't have, and parts that describe Rust types.
fn mend(schema: &mut Value) {
    match schema {
        Value::Object(inner) => {
            if inner.get("default").is_some_and(Value::is_null) {
                inner.remove("default");
            }
            // If the value of `format` is not a string, `format` is a configuration key. Then it stays in the schema.
            match inner.get("format").and_then(Value::as_str) {
                None | Some(LENGTH_OF_TIME | PLACE | DAY) => {}
                Some(format) => {
                    if format == "uint32" {
                        inner.entry("maximum").or_insert_with(|| json!(u32::MAX));
                    }
                    inner.remove("format");
                }
            }
            if let Some(choices) = inner.remove("oneOf") {
                choose(inner, &choices);
            }
            if let Some(text) = inner.get("description").and_then(Value::as_str) {
                let text = text.replace("\n\n", "\n").replace('\n', " ");
                inner.insert("description".to_owned(), json!(text));
            }
            inner.values_mut().for_each(mend);
        }
        Value::Array(inner) => inner.iter_mut().for_each(mend),
        _ => {}
    }
}

/// Turns the allowed words and their descriptions into two lists. Editors offer the words as completions. The Taplo
/// language server shows the description beside each word.
fn choose(schema: &mut Map<String, Value>, choices: &Value) {
    let (mut words, mut docs) = (Vec::new(), Vec::new());
    for choice in choices.as_array().into_iter().flatten() {
        // A word with a description has its own entry. Words without a description share an entry.
        let shared = choice.get("enum").and_then(Value::as_array);
        words.extend(choice.get("const").into_iter().chain(shared.into_iter().flatten()).cloned());
        docs.resize(words.len(), choice.get("description").cloned().unwrap_or_else(|| json!("")));
    }
    schema.insert("type".to_owned(), json!("string"));
    schema.insert("enum".to_owned(), json!(words));
    schema.insert("x-taplo".to_owned(), json!({ "docs": { "enumValues": docs } }));
}

pub(super) fn below<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    let named = schema.get("properties").and_then(|known| known.get(name));
    let any = || schema.get("additionalProperties").filter(|any| any.is_object());
    let item = || schema.get("items").filter(|_| name.bytes().all(|byte| byte.is_ascii_digit()));
    named.or_else(any).or_else(item)
}

pub(super) fn names(schema: &Value) -> impl Iterator<Item = &str> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(name, _)| name.as_str())
}

pub(super) fn allowed(schema: &Value) -> String {
    if let Some(words) = schema.get("enum").and_then(Value::as_array) {
        let words: Vec<String> = words.iter().map(Value::to_string).collect();
        return format!("allowed are {}", words.join(", "));
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("integer") => {
            format!("allowed are whole numbers{}", bounds(schema).map_or_else(String::new, |it| format!(", {it}")))
        }
        Some("number") => {
            format!("allowed are numbers{}", bounds(schema).map_or_else(String::new, |it| format!(", {it}")))
        }
        Some("boolean") => "allowed are true and false".to_owned(),
        Some("array") => "write a list in brackets: [\"one\", \"two\"]".to_owned(),
        _ => match format(schema) {
            Some(LENGTH_OF_TIME) => {
                let bounds = bounds(schema).map_or_else(String::new, |it| format!(", {it}"));
                format!("write a duration{bounds}: \"500ms\", \"2s\", \"5m\", \"1h\" or \"30d\"")
            }
            Some(DAY) => "write a day: \"2010-01-31\"".to_owned(),
            Some(PLACE) => WrongPlace.to_string(),
            _ => "write a text in quotes".to_owned(),
        },
    }
}

pub(super) fn has_format(text: &str, schema: &Value) -> bool {
    match format(schema) {
        Some(LENGTH_OF_TIME) => parse_pause(text).is_ok_and(|it| is_within(it, schema)),
        Some(DAY) => text.parse::<Day>().is_ok(),
        Some(PLACE) => text.parse::<Place>().is_ok(),
        _ => true,
    }
}

fn format(schema: &Value) -> Option<&str> {
    schema.get("format").and_then(Value::as_str)
}

/// The bounds of a duration stand at its field: `x-minimum` and `x-maximum`, because JSON Schema has none for texts.
fn is_within(pause: Pause, schema: &Value) -> bool {
    let limit = |name: &str| schema.get(name).and_then(Value::as_str).and_then(|text| parse_pause(text).ok());
    limit("x-minimum").is_none_or(|least| pause >= least) && limit("x-maximum").is_none_or(|most| pause <= most)
}

pub(super) fn bounds(schema: &Value) -> Option<String> {
    let of = |names: [&str; 2]| names.into_iter().find_map(|name| schema.get(name).and_then(shown));
    match (of(["minimum", "x-minimum"]), of(["maximum", "x-maximum"])) {
        (Some(least), Some(most)) => Some(format!("{least} to {most}")),
        (Some(least), None) => Some(format!("{least} or more")),
        (None, Some(most)) => Some(format!("at most {most}")),
        (None, None) => None,
    }
}

fn shown(number: &Value) -> Option<String> {
    if let Some(duration) = number.as_str() {
        return Some(duration.to_owned());
    }
    let mut text = String::new();
    match number.as_i64() {
        Some(whole) => write!(text, "{whole}").ok()?,
        None => write!(text, "{}", number.as_f64()?).ok()?,
    }
    Some(text)
}
