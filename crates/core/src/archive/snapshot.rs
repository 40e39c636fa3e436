//! The snapshot of a board that is not archived, and whether Redis still has the same board (decision 0055).

use crate::model::Micros;

/// Withdrawn likes can leave no member of a board with fewer saved members than this. So such a board is treated as lost
/// only if Redis evicts boards.
const FEW_MEMBERS: u64 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Snapshot {
    pub number: u64,
    pub generation: u64,
    pub members: u64,
    pub began_at: Micros,
    pub taken_at: Option<Micros>,
}

impl Snapshot {
    /// A run writes its number first to Redis, as the board's mark, and then to MySQL. So a lower mark means that Redis
    /// has lost data.
    pub fn is_marked(&self, mark: Option<u64>) -> bool {
        mark.is_some_and(|mark| mark >= self.number)
    }

    pub fn tag(&self) -> String {
        format!("s{}-{}", self.number, self.taken_at.map_or(0, |at| at.0))
    }

    /// Whether Redis has lost all data since this snapshot. Then everything in the live zset was added since the loss.
    /// A mark together with a newer generation does not come from a flush: MySQL has gone back to an older state.
    pub fn was_flushed(&self, mark: Option<u64>, generation: u64) -> bool {
        mark.is_none() && generation > self.generation
    }
}

pub fn members_min(saved: u64) -> u64 {
    if saved < FEW_MEMBERS { 0 } else { saved / 2 }
}

/// Whether `live`, the current scores of a snapshot's best members, show that the zset is still the snapshot's board.
/// Members that left the zset have no score in `live`. If Redis evicts boards, a zset is new if the scores together are
/// less than half of the saved ones.
pub fn are_of_board(saved: &[f64], live: &[f64], evicts: bool) -> bool {
    let (before, now) = (saved.iter().sum::<f64>(), live.iter().sum::<f64>());
    let fell = evicts && before > 0.0 && now * 2.0 < before;
    let is_small = saved.is_empty() || (!evicts && (saved.len() as u64) < FEW_MEMBERS);
    is_small || !(live.is_empty() || fell)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_shows_whether_redis_has_what_a_snapshot_saw() {
        let snapshot = Snapshot { number: 7, generation: 3, members: 2, began_at: Micros(1), taken_at: None };
        assert_eq!([None, Some(6), Some(7), Some(8)].map(|mark| snapshot.is_marked(mark)), [false, false, true, true]);
        for (mark, generation, expected) in [(None, 4, true), (None, 3, false), (None, 2, false), (Some(7), 4, false)] {
            assert_eq!(snapshot.was_flushed(mark, generation), expected, "{mark:?} {generation}");
        }
        assert_eq!(snapshot.tag(), "s7-0");
        assert_eq!(Snapshot { taken_at: Some(Micros(9)), ..snapshot }.tag(), "s7-9");
    }

    #[test]
    fn a_restored_board_needs_half_of_its_members_unless_it_had_few() {
        assert_eq!([0, 9, 10, 11, 100].map(members_min), [0, 0, 5, 5, 50]);
    }

    #[test]
    fn a_board_is_lost_only_if_most_of_many_points_are_gone() {
        let of = |members: usize, score: f64| vec![score; members];
        for (saved, live, if_evicted, otherwise) in [
            (of(9, 5.0), vec![], false, true),
            (of(9, 5.0), of(1, 5.0), false, true),
            (of(10, 5.0), vec![], false, false),
            (of(10, 5.0), of(5, 5.0), true, true),
            (of(10, 5.0), of(4, 5.0), false, true),
            (of(10, -1.0), of(10, -1.0), true, true),
            (of(10, 0.0), of(10, -1.0), true, true),
            (vec![], vec![], true, true),
        ] {
            let found = [true, false].map(|evicts| are_of_board(&saved, &live, evicts));
            assert_eq!(found, [if_evicted, otherwise], "{saved:?} {live:?}");
        }
    }
}
