//! The name of a setting, and where its value comes from.

use std::collections::BTreeMap;
use std::fmt;

use toml::de::{DeTable, DeValue};

use super::problem::{Fault, Problem};

/// For example `amqp`, `partitions`, or in a list of blocks `board`, `0`, `tie`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(Vec<String>);

impl Key {
    #[must_use]
    pub fn then(&self, part: impl fmt::Display) -> Self {
        let mut parts = self.0.clone();
        parts.push(part.to_string());
        Self(parts)
    }

    pub fn parts(&self) -> &[String] {
        &self.0
    }

    pub fn section(&self) -> &str {
        self.0.first().map_or("", String::as_str)
    }

    pub(super) fn above(&self) -> Self {
        Self(self.0.split_last().map_or_else(Vec::new, |(_, above)| above.to_vec()))
    }

    fn is_block(&self) -> bool {
        self.0.get(1).is_some_and(|place| place.bytes().all(|byte| byte.is_ascii_digit()))
    }

    /// Returns the form for programs: `amqp.partitions`, `board.0.tie`.
    pub(crate) fn dotted(&self) -> String {
        self.0.join(".")
    }
}

impl From<&str> for Key {
    fn from(dotted: &str) -> Self {
        Self(dotted.split('.').map(str::to_owned).collect())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(section) = self.0.first() else { return Ok(()) };
        let rest = if self.is_block() { self.0.get(2..) } else { self.0.get(1..) }.unwrap_or_default();
        // The position in a list does not help the reader.
        let names: Vec<&String> = rest.iter().filter(|part| !part.bytes().all(|byte| byte.is_ascii_digit())).collect();
        match names.as_slice() {
            _ if self.is_block() => write!(f, "[[{section}]]")?,
            [inner, _] => write!(f, "[{section}.{inner}]")?,
            _ => write!(f, "[{section}]")?,
        }
        names.last().map_or(Ok(()), |name| write!(f, " {name}"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    Variable(String),
    File { file: String, line: usize, column: usize },
    Because(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Variable(name) => f.write_str(name),
            Self::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            Self::Because(of) => write!(f, "because of {of}"),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Origins(BTreeMap<Key, Origin>);

impl Origins {
    pub(super) fn of_file(file: &str, text: &str, table: &DeTable<'_>) -> Self {
        let mut origins = Self::default();
        origins.collect(&Key::default(), table, &|offset| place(file, text, offset));
        origins
    }

    fn collect(&mut self, above: &Key, table: &DeTable<'_>, place: &dyn Fn(usize) -> Origin) {
        for (name, value) in table {
            let key = above.then(name.get_ref());
            self.set(key.clone(), place(name.span().start));
            match value.get_ref() {
                DeValue::Table(inner) => self.collect(&key, inner, place),
                DeValue::Array(items) => {
                    for (index, item) in items.iter().enumerate() {
                        let key = key.then(index);
                        self.set(key.clone(), place(item.span().start));
                        if let DeValue::Table(inner) = item.get_ref() {
                            self.collect(&key, inner, place);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    pub(super) fn set(&mut self, key: Key, origin: Origin) {
        self.0.insert(key, origin);
    }

    pub fn of(&self, key: &Key) -> Origin {
        // If one variable sets a whole list, this variable is the origin of each value in the list.
        let list = || self.0.get(&key.above()).filter(|origin| matches!(origin, Origin::Variable(_)));
        self.0.get(key).or_else(list).cloned().unwrap_or(Origin::Default)
    }

    /// Returns a problem with the text `text`. The problem shows the first of the `keys` that is configured, and the
    /// file or variable that has set this key.
    pub fn problem(&self, keys: &[Key], text: String) -> Problem {
        Problem::new(Fault { keys: keys.to_vec(), text }, self)
    }

    pub(super) fn has(&self, key: &Key) -> bool {
        self.of(key) != Origin::Default
    }

    pub(super) fn nearest(&self, keys: &[Key]) -> Option<Origin> {
        let set = keys.iter().find(|key| self.has(key)).map(|key| self.of(key));
        set.or_else(|| {
            let mut above = keys.first()?.above();
            while !above.parts().is_empty() {
                if self.has(&above) {
                    return Some(self.of(&above));
                }
                above = above.above();
            }
            None
        })
    }
}

pub(super) fn place(file: &str, text: &str, offset: usize) -> Origin {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
    Origin::File { file: file.to_owned(), line, column }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_as_they_are_written() {
        for (key, shown) in [
            ("amqp", "[amqp]"),
            ("amqp.partitions", "[amqp] partitions"),
            ("redis.also", "[redis] also"),
            ("redis.also.layout", "[redis.also] layout"),
            ("reconcile.replicas.1", "[reconcile] replicas"),
            ("board.0", "[[board]]"),
            ("board.0.tie", "[[board]] tie"),
            ("board.0.score.1", "[[board]] score"),
        ] {
            assert_eq!(Key::from(key).to_string(), shown);
        }
    }

    #[test]
    fn a_setting_is_found_where_it_stands() {
        let text = "[amqp]\nprefix = \"é\"\n  partitions = 4\n[[board]]\nname = \"a\"\n[[board]]\nname = \"b\"\nscore = [\"x\",\n \"y\"]\n";
        let origins = Origins::of_file("f", text, DeTable::parse(text).unwrap().get_ref());
        for (key, shown) in [
            ("amqp.partitions", "f:3:3"),
            ("amqp", "f:1:2"),
            ("amqp.prefetch", "default"),
            ("board.1.name", "f:7:1"),
            ("board.1", "f:6:1"),
            ("board.1.score.1", "f:9:2"),
        ] {
            assert_eq!(origins.of(&Key::from(key)).to_string(), shown, "{key}");
        }
        assert_eq!(origins.nearest(&["amqp.prefetch".into(), "amqp.partitions".into()]).unwrap().to_string(), "f:3:3");
        assert_eq!(origins.nearest(&["amqp.prefetch".into()]).unwrap().to_string(), "f:1:2");
        assert_eq!(origins.nearest(&["mysql.url".into()]), None);
    }
}
