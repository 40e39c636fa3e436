//! Reads the file, the environment, and the files of passwords and certificates into one [`Config`].

use std::path::Path;
use std::{fs, mem};

use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use toml::de::DeTable;
use toml::{Table, Value};

use super::key::{Key, Origin, Origins, place};
use super::password::{read_password, set_passwords};
use super::problem::{Fault, Faults, Problem};
use super::schema::{CONFIG_FILE, File, below};
use super::{Config, ConfigError, EventClock, admin, check, shape, tls};

pub const DEFAULT_PATH: &str = "/etc/tallyd/config.toml";

const ENV_PREFIX: &str = "TALLYD__";

#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    pub origins: Origins,
}

impl Loaded {
    pub fn log_as_the_environment_says(&mut self) {
        if let Some(level) = std::env::var("RUST_LOG").ok().filter(|level| !level.is_empty()) {
            self.config.log.level = level;
            self.origins.set("log.level".into(), Origin::Variable("RUST_LOG".to_owned()));
        }
    }
}

pub struct Read {
    table: Table,
    pub origins: Origins,
    pub faults: Faults,
    pub problems: Vec<Problem>,
}

pub fn load(path: &Path) -> Result<Config, ConfigError> {
    examine(path).map(|loaded| loaded.config).map_err(ConfigError::from)
}

pub fn examine(path: &Path) -> Result<Loaded, Vec<Problem>> {
    let mut read = read_file(path, CONFIG_FILE)?;
    let mut config: Config = typed(&mut read);
    let admin = &mut config.admin;
    let mut found = Faults::default();
    admin::read_token("admin", &mut admin.token, admin.token_file.as_deref(), &mut found);
    let mut loaded = checked(read, config, found)?;
    force_event_clock(&mut loaded);
    Ok(loaded)
}

pub fn checked(read: Read, mut config: Config, mut found: Faults) -> Result<Loaded, Vec<Problem>> {
    set_passwords(&mut config, &mut found);
    tls::read(&mut config, &mut found);
    check::problems(&config, &mut found);
    finished(read, found).map(|origins| Loaded { config, origins })
}

/// Adds the problems of values to those of reading.
pub fn finished(read: Read, found: Faults) -> Result<Origins, Vec<Problem>> {
    let Read { mut faults, origins, mut problems, .. } = read;
    let of_faults = faults.0.iter().flat_map(|fault| fault.keys.clone());
    let removed: Vec<Key> = of_faults.chain(problems.iter().filter_map(|problem| problem.key.clone())).collect();
    faults.0.extend(found.0.into_iter().filter(|fault| is_certain(fault, &removed, &origins)));
    problems.extend(faults.0.into_iter().map(|fault| Problem::new(fault, &origins)));
    if problems.is_empty() { Ok(origins) } else { Err(in_order(problems)) }
}

/// Reads only the environment, and the files that variables name. `tallyd init` needs this, because the configuration
/// does not exist yet.
pub fn load_environment() -> Result<Config, ConfigError> {
    let mut read = read_with_environment("", "the environment", CONFIG_FILE)?;
    let mut config = typed(&mut read);
    let Read { mut faults, origins, mut problems, .. } = read;
    set_passwords(&mut config, &mut faults);
    tls::read(&mut config, &mut faults);
    problems.extend(faults.0.into_iter().map(|fault| Problem::new(fault, &origins)));
    if problems.is_empty() { Ok(config) } else { Err(in_order(problems).into()) }
}

pub fn read_file(path: &Path, file: File) -> Result<Read, Vec<Problem>> {
    let name = path.display().to_string();
    let text = fs::read_to_string(path)
        .map_err(|error| vec![Problem { origin: None, key: None, text: format!("{name} can't be read: {error}") }])?;
    read_with_environment(&text, &name, file)
}

