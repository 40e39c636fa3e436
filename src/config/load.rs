//! File, environment and password files become one [`Config`].

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::{Config, ConfigError, EventClock, Secret, ServerUrl, check};

/// Where the configuration is looked for when nothing else is said.
pub const DEFAULT_PATH: &str = "/etc/tallyd/config.toml";

const ENV_PREFIX: &str = "TALLYD__";

/// Reads `path`, lays the environment over it, reads the password files and checks the whole.
///
/// # Errors
/// Every problem found, each naming the file and line, or the variable, it comes from.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let text = fs::read_to_string(path)
        .map_err(|error| ConfigError(vec![format!("{} can't be read: {error}", path.display())]))?;
    let environment =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut config = parse(&text, &path.display().to_string(), environment)?;
    let mut problems = Vec::new();
    for (section, url, password, file) in [
        ("amqp", &mut config.amqp.url, &config.amqp.password, &config.amqp.password_file),
        ("mysql", &mut config.mysql.url, &config.mysql.password, &config.mysql.password_file),
        ("redis", &mut config.redis.url, &config.redis.password, &config.redis.password_file),
    ] {
        if let Err(problem) = set_password(url, password.as_ref(), file.as_deref()) {
            problems.push(format!("[{section}] {problem}"));
        }
    }
    problems.extend(check::problems(&config));
    if problems.is_empty() { Ok(config) } else { Err(ConfigError(problems)) }
}

/// The types without files and cross-checks: `text` from `source`, with the variables of `environment` over it.
///
/// # Errors
/// What is unknown or of the wrong type, with its line or variable.
pub fn parse(
    text: &str,
    source: &str,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Config, ConfigError> {
    let mut config: Config = toml::from_str(text).map_err(|error| {
        // Not the error's own display: it quotes the line, which may hold a password.
        let place = error.span().map_or_else(String::new, |span| line_and_column(text, span.start));
        ConfigError(vec![format!("{source}{place}: {}", redacted(error.message()))])
    })?;
    if [&config.amqp.password, &config.mysql.password, &config.redis.password].iter().any(|password| password.is_some())
    {
        let problem =
            format!("{source}: `password` belongs in a file of its own (password_file) or in the environment");
        return Err(ConfigError(vec![problem]));
    }
    let mut table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| ConfigError(vec![format!("{source}: {}", redacted(error.message()))]))?;
    let mut problems = Vec::new();
    for (name, value) in environment {
        let Some(keys) = name.strip_prefix(ENV_PREFIX) else { continue };
        let keys: Vec<String> = keys.split("__").map(str::to_lowercase).collect();
        let before = table.clone();
        let applied = insert(&mut table, &keys, scalar(&keys, &value))
            .and_then(|()| Config::deserialize(Value::Table(table.clone())).map_err(|error| redacted(error.message())));
        match applied {
            Ok(changed) => config = changed,
            Err(error) => {
                problems.push(format!("{name}: {error}"));
                table = before;
            }
        }
    }
    if config.redis.also.is_some() {
        // While API servers exchange the two layouts, some count in the first one a moment after they had the `at`, or by another
        // node's clock.
        config.reconcile.event_clock = EventClock::Producer;
    }
    if problems.is_empty() { Ok(config) } else { Err(ConfigError(problems)) }
}

/// An error's text without what it quotes of the configuration, where that may be an address with a password.
fn redacted(message: &str) -> String {
    match message.split_once('"') {
        Some((before, quoted)) if quoted.contains("://") || quoted.contains('@') => {
            let after = quoted.rsplit_once('"').map_or("", |(_, after)| after);
            format!("{before}\"...\"{after}")
        }
        _ => message.to_owned(),
    }
}

fn line_and_column(text: &str, offset: usize) -> String {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
    format!(":{line}:{column}")
}

/// A variable's value as TOML has it: a number, a boolean or a list where it reads as one, else text.
fn scalar(keys: &[String], value: &str) -> Value {
    let text = || Value::String(value.to_owned());
    if keys.last().is_some_and(|key| key == "password") {
        return text();
    }
    match format!("value = {value}").parse::<Table>().ok().and_then(|mut table| table.remove("value")) {
        Some(parsed @ (Value::Integer(_) | Value::Boolean(_) | Value::Array(_))) => parsed,
        _ => text(),
    }
}

