//! Operations that are currently failing and being retried. Like the log, the list is global to the process.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::clock;
use super::lock::locked;
use tallyd_core::partition::PartitionName;

#[derive(Debug)]
pub struct Waits {
    begun: AtomicU64,
    open: Mutex<BTreeMap<u64, Wait>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wait {
    pub what: Work,
    pub reason: String,
    /// Of the first failure, in microseconds since the epoch.
    pub since: i64,
    pub tries: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "Cow<'static, str>")]
pub enum Work {
    Writing(PartitionName),
    Consuming(PartitionName),
    Database(PartitionName),
    Other(Cow<'static, str>),
}

/// Global, because any code can fail, and the status lists all of it. Below telemetry, which reads it.
static WAITS: Waits = Waits::new();

pub fn waits() -> &'static Waits {
    &WAITS
}

impl Waits {
    const fn new() -> Self {
        Self { begun: AtomicU64::new(0), open: Mutex::new(BTreeMap::new()) }
    }

    pub(super) fn begin(&self, what: &Work, reason: String) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        locked(&self.open).insert(number, Wait { what: what.clone(), reason, since: clock::now().0, tries: 1 });
        number
    }

    pub(super) fn again(&self, number: u64, reason: String) {
        if let Some(wait) = locked(&self.open).get_mut(&number) {
            wait.reason = reason;
            wait.tries += 1;
        }
    }

    pub(super) fn end(&self, number: u64) {
        locked(&self.open).remove(&number);
    }

    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    pub fn open(&self) -> Vec<Wait> {
        locked(&self.open).values().cloned().collect()
    }
}

impl Work {
    pub fn partition(&self) -> Option<u16> {
        match self {
            Self::Writing(partition) | Self::Consuming(partition) | Self::Database(partition) => Some(partition.number),
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Writing(partition) => write!(f, "writing {partition}"),
            Self::Consuming(partition) => write!(f, "consuming {partition}"),
            Self::Database(partition) => write!(f, "reaching the database for {partition}"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

impl From<Cow<'static, str>> for Work {
    fn from(what: Cow<'static, str>) -> Self {
        Self::Other(what)
    }
}

// Only a fixed text: it can't contain a partition's number. Work on a partition must use a variant that has one.
impl From<&'static str> for Work {
    fn from(what: &'static str) -> Self {
        Self::Other(Cow::Borrowed(what))
    }
}

impl From<Work> for String {
    fn from(work: Work) -> Self {
        work.to_string()
    }
}

impl Default for Work {
    fn default() -> Self {
        Self::Other(Cow::Borrowed(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_there_until_it_works() {
        let waits = Waits::new();
        let first = waits.begin(&Work::Writing(PartitionName { number: 3, map: None }), "refused".to_owned());
        let second = waits.begin(&"reading".into(), String::new());
        waits.again(first, "still refused".to_owned());
        let reported: Vec<_> =
            waits.open().into_iter().map(|wait| (wait.what.to_string(), wait.reason, wait.tries)).collect();
        let expected = [("writing partition 3", "still refused", 2), ("reading", "", 1)];
        assert_eq!(reported, expected.map(|(what, reason, tries)| (what.to_owned(), reason.to_owned(), tries)));
        waits.end(first);
        waits.again(first, String::new());
        waits.end(second);
        assert_eq!((waits.open(), waits.begun()), (Vec::new(), 2));
    }
}
