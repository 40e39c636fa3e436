//! Ensures that codes keep their meaning. Compares the names of codes in `[kinds]` and `[metrics]` with their former
//! names in MySQL (decision 0058). A daemon compares the names before it writes anything, and at each reload. Every
//! command compares the names, too.
//!
//! A new code is recorded in MySQL. A code whose name was changed or removed must have no rows in MySQL, because the
//! rows would get another meaning. A code can get another name only after MySQL has recorded a configuration without
//! the code. Until then, a daemon with the former name can be running and can write its first row at any moment. A
//! removed code can have rows if `[retired]` contains its name.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::config::{Config, ConfigError};
use tallyd_core::model::{Kind, Metric};
use tallyd_mysql::Store;
use tallyd_mysql::codes::{Noted, Of, Registered};

/// Time limit of the search for rows, for all doubtful codes together. A start or a reload waits for this search.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// If another daemon has recorded a change meanwhile, the comparison is repeated, at most this number of times.
const TRIES_MAX: u32 = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    of: Of,
    code: u8,
    name: String,
    noted: Noted,
}

/// A changed code. tallyd rejects the change if rows in MySQL have this code. If `in_use` is true, tallyd rejects the
/// change even if no row has the code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Doubt {
    change: Change,
    found: String,
    advice: String,
    in_use: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    None,
    Some,
    /// There are no rows, but a daemon can write a row at any moment.
    Soon,
    /// The search took too long, so rows are assumed to exist.
    Unknown,
}

pub async fn compare(store: &Store, config: &Config) -> Result<Vec<Change>> {
    let (mut changes, mut problems) = (Vec::new(), Vec::new());
    let until = Instant::now() + LOOK_MAX;
    for (of, configured, retired) in
        [(Of::Kinds, &config.kinds.0, &config.retired.kinds), (Of::Metrics, &config.metrics.0, &config.retired.metrics)]
    {
        let (sure, doubts) = judge(of, configured, retired, &store.registered(of).await?);
        changes.extend(sure);
        for doubt in doubts {
            let rows = if doubt.in_use { Rows::Soon } else { rows(store, of, doubt.change.code, until).await? };
            match rows {
                Rows::None => changes.push(doubt.change),
                rows => problems.push(doubt.problem(rows)),
            }
        }
    }
    if problems.is_empty() { Ok(changes) } else { Err(ConfigError(problems).into()) }
}

pub async fn agree(store: &Store, config: &Config) -> Result<Vec<Change>> {
    for _ in 0..TRIES_MAX {
        let changes = compare(store, config).await?;
        let mut all = true;
        for Change { of, code, name, noted } in &changes {
            all &= store.note_name(*of, (*code, name), noted).await?;
        }
        if all {
            return Ok(changes);
        }
    }
    bail!("other daemons keep changing the names of codes in MySQL: check that all daemons have the same configuration")
}

async fn rows(store: &Store, of: Of, code: u8, until: Instant) -> Result<Rows> {
    let found = match of {
        Of::Kinds => Some(store.is_kind_in_use(Kind(code)).await?),
        Of::Metrics => {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() { None } else { store.is_metric_in_use(Metric(code), left).await? }
        }
    };
    Ok(match found {
        Some(true) => Rows::Some,
        Some(false) => Rows::None,
        None => Rows::Unknown,
    })
}

/// Returns the changes that can be recorded immediately, and the doubtful differences. Only a search for rows can
/// decide whether a doubtful difference is allowed. Pure.
fn judge(
    of: Of,
    configured: &BTreeMap<String, u8>,
    retired: &[String],
    registered: &[Registered],
) -> (Vec<Change>, Vec<Doubt>) {
    let (mut changes, mut doubts) = (Vec::new(), Vec::new());
    let by_code: BTreeMap<u8, &String> = configured.iter().map(|(name, code)| (*code, name)).collect();
    let section = of.section();
    for Registered { code, name: former, removed } in registered {
        let change = |name: &str, noted| Change { of, code: *code, name: name.to_owned(), noted };
        match by_code.get(code) {
            Some(name) if *name == former => {
                if *removed {
                    changes.push(change(name, Noted::Was(former.clone())));
                }
            }
            Some(name) => doubts.push(Doubt {
                change: change(name, Noted::Was(former.clone())),
                found: format!("[{section}] {name} = {code}, but in MySQL {code} is the code of {former}"),
                advice: format!(
                    "a code must not change its meaning: give {name} a code that was never used, or run `tallyd admin names rename` if only the name changes"
                ),
                in_use: !removed,
            }),
            None if *removed || retired.contains(former) => {}
            None => doubts.push(Doubt {
                change: change(former, Noted::Removed),
                found: match configured.get(former) {
                    Some(now) => format!("[{section}] {former} = {now}, but in MySQL its code is {code}"),
                    None => format!("[{section}] no longer has {former}, whose code in MySQL is {code}"),
                },
                advice: match configured.get(former) {
                    Some(_) => format!("give it the code {code} again"),
                    None => format!("add it again, or add it to [retired] {section}"),
                },
                in_use: false,
            }),
        }
    }
    let is_new = |code: u8| registered.iter().all(|known| known.code != code);
    let new = by_code.iter().filter(|(code, _)| is_new(**code));
    changes.extend(new.map(|(code, name)| Change { of, code: *code, name: (*name).clone(), noted: Noted::New }));
    (changes, doubts)
}

