//! How many dead letters a partition keeps. Each has its part of `[consumer] dead_letters_max`, and counts its own open ones when it seems
//! full: so partitions need not ask each other, and all of them together never keep more.
//!
//! Half of that part is for what no configuration would ever take: what comes beyond it is counted by its reason and not kept. The
//! other half is for what may be good all the same, an event of a kind that somebody has forgotten to configure. When that is full, too, the
//! partition waits, and the broker keeps what comes; unless `dead_letters_full` says otherwise.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use sqlx::MySqlConnection;
use tracing::warn;

use super::flush::{Found, Writer};
use crate::config::{self, Config, Current, WhenFull};
use crate::event::Reason;
use crate::runtime::log::Flood;
use crate::store::letters::{self, DeadLetter};
use crate::store::{Result, StoreError};
use crate::vitals::vitals;

/// While there seems to be no room it is counted again no more often: letters may have been sent again or deleted.
const COUNT_AGAIN: Duration = Duration::from_secs(1);

/// What the configuration says of dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// How many are open at most, over all partitions.
    max: u64,
    full: WhenFull,
}

impl Bounds {
    pub fn new(config: &Config) -> Self {
        Self { max: config.consumer.dead_letters_max, full: config.consumer.dead_letters_full }
    }

    /// A partition's part.
    fn part(self, partitions: u16) -> u64 {
        config::dead_letters_part(self.max, partitions)
    }

    /// Whether a partition with so many open ones would have to wait with one that must not be dropped.
    pub fn must_wait(self, partitions: u16, open: u64) -> bool {
        self.full == WhenFull::Wait && open >= self.part(partitions)
    }

    /// How many are worth counting.
    pub fn counted_max(self, partitions: u16) -> u64 {
        self.part(partitions) + 1
    }
}

/// What a partition knows of its room.
pub(super) struct Room {
    bounds: Current<Bounds>,
    partitions: u16,
    /// Its open letters when they were last counted, and those that it has kept since, which may be the same.
    open: u64,
    counted: Option<Instant>,
    dropped: Flood,
}

/// What becomes of a batch's dead letters.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Kept<'a> {
    pub letters: Vec<&'a DeadLetter>,
    /// How many of them were not there, as far as is known.
    pub added: u64,
    /// What is only counted, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
}

impl Room {
    pub fn new(bounds: Current<Bounds>, partitions: u16) -> Self {
        Self { bounds, partitions, open: 0, counted: None, dropped: Flood::default() }
    }
}

/// Which letters are kept where so many are open already; none where the batch has to wait. Those that may be good and are `there` need no
/// room.
fn judge<'a>(
    letters: &'a [DeadLetter],
    there: &HashSet<[u8; 32]>,
    mut open: u64,
    (part, full): (u64, WhenFull),
) -> Option<Kept<'a>> {
    let mut kept = Kept::default();
    for letter in letters {
        let may_be_good = Reason::may_be_good(letter.reason);
        let room = if may_be_good { part } else { part / 2 };
        if may_be_good && !there.is_empty() && there.contains(&letter.digest()) {
            kept.letters.push(letter);
        } else if open < room {
            open += 1;
            kept.added += 1;
            kept.letters.push(letter);
        } else if may_be_good && full == WhenFull::Wait {
            return None;
        } else {
            *kept.dropped.entry(letter.reason).or_default() += 1;
        }
    }
    Some(kept)
}