fn read_with_environment(text: &str, source: &str, file: File) -> Result<Read, Vec<Problem>> {
    if !file.has_variables {
        return read(text, source, [], file);
    }
    let environment =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut environment: Vec<(String, String)> = environment.collect();
    let files = read_urls(&mut environment);
    let mut found = read(text, source, environment, file)?;
    for (key, variable, problem) in files {
        let origin = Origin::Variable(variable);
        found.problems.extend(problem.map(|text| Problem {
            origin: Some(origin.clone()),
            key: Some(key.clone()),
            text,
        }));
        found.origins.set(key, origin);
    }
    Ok(found)
}

/// A variable such as `TALLYD__AMQP__URL_FILE` names a file with the address, so that an address with a password can
/// stay in a file.
fn read_urls(environment: &mut Vec<(String, String)>) -> Vec<(Key, String, Option<String>)> {
    let mut files = Vec::new();
    for section in ["amqp", "mysql", "redis"] {
        let variable = format!("{ENV_PREFIX}{}__URL", section.to_uppercase());
        let of_file = format!("{variable}_FILE");
        let Some(place) = environment.iter().position(|(name, _)| *name == of_file) else { continue };
        let (_, file) = environment.swap_remove(place);
        let problem = if environment.iter().any(|(name, _)| *name == variable) {
            Some(format!("{variable} is also set: unset one of them"))
        } else {
            let url = read_password("the address in", &file);
            url.map(|url| environment.push((variable, url.expose().to_owned()))).err()
        };
        files.push((Key::from(section).then("url"), of_file, problem));
    }
    files
}

/// Parses `text` and applies `environment`. In a problem, `source` is the name of the file. Reads no files, and does
/// not check values against each other.
pub fn parse(
    text: &str,
    source: &str,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Config, ConfigError> {
    let mut read = read(text, source, environment, CONFIG_FILE)?;
    let config = typed(&mut read);
    let Read { origins, faults, mut problems, .. } = read;
    problems.extend(faults.0.into_iter().map(|fault| Problem::new(fault, &origins)));
    let mut loaded = Loaded { config, origins };
    force_event_clock(&mut loaded);
    if problems.is_empty() { Ok(loaded.config) } else { Err(in_order(problems).into()) }
}

pub fn read(
    text: &str,
    source: &str,
    environment: impl IntoIterator<Item = (String, String)>,
    file: File,
) -> Result<Read, Vec<Problem>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // The text of these errors quotes the line, and the line can contain a password.
        let problem = |error: &toml::de::Error| {
            let place = place(source, text, error.span().map_or(0, |span| span.start));
            Problem::of_place(place, redacted(error.message()))
        };
        return Err(in_order(errors.iter().map(problem).collect()));
    }
    let mut origins = Origins::of_file(source, text, table.get_ref());
    let (mut faults, mut problems) = (Faults::default(), Vec::new());
    let mut whole = Value::Table(text.parse().unwrap_or_default());
    shape::check(&mut whole, (file.schema)(), &Key::default(), file, &mut faults);
    let Value::Table(mut table) = whole else { return Ok(Read { table: Table::new(), origins, faults, problems }) };
    let mut variables: Vec<(String, String)> = environment.into_iter().collect();
    variables.sort_unstable();
    for (name, value) in variables {
        let Some(dotted) = name.strip_prefix(ENV_PREFIX) else { continue };
        let mut wrong = Faults::default();
        if let Some(key) = set(&mut table, dotted, &value, file, &mut wrong) {
            origins.set(key, Origin::Variable(name.clone()));
        }
        problems.extend(wrong.0.into_iter().map(|Fault { keys, text }| Problem {
            origin: Some(Origin::Variable(name.clone())),
            key: keys.into_iter().next(),
            text,
        }));
    }
    Ok(Read { table, origins, faults, problems })
}