impl Doubt {
    fn problem(&self, rows: Rows) -> String {
        let Self { found, advice, .. } = self;
        match rows {
            Rows::Unknown => {
                let limit = LOOK_MAX.as_secs();
                format!("{found}, and the search for rows with this code did not end within {limit} s: {advice}")
            }
            Rows::Soon => format!("{found}, and a daemon with the former name can still be running: {advice}"),
            Rows::None | Rows::Some => format!("{found}, and there are rows with this code: {advice}"),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, code, name, noted } = self;
        write!(f, "[{}] {name} = {code}", of.section())?;
        match noted {
            Noted::New => write!(f, " is new"),
            Noted::Was(former) if former == name => write!(f, " is back"),
            Noted::Was(former) => write!(f, " replaces {former}, whose code had no rows"),
            Noted::Removed => write!(f, " is removed: no rows had its code"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known(code: u8, name: &str, removed: bool) -> Registered {
        Registered { code, name: name.to_owned(), removed }
    }

    fn names(names: &[(&str, u8)]) -> BTreeMap<String, u8> {
        names.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect()
    }

    /// Returns the changes, and the problems that would be reported if there were rows.
    fn judged(configured: &[(&str, u8)], retired: &[&str], registered: &[Registered]) -> (Vec<String>, Vec<String>) {
        let retired: Vec<String> = retired.iter().map(|name| (*name).to_owned()).collect();
        let (changes, doubts) = judge(Of::Metrics, &names(configured), &retired, registered);
        let rows = |doubt: &Doubt| if doubt.in_use { Rows::Soon } else { Rows::Some };
        let doubts = doubts.iter().map(|doubt| doubt.problem(rows(doubt))).collect();
        (changes.iter().map(Change::to_string).collect(), doubts)
    }

    #[test]
    fn what_is_new_is_noted_and_what_is_known_is_fine() {
        let both: &[(&str, u8)] = &[("like", 1), ("view", 2)];
        let (changes, doubts) = judged(both, &[], &[]);
        assert_eq!(
            (changes.len(), doubts.len()),
            (2, 0),
            "MySQL has no codes yet, so both codes must be new, and the list of doubts must be empty"
        );
        assert_eq!(judged(both, &[], &[known(1, "like", false), known(2, "view", false)]), (vec![], vec![]));
        let (changes, doubts) = judged(both, &[], &[known(1, "like", false)]);
        assert_eq!((changes, doubts), (vec!["[metrics] view = 2 is new".to_owned()], vec![]));
        let (changes, doubts) = judged(both, &[], &[known(1, "like", false), known(2, "view", true)]);
        assert_eq!((changes, doubts), (vec!["[metrics] view = 2 is back".to_owned()], vec![]));
    }

    #[test]
    fn a_code_that_would_change_its_meaning_is_in_doubt() {
        let (changes, doubts) =
            judged(&[("like", 1), ("post", 2)], &[], &[known(1, "like", false), known(2, "view", true)]);
        assert_eq!(changes, Vec::<String>::new());
        assert_eq!(
            doubts,
            ["[metrics] post = 2, but in MySQL 2 is the code of view, and there are rows with this code: a code must \
              not change its meaning: give post a code that was never used, or run `tallyd admin names rename` if only the name changes"]
        );
        let (_, doubts) = judged(&[("post", 2)], &[], &[known(2, "view", false)]);
        assert!(
            doubts[0].contains("2 is the code of view, and a daemon with the former name can still be running"),
            "{doubts:?}"
        );
        let swapped = [known(1, "like", false), known(2, "view", false), known(3, "share", false)];
        assert_eq!(judged(&[("like", 1), ("share", 2), ("view", 3)], &["view"], &swapped).1.len(), 2);
    }

    #[test]
    fn a_name_that_is_gone_is_in_doubt_unless_it_is_retired_or_was_gone_before() {
        let registered = [known(1, "like", false), known(2, "view", false)];
        let (_, doubts) = judged(&[("like", 1)], &[], &registered);
        assert_eq!(
            doubts,
            [
                "[metrics] no longer has view, whose code in MySQL is 2, and there are rows with this code: add it again, or \
              add it to [retired] metrics"
            ]
        );
        assert_eq!(judged(&[("like", 1)], &["view"], &registered), (vec![], vec![]));
        assert_eq!(judged(&[("like", 1)], &[], &[known(1, "like", false), known(2, "view", true)]), (vec![], vec![]));
        let (changes, doubts) = judged(&[("like", 1), ("view", 3)], &[], &registered);
        assert_eq!(changes, ["[metrics] view = 3 is new"]);
        assert!(
            doubts[0].ends_with("in MySQL its code is 2, and there are rows with this code: give it the code 2 again")
        );
    }

    proptest! {
        #[test]
        fn once_noted_the_same_configuration_differs_in_nothing(
            configured in proptest::collection::btree_map("[a-d]", 1..6_u8, 0..4),
            registered in proptest::collection::btree_map(1..6_u8, ("[a-d]", any::<bool>()), 0..5),
        ) {
            // The configuration's check has already rejected names with the same code.
            let mut codes: Vec<u8> = configured.values().copied().collect();
            codes.sort_unstable();
            codes.dedup();
            prop_assume!(codes.len() == configured.len());
            let mut registered: Vec<Registered> =
                registered.iter().map(|(code, (name, removed))| known(*code, name, *removed)).collect();
            let (changes, doubts) = judge(Of::Kinds, &configured, &[], &registered);
            for Change { code, name, noted, .. } in changes.into_iter().chain(doubts.into_iter().map(|doubt| doubt.change)) {
                registered.retain(|known| known.code != code);
                registered.push(known(code, &name, noted == Noted::Removed));
            }
            prop_assert_eq!(judge(Of::Kinds, &configured, &[], &registered), (vec![], vec![]));
        }
    }
}
