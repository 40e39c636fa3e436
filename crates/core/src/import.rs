//! Rules for importing a site's like table: the version of an imported row, how to recognise imported rows, and how to
//! compare the site's table with tallyd's. Pure.
//!
//! If a site's table does not keep deleted rows, a second pass removes imported rows that the table no longer contains.
//! It recognises them by their `update_at`:
//!
//! * If the table has no times, `update_at` is the earliest time with the fraction of a second of the import's start.
//!   So every event wins over such a row, whose age nothing shows.
//! * If the table has times, `update_at` is the row's time minus two seconds, with this fraction. Times can have been
//!   rounded up, and the imported row must be older than the event that wrote the site's row.
//!
//! The start is never a whole number of milliseconds. So an event whose `at` is one never makes a row that looks
//! imported.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::iter::Peekable;

use serde::{Deserialize, Serialize};

use crate::coalesce::{self, Before, LikeState, Pair};
use crate::event::ID_MAX;
use crate::model::{Micros, TargetId, UserId};

/// A row's key. The site's rows and tallyd's rows are sorted by this key.
pub type Key = (TargetId, UserId);

pub const FIRST: Key = (TargetId(0), UserId(0));

pub const LAST: Key = (TargetId(ID_MAX), UserId(ID_MAX));

pub const EARLIEST: Micros = Micros(86_400 * SECOND);

const SECOND: i64 = 1_000_000;

/// The percentage is checked only if more rows than this number are missing.
const MISSING_MIN: u64 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteLike {
    pub key: Key,
    pub liked: bool,
    pub at: Option<Micros>,
}

/// The count and checksum of the likes in a range of rows, in the site's table or in tallyd's. If both tables have the
/// same sums, they have the same likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    pub count: u64,
    pub checksum: u64,
}

/// The time when an import began. If the import runs again, it keeps this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start(Micros);

impl Start {
    pub fn at(now: Micros) -> Self {
        // Many clocks give only whole milliseconds. The start of the import must not be a whole number of milliseconds,
        // so that no event from such a clock looks like an imported row.
        Self(if now.0 % 1_000 == 0 { Micros(now.0 + 1) } else { now })
    }

    pub fn version(self, at: Option<Micros>, keeps_deleted: bool) -> Micros {
        match at {
            None => Micros(EARLIEST.0 + self.signature()),
            Some(at) if !keeps_deleted => Micros((at.0.div_euclid(SECOND) - 2) * SECOND + self.signature()),
            // The site's table can contain a time that was rounded up to this whole second. The imported row must not
            // be newer than the event that made the site's row.
            Some(at) if at.0 % SECOND == 0 => Micros(at.0 - SECOND),
            Some(at) => at,
        }
    }

    /// Returns true if this import wrote the row, and no event has changed the row since. `version` is the row's
    /// `update_at`.
    pub fn is_of_import(self, version: Micros, has_times: bool) -> bool {
        if has_times { version.0.rem_euclid(SECOND) == self.signature() } else { version == self.version(None, false) }
    }

    fn signature(self) -> i64 {
        self.0.0.rem_euclid(SECOND)
    }
}

/// A row with the same version has not changed since, unless `is_signed`: then only the import gives rows this version,
/// and the site's table replaces the row. So a row returns if the second pass removed it by mistake.
pub fn before_import(rows: &[(Pair, LikeState)], old: &HashMap<Pair, LikeState>, is_signed: bool) -> Vec<Before> {
    let of_row = |((pair, new), met): (&(Pair, LikeState), Before)| match old.get(pair) {
        Some(old) if is_signed && old.at == new.at && old.liked != new.liked => Before::Older(old.liked),
        _ => met,
    };
    rows.iter().zip(coalesce::before(rows, old)).map(of_row).collect()
}

/// Whether so many imported rows are missing on the site that a person must look first: more than 100, and more than
/// this percentage of the imported likes. Then the query is probably wrong, or the site's table is not whole.
pub fn is_too_many(missing: u64, imported: u64, percent_max: u8) -> bool {
    missing > MISSING_MIN && missing * 100 > imported * u64::from(percent_max)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    Site,
    Here,
}