fn insert(table: &mut Table, keys: &[String], value: Value) -> Result<(), String> {
    match keys {
        [] => Err("names no key".to_owned()),
        [key] => {
            table.insert(key.clone(), value);
            Ok(())
        }
        [section, rest @ ..] => match table.entry(section.clone()).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => insert(inner, rest, value),
            _ => Err(format!("`{section}` is no section")),
        },
    }
}

fn set_password(url: &mut ServerUrl, password: Option<&Secret>, file: Option<&str>) -> Result<(), String> {
    let password = match (password, file) {
        (Some(password), _) => password.clone(),
        (None, Some(file)) => read_password(file)?,
        (None, None) => return Ok(()),
    };
    url.set_password(&password).map_err(|error| format!("url {error}"))
}

/// A relative path is one of systemd's credentials (`LoadCredential=`).
fn read_password(file: &str) -> Result<Secret, String> {
    let mut path = PathBuf::from(file);
    if path.is_relative() {
        let Some(directory) = std::env::var_os("CREDENTIALS_DIRECTORY") else {
            return Err(format!(
                "password_file is the credential {file}, but systemd passed none: \
                 write an absolute path, or LoadCredential={file}:/path in the unit"
            ));
        };
        path = Path::new(&directory).join(file);
    }
    let failed = |error: std::io::Error| format!("password_file {}: {error}", path.display());
    if fs::metadata(&path).map_err(failed)?.permissions().mode() & 0o007 != 0 {
        return Err(format!("password_file {} can be read by everyone: chmod 0640 or stricter", path.display()));
    }
    let text = fs::read_to_string(&path).map_err(failed)?;
    Ok(Secret::new(text.trim_end_matches(['\n', '\r']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, environment: &[(&str, &str)]) -> Result<Config, String> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        parse(text, "config.toml", environment).map_err(|error| error.to_string())
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let error = parsed("[log]\nlevel = \"info\"\n\n[amqp]\nprefech = 5\n", &[]).unwrap_err();
        assert!(error.contains("config.toml:5:1: unknown field `prefech`"), "{error}");
    }

    #[test]
    fn a_broken_line_is_not_quoted() {
        let error = parsed("[amqp]\nurl = \"amqp://user:secret@host\n", &[]).unwrap_err();
        assert!(error.contains("config.toml:2:") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn an_address_in_the_wrong_place_is_not_quoted() {
        for error in [
            parsed("mysql = \"mysql://u:s3cr3t@h/db\"", &[]).unwrap_err(),
            parsed("", &[("TALLYD__MYSQL", "mysql://u:s3cr3t@h/db")]).unwrap_err(),
            parsed("[amqp]\npartitions = \"amqp://u:s3cr3t@h/%2f\"", &[]).unwrap_err(),
        ] {
            assert!(!error.contains("s3cr3t") && error.contains("invalid type"), "{error}");
        }
    }

    #[test]
    fn the_environment_wins_and_its_mistakes_are_named() {
        let text = "[amqp]\npartitions = 2\n";
        let config =
            parsed(text, &[("TALLYD__AMQP__PARTITIONS", "4"), ("TALLYD__CONSUMER__FUTURE_MAX", "1m"), ("HOME", "/")]);
        let config = config.unwrap();
        assert_eq!((config.amqp.partitions, config.consumer.future_max), (4, super::super::Pause::from_secs(60)));
        let error = parsed(text, &[("TALLYD__AMQP__PARTITION", "4"), ("TALLYD__LOG__FORMAT", "yaml")]).unwrap_err();
        assert!(error.contains("TALLYD__AMQP__PARTITION: unknown field"), "{error}");
        assert!(error.contains("TALLYD__LOG__FORMAT: unknown variant `yaml`"), "{error}");
    }

    #[test]
    fn a_password_is_taken_from_the_environment_but_not_from_the_file() {
        let config = parsed("", &[("TALLYD__REDIS__PASSWORD", "007")]).unwrap();
        assert_eq!(config.redis.password.unwrap().expose(), "007");
        assert!(parsed("[redis]\npassword = \"x\"\n", &[]).unwrap_err().contains("belongs in a file of its own"));
    }
}
