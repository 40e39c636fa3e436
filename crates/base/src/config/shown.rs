//! Prints the current configuration: secrets are masked, and each setting has its origin.

use std::fmt::Write;

use serde_json::json;
use toml::{Table, Value};

use super::ServerUrl;
use super::key::{Key, Origin};
use super::load::Loaded;

const ORIGIN_COLUMN_MAX: usize = 64;

fn table(loaded: &Loaded) -> Table {
    let config = &loaded.config;
    // Writing the configuration as TOML can't fail.
    let mut table = Table::try_from(config).unwrap_or_default();
    for (section, url) in [("amqp", &config.amqp.url), ("mysql", &config.mysql.url), ("redis", &config.redis.url)] {
        if let Some(known) = table.get_mut(section).and_then(|section| section.get_mut("url")) {
            *known = Value::String(ServerUrl::masked(url));
        }
    }
    // A list without blocks sets nothing, so the output does not contain the list.
    table.retain(|_, value| value.as_array().is_none_or(|blocks| !blocks.is_empty()));
    table
}

impl Loaded {
    pub fn to_toml(&self, origins: bool) -> String {
        let mut text = String::new();
        for (name, value) in table(self) {
            let key = Key::default().then(&name);
            match value {
                Value::Array(blocks) => {
                    for (place, block) in blocks.into_iter().enumerate() {
                        if let Value::Table(block) = block {
                            self.write(&mut text, &format!("[[{name}]]"), &key.then(place), &block, origins);
                        }
                    }
                }
                Value::Table(section) => self.write(&mut text, &format!("[{name}]"), &key, &section, origins),
                _ => {}
            }
        }
        text
    }

    fn write(&self, text: &mut String, header: &str, key: &Key, table: &Table, origins: bool) {
        let is_setting = |value: &Value| !value.is_table();
        let lines: Vec<(String, Key)> = table
            .iter()
            .filter(|(_, value)| is_setting(value))
            .map(|(name, value)| {
                // tallyd rejects a password in the file, so this line is a comment.
                let mark = if matches!(name.as_str(), "password" | "token") { "#" } else { "" };
                (format!("{mark}{name} = {value}"), key.then(name))
            })
            .collect();
        let column = lines.iter().map(|(line, _)| line.chars().count()).max().unwrap_or(0).min(ORIGIN_COLUMN_MAX);
        let blank = if text.is_empty() { "" } else { "\n" };
        // A String can't fail.
        let _ = writeln!(text, "{blank}{header}");
        for (line, key) in lines {
            let _ = match origins {
                true => writeln!(text, "{line:column$}  # {}", self.origins.of(&key)),
                false => writeln!(text, "{line}"),
            };
        }
        for (name, value) in table {
            if let Value::Table(inner) = value {
                let key = key.then(name);
                self.write(text, &format!("[{}]", key.dotted()), &key, inner, origins);
            }
        }
    }

    pub fn to_json(&self, origins: bool) -> serde_json::Value {
        let whole = serde_json::to_value(table(self)).unwrap_or_default();
        if !origins {
            return whole;
        }
        let mut settings = Vec::new();
        self.list(&Key::default(), &whole, &mut settings);
        json!({ "settings": settings })
    }

    fn list(&self, key: &Key, value: &serde_json::Value, settings: &mut Vec<serde_json::Value>) {
        match value {
            serde_json::Value::Object(inner) => {
                inner.iter().for_each(|(name, value)| self.list(&key.then(name), value, settings));
            }
            serde_json::Value::Array(blocks) if blocks.iter().any(serde_json::Value::is_object) => {
                blocks.iter().enumerate().for_each(|(place, block)| self.list(&key.then(place), block, settings));
            }
            value => {
                let mut setting = json!({ "key": key.dotted(), "value": value });
                let origin = self.origins.of(key);
                let (what, at) = match &origin {
                    Origin::Default => ("default", None),
                    Origin::Variable(name) => ("variable", Some(name.clone())),
                    Origin::File { .. } => ("file", Some(origin.to_string())),
                    Origin::Because(of) => ("setting", Some(of.clone())),
                };
                setting["origin"] = json!(what);
                if let Some(at) = at {
                    setting["at"] = json!(at);
                }
                settings.push(setting);
            }
        }
    }
}
