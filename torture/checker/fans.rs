//! Checks a board that follows likes: each score must equal the number of likes in MySQL. Withdrawn likes take members
//! off the board again.

use std::collections::BTreeMap;

use super::boards::{Range, compare, total, until_added};
use super::{About, State, Violation};
use crate::history::{Answer, History, Loses, What};

/// The daemon adds the likes of posts to this board.
const FANS: &str = "fans";

/// The ids of posts begin with this number. All other targets have lower ids.
pub const POSTS: u64 = 4_000_000;

pub fn check(history: &History, state: &State, found: &mut Vec<Violation>) {
    let of = format!("board {FANS}");
    compare(&ranges(history, state), &total(state, FANS), found, |target| About::Likes { target }, &of);
}

/// Returns the range of each post's score: its likes in MySQL, and the changes that only one of both stores can have.
/// The board keeps no score below zero. This only brings a score that is too low closer to the likes.
fn ranges(history: &History, state: &State) -> BTreeMap<u64, Range> {
    let mut ranges: BTreeMap<u64, Range> = BTreeMap::new();
    for ((post, _), (_, liked)) in state.rows.iter().filter(|((target, _), _)| *target >= POSTS) {
        ranges.entry(*post).or_default().add(i64::from(*liked), true);
    }
    for call in &history.calls {
        let What::Like { target: post @ POSTS.., liked, .. } = call.what else { continue };
        let (Answer::Done { .. } | Answer::NotConfirmed { .. }) = call.answer else { continue };
        let (delta, range) = (if liked { 1 } else { -1 }, ranges.entry(post).or_default());
        if history.excuses(Loses::Boards, &until_added(call)) {
            range.may_lack(delta);
        }
        if history.excuses(Loses::Tables, call) {
            range.may_lack(-delta);
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::Class;
    use crate::history::{Call, Micros, Window};

    const S: Micros = 1_000_000;

    /// Users 1 and 2 like a post, and user 1 withdraws the like. Returns the class of the violation if the board has this
    /// score. A fault meets the last click of the user `during`, and can lose `loses`.
    fn verdict(score: Option<i64>, (loses, during): (Loses, u64)) -> Option<Class> {
        let (mut history, mut state) = (History::default(), State::default());
        for (at, user, liked) in [(10 * S, 2, true), (20 * S, 1, true), (30 * S, 1, false)] {
            let what = What::Like { target: POSTS, user, liked };
            history.calls.push(Call { begin: at, end: at, who: 1, what, answer: Answer::Done { at } });
            state.rows.insert((POSTS, user), (at, liked));
            if user == during {
                let (begin, end) = (at, at);
                history.windows = vec![Window { fault: "", begin, end, loses, loses_since: at, loses_until: at }];
            }
        }
        let key = (FANS.to_owned(), "total".to_owned());
        state.boards.insert(key, score.map(|score| (POSTS, score)).into_iter().collect());
        let mut found = Vec::new();
        check(&history, &state, &mut found);
        assert!(found.iter().all(|found| found.about == About::Likes { target: POSTS }));
        found.first().map(|found| found.class)
    }

    #[test]
    fn each_score_of_the_board_of_likes_equals_the_likes() {
        let verdicts = [None, Some(1), Some(2)].map(|score| verdict(score, (Loses::Nothing, 0)));
        assert_eq!(verdicts, [Some(Class::Lost), None, Some(Class::Doubled)]);
    }

    #[test]
    fn a_like_or_unlike_of_a_fault_can_be_in_one_store_only() {
        let verdicts = |loses, during| [None, Some(1), Some(2)].map(|score| verdict(score, (loses, during)));
        // The like of user 2 is lost, or the unlike of user 1.
        assert_eq!(verdicts(Loses::Boards, 2), [None, None, Some(Class::Doubled)]);
        assert_eq!(verdicts(Loses::Boards, 1), [Some(Class::Lost), None, None]);
        // MySQL has lost what the board has, and then got it again.
        assert_eq!(verdicts(Loses::Tables, 2), [Some(Class::Lost), None, None]);
        assert_eq!(verdicts(Loses::Tables, 1), [None, None, Some(Class::Doubled)]);
        assert_eq!(verdicts(Loses::BoardOfViews, 1), [Some(Class::Lost), None, Some(Class::Doubled)]);
    }
}
