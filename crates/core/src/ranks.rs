//! Computes the places of members on a board, by one of three usual rules. Pure.

use std::cmp::Ordering;

use crate::model::BoardMember;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ranking {
    /// 1, 2, 3, 4: each member has its own place. Equal members keep Redis' order.
    #[default]
    Ordinal,
    /// 1, 2, 2, 4: equal members share a place. A member's place is one more than the number of members with higher
    /// scores.
    Competition,
    /// 1, 2, 2, 3: equal members share a place, and the next member gets the next place.
    Dense,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    pub place: u64,
    /// Any bytes.
    pub member: Vec<u8>,
    pub score: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Before {
    pub members: u64,
    pub higher: u64,
    /// The number of different scores that are higher than the score of the page's first member. Only
    /// [`Ranking::Dense`] uses this number.
    pub distinct: u64,
}

/// Compares two members in the order of a board, as Redis' ZRANGE REV does. The higher score is first. If the scores
/// are equal, the names are compared byte by byte, and the greater name is first.
pub fn order(a: &BoardMember, b: &BoardMember) -> Ordering {
    b.score.total_cmp(&a.score).then_with(|| b.member.cmp(&a.member))
}

pub fn place(ranking: Ranking, before: Before, page: Vec<BoardMember>) -> Vec<Placed> {
    let mut placed: Vec<Placed> = Vec::with_capacity(page.len());
    let (mut shared, mut distinct) = (before.higher + 1, before.distinct + 1);
    for (ordinal, BoardMember { member, score }) in (before.members + 1..).zip(page) {
        if placed.last().is_some_and(|last| last.score != score) {
            (shared, distinct) = (ordinal, distinct + 1);
        }
        let place = match ranking {
            Ranking::Ordinal => ordinal,
            Ranking::Competition => shared,
            Ranking::Dense => distinct,
        };
        placed.push(Placed { place, member, score });
    }
    placed
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(ranking: Ranking, board: &[BoardMember], index: usize) -> u64 {
        let score = board[index].score;
        let mut higher: Vec<f64> = board.iter().map(|member| member.score).filter(|other| *other > score).collect();
        1 + match ranking {
            Ranking::Ordinal => index as u64,
            Ranking::Competition => higher.len() as u64,
            Ranking::Dense => {
                higher.sort_unstable_by(f64::total_cmp);
                higher.dedup();
                higher.len() as u64
            }
        }
    }

    proptest! {
        #[test]
        fn any_page_is_placed_as_the_whole_board_is(
            scores in proptest::collection::vec(0..6_u8, 1..40),
            from in any::<prop::sample::Index>(),
            count in 1..10_usize,
        ) {
            let mut board: Vec<BoardMember> = scores
                .iter()
                .enumerate()
                .map(|(id, score)| BoardMember { member: id.to_string().into_bytes(), score: f64::from(*score) })
                .collect();
            board.sort_unstable_by(order);
            let from = from.index(board.len());
            let first = board[from].score;
            let higher: Vec<f64> = board.iter().map(|member| member.score).filter(|score| *score > first).collect();
            let mut distinct = higher.clone();
            distinct.dedup();
            let before = Before { members: from as u64, higher: higher.len() as u64, distinct: distinct.len() as u64 };
            let page: Vec<BoardMember> = board.iter().skip(from).take(count).cloned().collect();
            for ranking in [Ranking::Ordinal, Ranking::Competition, Ranking::Dense] {
                let placed = place(ranking, before, page.clone());
                prop_assert_eq!(placed.len(), page.len());
                for (index, placed) in placed.iter().enumerate() {
                    prop_assert_eq!(placed.place, naive(ranking, &board, from + index), "{:?}", ranking);
                    prop_assert_eq!(&placed.member, &board[from + index].member);
                }
            }
        }
    }
}