fn set(table: &mut Table, dotted: &str, text: &str, file: File, faults: &mut Faults) -> Option<Key> {
    let parts: Vec<String> = dotted.split("__").map(str::to_lowercase).collect();
    let (last, above) = parts.split_last()?;
    let (mut key, mut known) = (Key::default(), Some((file.schema)()));
    let schema = parts.iter().try_fold((file.schema)(), |schema, name| below(schema, name));
    let mut value = typed_text(schema, text);
    for part in &parts {
        let schema_above = known.unwrap_or(&Json::Null);
        (key, known) = (key.then(part), below(schema_above, part));
        let is_password =
            matches!(part.as_str(), "password" | "token") && below(schema_above, &format!("{part}_file")).is_some();
        if known.is_none() && !is_password {
            faults.at(key.clone(), shape::unknown(part, &value, &key, schema_above, file));
            return None;
        }
    }
    match known {
        Some(known) => drop(shape::check(&mut value, known, &key, file, faults)),
        None => value = Value::String(text.to_owned()),
    }
    if !faults.0.is_empty() {
        return None;
    }
    let section = above.iter().try_fold(table, |table, name| {
        table.entry(name.clone()).or_insert_with(|| Value::Table(Table::new())).as_table_mut()
    });
    let Some(section) = section else {
        let list = above.join("__").to_uppercase();
        faults.at(
            key,
            format!(
                "a variable can't set a single entry of a list: set the whole list with {ENV_PREFIX}{list}, or use the file"
            ),
        );
        return None;
    };
    section.insert(last.clone(), value);
    Some(key)
}

/// Returns a variable's value as TOML: a text if the schema requires a text, otherwise the parsed value.
fn typed_text(schema: Option<&Json>, text: &str) -> Value {
    let kind = schema.and_then(|schema| schema.get("type")).and_then(Json::as_str);
    let parsed = || format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
    let is_value =
        |value: &Value| matches!(value, Value::Integer(_) | Value::Float(_) | Value::Boolean(_) | Value::Array(_));
    match kind {
        Some("string") => None,
        _ => parsed().filter(is_value),
    }
    .unwrap_or_else(|| Value::String(text.to_owned()))
}

pub fn typed<T: DeserializeOwned + Default>(read: &mut Read) -> T {
    T::deserialize(Value::Table(mem::take(&mut read.table))).unwrap_or_else(|error| {
        read.problems.push(Problem { origin: None, key: None, text: redacted(error.message()) });
        T::default()
    })
}

fn force_event_clock(loaded: &mut Loaded) {
    if loaded.config.redis.also.is_some() {
        // API servers switch between the layouts at different moments. Until all servers have switched, a server can
        // add an event to the first layout slightly later than the event's `at`. The `at` can also come from another
        // node's clock.
        loaded.config.reconcile.event_clock = EventClock::Producer;
        loaded.origins.set("reconcile.event_clock".into(), Origin::Because("[redis.also]".to_owned()));
    }
}

/// The loader removes wrong values before the next checks. A problem that exists only because a value was removed is
/// not real.
fn is_certain(fault: &Fault, removed: &[Key], origins: &Origins) -> bool {
    let Some(key) = fault.keys.first() else { return true };
    let spoils = |removed: &Key| removed.parts().starts_with(key.parts()) || refers(key.section(), removed.section());
    removed.is_empty() || origins.has(key) && !removed.iter().any(spoils)
}

fn refers(section: &str, to: &str) -> bool {
    matches!(
        (section, to),
        ("rule" | "recount" | "retired", "kinds" | "metrics")
            | ("board", "metrics" | "board")
            | ("rule", "board")
            | ("import" | "export", "server")
    )
}

pub(super) fn in_order(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by_key(|problem| match &problem.origin {
        Some(Origin::File { line, column, .. }) => (0, *line, *column),
        _ => (1, 0, 0),
    });
    problems
}