/// Two differences are in one range if at most this number of rows is between them. Otherwise each difference gets its
/// own range.
const TOGETHER: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differing {
    pub after: Key,
    pub until: Key,
    pub rows: BTreeSet<(Key, Side)>,
    pub size: usize,
}

pub fn differing(site: &[Key], here: &[Key]) -> Vec<Differing> {
    let mut found: Vec<Differing> = Vec::new();
    let mut last = 0;
    for (key, side) in differences(site.iter().copied(), here.iter().copied()) {
        // The number of rows that are before the differing row: rows of the first table plus rows of the second table.
        let place = site.partition_point(|row| *row < key) + here.partition_point(|row| *row < key);
        match found.last_mut() {
            Some(range) if place - last <= TOGETHER => {
                range.until = key;
                range.size += place - last;
                range.rows.insert((key, side));
            }
            _ => {
                let rows = BTreeSet::from([(key, side)]);
                found.push(Differing { after: before(key), until: key, rows, size: 1 });
            }
        }
        last = place;
    }
    found
}

pub fn before((target, user): Key) -> Key {
    (target, UserId(user.0.saturating_sub(1)))
}

/// Both iterators must be sorted.
pub fn differences(
    site: impl IntoIterator<Item = Key>,
    here: impl IntoIterator<Item = Key>,
) -> impl Iterator<Item = (Key, Side)> {
    let (mut site, mut here) = (site.into_iter().peekable(), here.into_iter().peekable());
    std::iter::from_fn(move || next_difference(&mut site, &mut here))
}

