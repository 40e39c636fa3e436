//! What fails now and is tried again.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::{Count, locked};
use crate::model::Micros;

/// What fails now, by numbers that say which was first.
#[derive(Debug, Default)]
pub struct Waits {
    begun: Count,
    open: Mutex<BTreeMap<u64, Wait>>,
}

/// Something that fails and is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// What: "writing partition 0".
    pub what: String,
    /// Why it failed the last time.
    pub reason: String,
    /// Since when.
    pub since: Micros,
    /// How often it was tried.
    pub tries: u64,
}

impl Waits {
    /// Something has failed, the first time. Its number.
    pub fn begin(&self, what: &str, reason: String) -> u64 {
        let mut open = locked(&self.open);
        self.begun.add(1);
        let number = self.begun.get();
        open.insert(number, Wait { what: what.to_owned(), reason, since: Micros::now(), tries: 1 });
        number
    }

    /// It has failed again.
    pub fn again(&self, number: u64, reason: String) {
        if let Some(wait) = locked(&self.open).get_mut(&number) {
            wait.reason = reason;
            wait.tries += 1;
        }
    }

    /// It works, or nobody tries any more.
    pub fn end(&self, number: u64) {
        locked(&self.open).remove(&number);
    }

    /// How many have begun.
    pub fn begun(&self) -> u64 {
        self.begun.get()
    }

    /// All that fail now, the oldest first.
    pub fn open(&self) -> Vec<Wait> {
        locked(&self.open).values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_there_until_it_works() {
        let waits = Waits::default();
        let (first, second) = (waits.begin("writing", "refused".to_owned()), waits.begin("reading", String::new()));
        waits.again(first, "still refused".to_owned());
        let told: Vec<_> = waits.open().into_iter().map(|wait| (wait.what, wait.reason, wait.tries)).collect();
        let expected = [("writing", "still refused", 2), ("reading", "", 1)];
        assert_eq!(told, expected.map(|(what, reason, tries)| (what.to_owned(), reason.to_owned(), tries)));
        waits.end(first);
        waits.again(first, String::new());
        waits.end(second);
        assert_eq!((waits.open(), waits.begun()), (Vec::new(), 2));
    }
}