impl Writer {
    /// Which of a batch's dead letters are kept, as of its transaction.
    ///
    /// # Errors
    /// There is no room for one that must not be dropped; MySQL's.
    pub(super) async fn room<'a>(&mut self, tx: &mut MySqlConnection, letters: &'a [DeadLetter]) -> Result<Kept<'a>> {
        let room = &mut self.room;
        if letters.is_empty() {
            return Ok(Kept::default());
        }
        let (bounds, partitions) = (*room.bounds.get(), room.partitions);
        let part = bounds.part(partitions);
        if room.counted.is_some() {
            let kept = judge(letters, &HashSet::new(), room.open, (part, bounds.full));
            let is_whole = kept.as_ref().is_some_and(|kept| kept.dropped.is_empty());
            let is_fresh = room.counted.is_some_and(|counted| counted.elapsed() < COUNT_AGAIN);
            if let Some(kept) = kept.filter(|_| is_whole || is_fresh) {
                return Ok(kept);
            }
        }
        room.open = letters::open_of(tx, &self.queue, bounds.counted_max(partitions)).await?;
        room.counted = Some(Instant::now());
        // Of a batch that comes again some are there already, perhaps the very ones that have filled it. What can be dropped needn't be looked for.
        let waiting: Vec<&DeadLetter> = letters.iter().filter(|letter| Reason::may_be_good(letter.reason)).collect();
        let there = if room.open + letters.len() as u64 <= part / 2 {
            HashSet::new()
        } else {
            letters::open_digests(tx, &waiting).await?
        };
        judge(letters, &there, room.open, (part, bounds.full)).ok_or_else(|| {
            StoreError::NoRoom(format!(
                "{} open dead letters of {} are all that [consumer] dead_letters_max leaves it: `tallyd dead list --summary`",
                room.open, self.queue
            ))
        })
    }

    /// Notes what a committed batch has kept and dropped.
    pub(super) fn note_letters(&mut self, found: &Found) {
        self.room.open += found.kept;
        for (reason, dropped) in &found.dropped {
            vitals().dead_letters_dropped(reason, *dropped);
        }
        let dropped = found.dropped.values().sum();
        if let Some(dropped) = self.room.dropped.note(dropped, Instant::now()) {
            warn!(
                event = "dead-letters-dropped",
                partition = self.partition,
                dropped,
                "{dropped} messages that can never be applied were counted and not kept: dead letters are at their bound"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Micros;

    fn letters(reasons: &[Reason]) -> Vec<DeadLetter> {
        let letter = |reason: &Reason| DeadLetter {
            body: Vec::new(),
            headers: String::new(),
            reason: reason.code(),
            error: String::new(),
            queue: String::new(),
            first_seen: Micros(1),
        };
        reasons.iter().map(letter).collect()
    }

    #[test]
    fn what_may_be_good_has_half_of_the_room_for_itself_and_is_never_dropped_unless_told() {
        use Reason::{MalformedJson, UnknownKind};
        let all = letters(&[MalformedJson, UnknownKind, MalformedJson, UnknownKind]);
        let judged = |open, full| {
            let kept = judge(&all, &HashSet::new(), open, (10, full))?;
            assert_eq!(kept.added, kept.letters.len() as u64);
            Some((kept.letters.len(), kept.dropped.values().sum::<u64>()))
        };
        for (open, kept, dropped) in [(0, 4, 0), (3, 3, 1), (4, 3, 1), (5, 2, 2), (8, 2, 2)] {
            assert_eq!(judged(open, WhenFull::Wait), Some((kept, dropped)), "{open} are open");
        }
        assert_eq!((judged(9, WhenFull::Wait), judged(11, WhenFull::Wait)), (None, None));
        assert_eq!((judged(9, WhenFull::Drop), judged(11, WhenFull::Drop)), (Some((1, 3)), Some((0, 4))));
        let hopeless = letters(&[MalformedJson; 3]);
        let none = HashSet::new();
        let full = (10, WhenFull::Wait);
        assert_eq!(judge(&hopeless, &none, 100, full).unwrap().dropped[MalformedJson.code()], 3);
        let there = HashSet::from([all[0].digest()]);
        let kept = judge(&all, &there, 10, full).unwrap();
        assert_eq!((kept.letters.len(), kept.added), (2, 0), "what is there needs no room");
    }

    #[test]
    fn parts_of_all_partitions_are_no_more_than_the_whole() {
        for (max, partitions, part) in [(100, 1, 100), (100, 3, 33), (100_000, 256, 390)] {
            let bounds = Bounds { max, full: WhenFull::Wait };
            assert_eq!(bounds.part(partitions), part);
            assert!(bounds.must_wait(partitions, part) && !bounds.must_wait(partitions, part - 1));
            assert!(!Bounds { full: WhenFull::Drop, ..bounds }.must_wait(partitions, part));
        }
    }
}
