//! Checks values against the schema: unknown names, wrong types, numbers out of bounds. Removes wrong values, so that
//! the other values can be checked.

use serde_json::Value as Json;
use toml::Value;

use super::key::Key;
use super::problem::Faults;
use super::schema::{File, allowed, below, bounds, has_format, names};

/// If the similarity (0 to 1) of an unknown name and a known name is at least this number, the unknown name is probably
/// a typing error.
const ALIKE_MIN: f64 = 0.8;

const SHOWN_MAX: usize = 60;

pub(super) fn check(value: &mut Value, schema: &Json, key: &Key, file: File, faults: &mut Faults) -> bool {
    let schema = variant(schema, value);
    let kind = schema.get("type").and_then(Json::as_str).unwrap_or_default();
    match (kind, &mut *value) {
        ("object", Value::Table(table)) => return check_table(table, schema, key, file, faults),
        ("array", Value::Array(items)) => {
            let (mut index, item) = (0, schema.get("items").unwrap_or(&Json::Null));
            items.retain_mut(|value| {
                index += 1;
                check(value, item, &key.then(index - 1), file, faults)
            });
            return true;
        }
        ("boolean", Value::Boolean(_)) => return true,
        ("integer" | "number", Value::Integer(_)) | ("number", Value::Float(_)) => {
            if is_within(value, schema) {
                return true;
            }
            let bounds = bounds(schema).unwrap_or_default();
            faults.at(key.clone(), format!("{key} is {}, allowed are {bounds}", shown(value, key)));
        }
        ("string", Value::String(text)) => match wrong_text(text, schema) {
            None => return true,
            Some(why) => faults.at(key.clone(), format!("{key} is {}: {why}", shown(value, key))),
        },
        ("object", Value::Array(_)) if key.parts().len() == 1 => {
            faults.at(key.clone(), format!("there can be only one {key}: write its name in single brackets"));
        }
        ("object", _) => {
            faults.at(key.clone(), format!("{key} is a section, not a key: write its keys below it, one in each line"));
        }
        ("array", Value::Table(_)) if key.parts().len() == 1 => {
            let name = key.section();
            faults.at(key.clone(), format!("[{name}] is a block, and there can be several: write [[{name}]]"));
        }
        _ => faults.at(key.clone(), format!("{key} is {}: {}", shown(value, key), allowed(schema))),
    }
    false
}

/// Returns the part of a schema with alternatives that fits a list, if the value is a list, and else the first part.
fn variant<'a>(schema: &'a Json, value: &Value) -> &'a Json {
    let Some(variants) = schema.get("anyOf").and_then(Json::as_array) else { return schema };
    let is_list = |variant: &&Json| variant.get("type").is_some_and(|kind| kind == "array");
    variants.iter().find(|variant| is_list(variant) == value.is_array()).unwrap_or(schema)
}

fn check_table(table: &mut toml::Table, schema: &Json, key: &Key, file: File, faults: &mut Faults) -> bool {
    table.retain(|name, value| {
        let key = key.then(name);
        match below(schema, name) {
            Some(schema) => check(value, schema, &key, file, faults),
            None => {
                let text = unknown(name, value, &key, schema, file);
                faults.at(key, text);
                false
            }
        }
    });
    let needed = schema.get("required").and_then(Json::as_array).into_iter().flatten().filter_map(Json::as_str);
    let missing: Vec<&str> = needed.filter(|name| !table.contains_key(*name)).collect();
    for name in &missing {
        faults.at(key.clone(), format!("{key} must have `{name}`"));
    }
    missing.is_empty()
}

pub(super) fn unknown(name: &str, value: &Value, key: &Key, schema: &Json, file: File) -> String {
    if let Some(other) = (file.elsewhere)(key) {
        return format!("{key} belongs in {other}");
    }
    let above = key.above();
    if matches!(name, "password" | "token") && below(schema, &format!("{name}_file")).is_some() {
        let variable = format!("TALLYD__{}__{}", key.section().to_uppercase(), name.to_uppercase());
        let or = if file.has_variables { format!(" or into the environment ({variable})") } else { String::new() };
        return format!("{above} `{name}` is not allowed here: put it into a separate file ({name}_file){or}");
    }
    let (what, of) = match above.parts().is_empty() {
        true if value.is_table() || value.is_array() => ("section", String::new()),
        true => ("key", " before any section".to_owned()),
        false => ("key", format!(" in {above}")),
    };
    let problem = format!("unknown {what} `{name}`{of}");
    let is_section = what == "section";
    if let Some(near) = nearest(name, names(schema)) {
        return format!("{problem}: did you mean `{near}`?");
    }
    let sections = || (file.schema)().get("properties").and_then(Json::as_object).into_iter().flatten();
    let elsewhere: Vec<String> = sections()
        .filter(|(section, it)| {
            !is_section && *section != key.section() && below(it, name).is_some() && names(it).any(|it| it == name)
        })
        .map(|(section, _)| format!("[{section}]"))
        .collect();
    if !elsewhere.is_empty() {
        return format!("{problem}: the key exists in {}", elsewhere.join(" and "));
    }
    let known: Vec<String> = names(schema).map(|name| format!("`{name}`")).collect();
    format!("{problem}; known: {}", known.join(", "))
}

fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let written = name.to_lowercase().replace('-', "_");
    let alike = |known: &&str| strsim::jaro_winkler(&written, known);
    known.filter(|known| alike(known) >= ALIKE_MIN).max_by(|one, other| alike(one).total_cmp(&alike(other)))
}

fn is_within(value: &Value, schema: &Json) -> bool {
    let number = match value {
        Value::Integer(number) => *number as f64,
        Value::Float(number) => *number,
        _ => return false,
    };
    let limit = |name: &str| schema.get(name).and_then(Json::as_f64);
    limit("minimum").is_none_or(|least| number >= least) && limit("maximum").is_none_or(|most| number <= most)
}

fn wrong_text(text: &str, schema: &Json) -> Option<String> {
    let words = schema.get("enum").and_then(Json::as_array);
    let is_wrong = match words {
        Some(words) => !words.iter().any(|word| word == text),
        None => !has_format(text, schema),
    };
    let near = || {
        nearest(text, words.into_iter().flatten().filter_map(Json::as_str))
            .map(|near| format!("did you mean \"{near}\"? "))
    };
    is_wrong.then(|| format!("{}{}", near().unwrap_or_default(), allowed(schema)))
}

/// Returns a value as it is written in the file. Hides a value that can be a secret.
fn shown(value: &Value, key: &Key) -> String {
    let is_secret =
        key.parts().last().is_some_and(|name| name.contains("password") || matches!(name.as_str(), "url" | "token"));
    let text = match value {
        Value::Float(number) => number.to_string(),
        Value::Table(_) => return "a table".to_owned(),
        value => value.to_string(),
    };
    match () {
        () if is_secret || text.contains("://") || text.contains('@') => "\"***\"".to_owned(),
        () if text.chars().count() > SHOWN_MAX => format!("{}...", text.chars().take(SHOWN_MAX).collect::<String>()),
        () => text,
    }
}
