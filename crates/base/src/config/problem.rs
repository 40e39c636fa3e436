//! Problems of the configuration, and their places in the file.

use std::fmt;

use serde::{Serialize, Serializer, ser::SerializeMap};

use super::key::{Key, Origin, Origins};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The keys that cause the problem. Most likely, the first key must be corrected.
    pub keys: Vec<Key>,
    pub text: String,
}

#[derive(Debug, Default)]
pub struct Faults(pub Vec<Fault>);

impl Faults {
    pub fn at(&mut self, key: impl Into<Key>, text: impl Into<String>) {
        self.0.push(Fault { keys: vec![key.into()], text: text.into() });
    }

    pub fn between(&mut self, keys: &[Key], text: impl Into<String>) {
        self.0.push(Fault { keys: keys.to_vec(), text: text.into() });
    }

    pub fn texts(find: impl FnOnce(&mut Self)) -> Vec<String> {
        let mut found = Self::default();
        find(&mut found);
        found.0.into_iter().map(|fault| fault.text).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub origin: Option<Origin>,
    pub key: Option<Key>,
    pub text: String,
}

impl Problem {
    pub fn new(fault: Fault, origins: &Origins) -> Self {
        let origin = origins.nearest(&fault.keys);
        let key = fault.keys.iter().find(|key| origins.has(key)).or(fault.keys.first()).cloned();
        let key = key.filter(|key| !key.section().is_empty());
        Self { origin, key, text: fault.text }
    }

    pub(crate) fn of_place(origin: Origin, text: impl Into<String>) -> Self {
        Self { origin: Some(origin), key: None, text: text.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(origin) = &self.origin {
            write!(f, "{origin}: ")?;
        }
        f.write_str(&self.text)
    }
}

/// Writes the place as JSON: `{"file":...,"line":...,"column":...,"key":...}`. If the problem is in an environment
/// variable, the JSON names the variable instead of file, line and column.
impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match &self.origin {
            Some(Origin::File { file, line, column }) => {
                map.serialize_entry("file", file)?;
                map.serialize_entry("line", line)?;
                map.serialize_entry("column", column)?;
            }
            Some(Origin::Variable(name)) => map.serialize_entry("variable", name)?,
            _ => {}
        }
        if let Some(key) = &self.key {
            map.serialize_entry("key", &key.dotted())?;
        }
        map.end()
    }
}