fn next_difference(
    site: &mut Peekable<impl Iterator<Item = Key>>,
    here: &mut Peekable<impl Iterator<Item = Key>>,
) -> Option<(Key, Side)> {
    loop {
        let order = match (site.peek(), here.peek()) {
            (Some(one), Some(other)) => one.cmp(other),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return None,
        };
        match order {
            Ordering::Less => return site.next().map(|key| (key, Side::Site)),
            Ordering::Greater => return here.next().map(|key| (key, Side::Here)),
            Ordering::Equal => drop((site.next(), here.next())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{Kind, Target};

    #[test]
    fn a_start_is_never_a_whole_millisecond() {
        assert_eq!(Start::at(Micros(1_764_000_000_123_000)), Start(Micros(1_764_000_000_123_001)));
        assert_eq!(Start::at(Micros(1_764_000_000_123_456)), Start(Micros(1_764_000_000_123_456)));
    }

    #[test]
    fn a_row_gets_the_version_that_its_table_allows() {
        let start = Start(Micros(1_764_000_000_123_457));
        for (at, keeps_deleted, version) in [
            (None, true, 86_400_123_457),
            (None, false, 86_400_123_457),
            (Some(1_700_000_005_900_000), false, 1_700_000_003_123_457),
            (Some(1_700_000_005_000_000), false, 1_700_000_003_123_457),
            (Some(1_700_000_005_900_000), true, 1_700_000_005_900_000),
            (Some(1_700_000_005_000_000), true, 1_700_000_004_000_000),
        ] {
            assert_eq!(start.version(at.map(Micros), keeps_deleted), Micros(version), "{at:?} {keeps_deleted}");
        }
    }

    #[test]
    fn a_signed_row_gives_way_to_what_the_site_says_now() {
        let pair = (Target { kind: Kind(1), id: TargetId(7) }, UserId(8));
        let of = |at, liked| LikeState { at: Micros(at), liked };
        for (old, new, is_signed, expected) in [
            (of(5, false), of(5, true), true, Before::Older(false)),
            (of(5, false), of(5, true), false, Before::NotOlder),
            (of(5, true), of(5, true), true, Before::NotOlder),
            (of(6, false), of(5, true), true, Before::NotOlder),
        ] {
            let found = before_import(&[(pair, new)], &HashMap::from([(pair, old)]), is_signed);
            assert_eq!(found, [expected], "{old:?} {new:?} {is_signed}");
        }
    }

    #[test]
    fn a_share_of_missing_rows_is_judged_above_a_hundred() {
        for (missing, imported, is_over) in [(100, 100, false), (101, 2_020, false), (101, 2_019, true), (200, 0, true)]
        {
            assert_eq!(is_too_many(missing, imported, 5), is_over, "{missing} of {imported}");
        }
    }

    /// Ids begin at 1.
    fn keys(ids: &BTreeSet<(u8, u8)>) -> Vec<Key> {
        let id = |number: u8| u64::from(number) + 1;
        ids.iter().map(|(target, user)| (TargetId(id(*target)), UserId(id(*user)))).collect()
    }

    #[test]
    fn rows_far_from_each_other_are_looked_at_again_one_by_one() {
        let rows = |users: &[u64]| users.iter().map(|user| (TargetId(7), UserId(*user))).collect::<Vec<_>>();
        let (site, here): (Vec<u64>, Vec<u64>) =
            ((1..=500).collect(), (1..=500).filter(|n| ![3, 5, 400, 402].contains(n)).collect());
        let found = differing(&rows(&site), &rows(&here));
        let range = |after, until, users: &[u64], size| {
            let [after, until] = [after, until].map(|user| (TargetId(7), UserId(user)));
            Differing { after, until, rows: rows(users).into_iter().map(|key| (key, Side::Site)).collect(), size }
        };
        assert_eq!(found, [range(2, 5, &[3, 5], 4), range(399, 402, &[400, 402], 4)]);
    }

    #[test]
    fn the_size_of_a_range_counts_the_rows_of_both_tables() {
        let rows = |users: [u64; 7]| users.map(|user| (TargetId(7), UserId(user)));
        let (one, other) = (rows([1, 2, 4, 5, 6, 7, 8]), rows([1, 2, 3, 4, 5, 7, 8]));
        for (site, here) in [(&one, &other), (&other, &one)] {
            let found = differing(site, here);
            assert_eq!(found.iter().map(|range| range.size).collect::<Vec<_>>(), [6], "3, 4, 4, 5, 5 and 6");
        }
    }

    proptest! {
        /// The event is newer than the import's row, even if the table rounded the event's time to whole seconds or to
        /// a finer unit.
        #[test]
        fn an_event_always_wins_over_the_row_that_an_import_made_of_it(
            start in 1_700_000_000_000_000..1_900_000_000_000_000_i64,
            event in 1_600_000_000_000_000..1_900_000_000_000_000_i64,
            keeps_deleted: bool,
            rounds: bool,
        ) {
            prop_assert!(Start::at(Micros(start)).version(None, keeps_deleted).0 < event);
            let at = (event + if rounds { SECOND / 2 } else { 0 }).div_euclid(SECOND) * SECOND;
            let start = Start::at(Micros(start));
            let version = start.version(Some(Micros(at)), keeps_deleted);
            prop_assert!(version.0 <= event);
            if !keeps_deleted {
                prop_assert!(version.0 < event && start.is_of_import(version, true));
            }
        }

        #[test]
        fn a_clock_of_milliseconds_never_has_the_signature(start: u32, millis in 0..1_900_000_000_000_i64) {
            let start = Start::at(Micros(1_700_000_000_000_000 + i64::from(start)));
            prop_assert!(!start.is_of_import(Micros(millis * 1_000), true));
            prop_assert!(!start.is_of_import(Micros(millis * 1_000), false));
        }

        #[test]
        fn differences_are_those_of_the_two_sets(
            site: BTreeSet<(u8, u8)>,
            here: BTreeSet<(u8, u8)>,
        ) {
            let found: Vec<(Key, Side)> = differences(keys(&site), keys(&here)).collect();
            prop_assert!(found.is_sorted());
            let ranges = differing(&keys(&site), &keys(&here));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].until <= pair[1].after));
            for range in &ranges {
                prop_assert!(range.rows.iter().all(|(key, _)| range.after < *key && *key <= range.until));
            }
            prop_assert!(ranges.into_iter().flat_map(|range| range.rows).eq(found.iter().copied()));
            let of = |side| found.iter().filter(|(_, of)| *of == side).map(|(key, _)| *key).collect::<Vec<_>>();
            prop_assert_eq!(of(Side::Site), keys(&site.difference(&here).copied().collect()));
            prop_assert_eq!(of(Side::Here), keys(&here.difference(&site).copied().collect()));
        }
    }
}
