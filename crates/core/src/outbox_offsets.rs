//! How far each partition's outbox has come: in a bucket of Redis, or in all of it. Pure.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

/// The partition of what reconciles correct in `counter`: it has an outbox and no queue.
pub const CORRECTIONS: u16 = u16::MAX;

/// A number for each partition, of a row in its outbox; zero where there is none. As text `0:17,3:12`. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboxOffsets(Arc<BTreeMap<u16, u64>>);

impl OutboxOffsets {
    /// Reads the text; none where it is no such text.
    pub fn parse(text: &str) -> Option<Self> {
        let mut offsets = BTreeMap::new();
        for pair in text.split(',').filter(|_| !text.is_empty()) {
            let (partition, number) = pair.split_once(':')?;
            match offsets.entry(partition.parse().ok()?) {
                Entry::Vacant(entry) => entry.insert(number.parse().ok()?),
                Entry::Occupied(_) => return None,
            };
        }
        Some(offsets.into_iter().collect())
    }

    /// The partition's number.
    pub fn of(&self, partition: u16) -> u64 {
        self.0.get(&partition).copied().unwrap_or(0)
    }

    /// Takes the number where it is higher.
    pub fn raise(&mut self, partition: u16, number: u64) {
        if number > self.of(partition) {
            Arc::make_mut(&mut self.0).insert(partition, number);
        }
    }

    /// Takes each number that is higher.
    pub fn raise_all(&mut self, other: &Self) {
        for (partition, number) in other.iter() {
            self.raise(partition, number);
        }
    }

    /// The partitions with a number, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u16, u64)> {
        self.0.iter().map(|(partition, number)| (*partition, *number))
    }

    /// Whether no partition has a number.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(u16, u64)> for OutboxOffsets {
    fn from_iter<I: IntoIterator<Item = (u16, u64)>>(numbers: I) -> Self {
        Self(Arc::new(numbers.into_iter().filter(|(_, number)| *number > 0).collect()))
    }
}

impl fmt::Display for OutboxOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (partition, number)) in self.iter().enumerate() {
            let separator = if place == 0 { "" } else { "," };
            write!(f, "{separator}{partition}:{number}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offsets() -> impl Strategy<Value = OutboxOffsets> {
        prop::collection::vec((any::<u16>(), any::<u64>()), 0..9).prop_map(|numbers| numbers.into_iter().collect())
    }

    #[test]
    fn what_is_no_marks_is_refused() {
        assert_eq!(OutboxOffsets::parse("0:17,3:12").unwrap().of(3), 12);
        assert!(OutboxOffsets::parse("").unwrap().is_empty());
        for text in ["0", "0:", ":1", "0:1,", ",", "0:1,0:2", "0:-1", "65536:1", "x:1"] {
            assert_eq!(OutboxOffsets::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn marks_are_read_back(offsets in offsets()) {
            prop_assert_eq!(OutboxOffsets::parse(&offsets.to_string()), Some(offsets));
        }

        #[test]
        fn a_mark_is_only_raised(mut offsets in offsets(), other in offsets(), partition: u16, number: u64) {
            let (before, of) = (offsets.clone(), offsets.of(partition));
            offsets.raise(partition, number);
            prop_assert_eq!(offsets.of(partition), of.max(number));
            offsets.raise_all(&other);
            for (partition, number) in before.iter().chain(other.iter()) {
                prop_assert!(offsets.of(partition) >= number);
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9:,]*") {
            let _ = OutboxOffsets::parse(&text);
        }
    }
}