/// Returns an error's text. If the text quotes a part of the configuration that can be an address with a password,
/// hides this part.
fn redacted(message: &str) -> String {
    match message.split_once('"') {
        Some((before, quoted)) if quoted.contains("://") || quoted.contains('@') => {
            let after = quoted.rsplit_once('"').map_or("", |(_, after)| after);
            format!("{before}\"...\"{after}")
        }
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, environment: &[(&str, &str)]) -> Result<Config, String> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        parse(text, "config.toml", environment).map_err(|error| error.to_string())
    }

    #[test]
    fn every_mistake_is_named_with_its_place_and_what_is_allowed() {
        let text = "[log]\nlevel = \"info\"\nformat = \"jsn\"\n[amqp]\nprefech = 5\n  partitions = \"many\"\nlinger_ms = 5\n\
                    [dameon]\n[kinds]\nvideo = 0\n[board]\nname = \"a\"\n[consumer]\nfuture_max = \"5\"\nlinger_ms = -1\n\
                    [[rule]]\nwriter = \"api\"\n[filter]\nfalse_positive = 0.5\n[metrics]\nview = 2\n[[archive]]\n";
        let expected = [
            "config.toml:3:1: [log] format is \"jsn\": did you mean \"json\"? allowed are \"auto\", \"text\", \"json\", \"journald\"",
            "config.toml:5:1: unknown key `prefech` in [amqp]: did you mean `prefetch`?",
            "config.toml:6:3: [amqp] partitions is \"many\": allowed are whole numbers, 1 to 256",
            "config.toml:7:1: unknown key `linger_ms` in [amqp]: the key exists in [consumer]",
            "config.toml:8:2: unknown section `dameon`: did you mean `daemon`?",
            "config.toml:10:1: [kinds] video is 0, allowed are 1 to 255",
            "config.toml:11:2: [board] is a block, and there can be several: write [[board]]",
            "config.toml:14:1: [consumer] future_max is \"5\": write a duration, at most 1d: \"500ms\", \"2s\", \"5m\", \"1h\" or \"30d\"",
            "config.toml:15:1: [consumer] linger_ms is -1, allowed are 0 to 10000",
            "config.toml:16:1: [[rule]] must have `metric`",
            "config.toml:19:1: [filter] false_positive is 0.5, allowed are 0.0000000001 to 0.1",
            "config.toml:20:2: [metrics] must have `like`",
            "config.toml:22:3: there can be only one [archive]: write its name in single brackets",
        ];
        let error = parsed(text, &[]).unwrap_err();
        let lines: Vec<&str> = error.lines().skip(1).map(str::trim).collect();
        assert_eq!(lines, expected, "{error}");
    }

    #[test]
    fn a_key_without_a_section_is_told_where_it_belongs() {
        let error = parsed("partitions = 4\nnothing_like_it = 1\n[amqp.url]\nx = 1\n", &[]).unwrap_err();
        for expected in [
            "config.toml:1:1: unknown key `partitions` before any section: the key exists in [amqp]",
            "config.toml:2:1: unknown key `nothing_like_it` before any section; known: `admin`, `amqp`, `archive`",
            "config.toml:3:7: [amqp] url is a table: write a text in quotes",
        ] {
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn every_line_that_is_no_toml_is_named() {
        let error = parsed("[amqp]\nurl = \nprefix = \"a\"\npartitions = 4 5\n[log\n", &[]).unwrap_err();
        for place in ["config.toml:2:", "config.toml:4:", "config.toml:5:"] {
            assert!(error.contains(place), "{error}");
        }
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
            assert!(!error.contains("s3cr3t"), "{error}");
            assert!(error.contains("[mysql] is a section") || error.contains("partitions is \"***\""), "{error}");
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
        assert!(
            error.contains("TALLYD__AMQP__PARTITION: unknown key `partition` in [amqp]: did you mean `partitions`?"),
            "{error}"
        );
        assert!(error.contains("TALLYD__LOG__FORMAT: [log] format is \"yaml\": allowed are"), "{error}");
    }

    #[test]
    fn a_password_is_taken_from_the_environment_but_not_from_the_file() {
        let config = parsed("", &[("TALLYD__REDIS__PASSWORD", "007")]).unwrap();
        assert_eq!(config.redis.login.password.unwrap().expose(), "007");
        let config =
            parsed("", &[("TALLYD__REDIS__KEY_PREFIX", "7"), ("TALLYD__FILTER__FALSE_POSITIVE", "0.01")]).unwrap();
        assert_eq!(
            (config.redis.key_prefix.as_str(), config.filter.false_positive),
            ("7", 0.01),
            "the key decides the type of the value"
        );
        assert!(parsed("[redis]\npassword = \"x\"\n", &[]).unwrap_err().contains("put it into a separate file"));
    }
}
