//! Decides what to do with a target's filter. Pure.

use tallyd_redis::bloom::{self, Shape};
use tallyd_redis::filters::FilterState;

#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub likes_min: u64,
    pub false_positive: f64,
    /// A new epoch begins when existing filters can no longer be trusted.
    pub epoch: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Nothing,
    Fold(Shape),
    /// A former filter that can lack users is dropped immediately.
    Build {
        expected: u64,
        drops_former: bool,
    },
    Drop,
}

pub(crate) fn decide(wish: &Wish, likes: u64, state: Option<&FilterState>) -> Plan {
    let Some(state) = state else {
        let enough = likes >= wish.likes_min;
        return if enough { Plan::Build { expected: fresh(wish, likes), drops_former: false } } else { Plan::Nothing };
    };
    if likes.saturating_mul(2) < wish.likes_min {
        return Plan::Drop;
    }
    let drops_former = state.is_lost || state.shape.is_some() && (state.epoch != wish.epoch || lacks(likes, state));
    let is_of_the_wish = state.false_positive == bloom::java_double(wish.false_positive);
    let outgrown = state.inserted > state.expected && state.expected < Shape::capacity_max(wish.false_positive);
    // The bits of users who unliked the target stay set, so the filter answers "no" less often than a new filter.
    let stale = state.inserted >= likes.saturating_mul(2);
    match state.shape {
        Some(shape) if !drops_former && state.building.is_none() && is_of_the_wish && !outgrown && !stale => {
            if state.waiting > 0 { Plan::Fold(shape) } else { Plan::Nothing }
        }
        Some(_) if is_of_the_wish && fits(likes, state.expected) => {
            Plan::Build { expected: state.expected, drops_former }
        }
        _ => Plan::Build { expected: fresh(wish, likes), drops_former },
    }
}

/// More likes than users added: likes were counted without the filter. The counter can be slightly wrong.
fn lacks(likes: u64, state: &FilterState) -> bool {
    likes - likes / 100 > state.inserted.saturating_add(state.others).saturating_add(10)
}

/// Twice the current count, so that the filter is not too small soon.
fn fresh(wish: &Wish, likes: u64) -> u64 {
    likes.max(wish.likes_min).saturating_mul(2).clamp(1, Shape::capacity_max(wish.false_positive))
}

/// If so, a new filter gets the same shape, so that the cached shape in API servers stays valid.
fn fits(likes: u64, expected: u64) -> bool {
    likes.saturating_mul(3) / 2 <= expected && expected / 8 <= likes
}

#[cfg(test)]
mod tests {
    use super::*;

    const WISH: Wish = Wish { likes_min: 100, false_positive: 1e-5, epoch: 7 };

    fn state() -> FilterState {
        FilterState {
            shape: Some(Shape::of(400, 1e-5)),
            expected: 400,
            false_positive: "1.0E-5".to_owned(),
            inserted: 200,
            others: 0,
            building: None,
            epoch: 7,
            waiting: 0,
            is_lost: false,
        }
    }

    fn build(expected: u64, drops_former: bool) -> Plan {
        Plan::Build { expected, drops_former }
    }

    #[test]
    fn a_target_with_enough_likes_gets_one_and_loses_it_below_half_of_that() {
        for (likes, expected) in [(99, Plan::Nothing), (100, build(200, false)), (5_000, build(10_000, false))] {
            assert_eq!(decide(&WISH, likes, None), expected, "{likes}");
        }
        for (likes, expected) in [(49, Plan::Drop), (200, Plan::Nothing)] {
            assert_eq!(decide(&WISH, likes, Some(&state())), expected, "{likes}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_filter_has_it_built_anew() {
        let shape = Shape::of(400, 1e-5);
        for (what, changed, expected) in [
            ("noted", FilterState { waiting: 3, ..state() }, Plan::Fold(shape)),
            ("stale", FilterState { inserted: 400, ..state() }, build(400, false)),
            ("outgrown", FilterState { inserted: 301, expected: 300, ..state() }, build(300, false)),
            ("outgrown by far", FilterState { inserted: 301, expected: 200, ..state() }, build(400, false)),
            ("another rate", FilterState { false_positive: "0.01".to_owned(), ..state() }, build(400, false)),
            ("a dead run's", FilterState { building: Some(5), waiting: 3, ..state() }, build(400, false)),
            ("likes counted without the filter", FilterState { inserted: 187, ..state() }, build(400, true)),
            ("the counter is slightly wrong", FilterState { inserted: 188, ..state() }, Plan::Nothing),
            ("a part is lost", FilterState { is_lost: true, ..state() }, build(400, true)),
            ("before a failover", FilterState { epoch: 6, ..state() }, build(400, true)),
            ("never finished", FilterState { shape: None, building: Some(5), epoch: 0, ..state() }, build(400, false)),
        ] {
            assert_eq!(decide(&WISH, 200, Some(&changed)), expected, "{what}");
        }
    }

    #[test]
    fn a_target_that_has_more_likes_than_the_largest_filter_is_for_is_not_built_again_and_again() {
        let expected = Shape::capacity_max(1e-5);
        assert_eq!(decide(&WISH, 1 << 40, None), build(expected, false));
        let full = FilterState { expected, inserted: 1 << 40, ..state() };
        assert_eq!(decide(&WISH, 1 << 40, Some(&full)), Plan::Nothing);
    }

    #[test]
    fn a_filter_that_was_just_built_needs_nothing() {
        for likes in [100, 150, 1_000, 123_456, 1 << 33] {
            let Plan::Build { expected, .. } = decide(&WISH, likes, None) else { panic!("{likes}") };
            let built = FilterState { shape: Some(Shape::of(expected, 1e-5)), expected, inserted: likes, ..state() };
            assert_eq!(decide(&WISH, likes, Some(&built)), Plan::Nothing, "{likes}");
            let stale = FilterState { inserted: likes * 2, ..built };
            assert_eq!(decide(&WISH, likes, Some(&stale)), build(expected, false), "{likes}");
        }
    }
}
