//! Distinguishes drift from events in flight. Pure.
//!
//! Redis is ahead of MySQL by the events in flight. So a run reads Redis' value at one instant, the *cut*, and computes
//! MySQL's value as of the cut once every event up to the cut is committed. Drift is the difference (decision 0027).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::event::LikeEvent;
use crate::layout::Loaded;
use crate::model::{CounterKey, Metric, Micros, UserId};
use crate::outbox::OutboxOffsets;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub value: i64,
    /// The time when the sample was read, by Redis' clock. The `at` of every like in the sample is earlier than this
    /// time.
    pub cut: Micros,
    pub loaded: Loaded,
    pub offsets: OutboxOffsets,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    /// `SUM(value)` over the slots of `counter`.
    pub counted: i64,
    /// `COUNT(*) WHERE is_del = 0` over `like_record`. The value is `None` unless the caller asked to count the rows.
    pub rows: Option<i64>,
    /// The newest `at` of the applied events, or `None` if the target has no counter. If the daemon adds the counter to
    /// Redis, it is the time of the last commit. An event that changes a row also changes the target's counter in the
    /// same transaction.
    pub update_at: Option<Micros>,
}

/// A logged event about a user and a watched target, or the state of this user's row before such an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchedEvent {
    pub event: LikeEvent,
    /// True if the field `event` is a row state. False if it is a logged event.
    pub is_former: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedCount {
    pub number: CounterKey,
    pub at: Micros,
    /// The added amount. `None` if the event set the counter.
    pub delta: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    pub likes: Vec<WatchedEvent>,
    pub counts: Vec<WatchedCount>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Redis' value minus MySQL's value, both as of the cut. If the result is zero, there is no drift.
    Drift(i64),
    /// MySQL's value already contains events after the cut. The caller must watch the target to compute the value at
    /// the cut.
    Busy,
}

/// Compares a sample with MySQL's value, which was read after the fence. A target is quiet if all its events in MySQL
/// are older than the cut. The current value of a quiet target is also its value as of the cut. The clock that sets the
/// `at` of events differs from Redis' clock by at most `skew`.
pub fn judge(sample: &Sample, truth: Option<&Truth>, skew: Duration) -> Judgement {
    let Some(truth) = truth else { return Judgement::Drift(sample.value) };
    if truth.update_at.is_some_and(|update_at| update_at > sample.cut.before(skew)) {
        return Judgement::Busy;
    }
    Judgement::Drift(sample.value - truth.rows.unwrap_or(truth.counted))
}

/// `lacks` is the amount that the daemon had not added to Redis at the sample, `None` if unknown. Compares with
/// `counter` and not with like records: a full run adds their difference to `counter` and to the outbox.
pub fn judge_waiting(sample: &Sample, truth: Option<Truth>, lacks: Option<i64>) -> Judgement {
    let Some(lacks) = lacks else { return Judgement::Busy };
    Judgement::Drift(sample.value - (truth.unwrap_or_default().counted - lacks))
}

/// The log must begin before the cut. Only users with an event after the cut change the result. A user without a logged
/// state up to the cut did not like the target then, because the row was created later. `None` if an event is within
/// `skew` of the cut.
pub fn value_at<'a>(
    cut: Micros,
    skew: Duration,
    now: i64,
    events: impl IntoIterator<Item = &'a WatchedEvent>,
) -> Option<i64> {
    let mut users: BTreeMap<UserId, (Option<&LikeEvent>, Option<&LikeEvent>)> = BTreeMap::new();
    for WatchedEvent { event, .. } in events {
        if event.at > cut.before(skew) && event.at <= cut.after(skew) {
            return None;
        }
        let (at_cut, at_end) = users.entry(event.user).or_default();
        if event.at <= cut {
            *at_cut = newer(*at_cut, event);
        }
        *at_end = newer(*at_end, event);
    }
    let since: i64 = users.values().map(|(at_cut, at_end)| liked(*at_end) - liked(*at_cut)).sum();
    Some(now - since)
}

/// For counters other than likes. The log must begin before the cut. `None` if the counter was set after the cut, or if
/// an event is within `skew` of it. A set before the cut overrides only changes before the cut.
pub fn counted_at<'a>(
    cut: Micros,
    skew: Duration,
    now: i64,
    counts: impl IntoIterator<Item = &'a WatchedCount>,
) -> Option<i64> {
    let mut value = now;
    for count in counts {
        if count.at > cut.before(skew) && count.at <= cut.after(skew) {
            return None;
        }
        if count.at > cut {
            value = value.checked_sub(count.delta?)?;
        }
    }
    Some(value)
}

pub struct Logged {
    like: Metric,
    watched: Watched,
}

impl Logged {
    /// `watched` can be in any order.
    pub fn new(like: Metric, mut watched: Watched) -> Self {
        watched.likes.sort_by_key(|logged| logged.event.target);
        watched.counts.sort_by_key(|logged| logged.number);
        Self { like, watched }
    }

    pub fn value_at(&self, number: CounterKey, cut: Micros, skew: Duration, now: i64) -> Option<i64> {
        let Watched { likes, counts } = &self.watched;
        if number.1 == self.like {
            value_at(cut, skew, now, of(likes, number.0, |logged| logged.event.target))
        } else {
            counted_at(cut, skew, now, of(counts, number, |logged| logged.number))
        }
    }
}

/// `logged` is sorted by key.
fn of<T, K: Ord>(logged: &[T], key: K, key_of: impl Fn(&T) -> K) -> &[T] {
    let from = logged.partition_point(|it| key_of(it) < key);
    let until = logged.partition_point(|it| key_of(it) <= key);
    logged.get(from..until).unwrap_or_default()
}

fn newer<'a>(known: Option<&'a LikeEvent>, event: &'a LikeEvent) -> Option<&'a LikeEvent> {
    let version = |event: &LikeEvent| (event.at, !event.liked);
    match known {
        Some(known) if version(known) >= version(event) => Some(known),
        _ => Some(event),
    }
}

fn liked(event: Option<&LikeEvent>) -> i64 {
    i64::from(event.is_some_and(|event| event.liked))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::coalesce::{Before, LikeState, before as meets, coalesce};
    use crate::event::{CountEvent, EventId, SetEvent};
    use crate::model::{Kind, Target, TargetId};
    use crate::resolve_sets::{LastSet, Standing, newest, resolve};

    const TARGET: Target = Target { kind: Kind(1), id: TargetId(1) };

    fn sample(value: i64) -> Sample {
        let loaded = Loaded::Yes { generation: 1, pass: 0 };
        Sample { value, cut: Micros(100), loaded, offsets: OutboxOffsets::default() }
    }

    fn truth(counted: i64, rows: Option<i64>, update_at: i64) -> Truth {
        Truth { counted, rows, update_at: Some(Micros(update_at)) }
    }

    #[test]
    fn quiet_targets_are_judged_and_busy_ones_are_not() {
        let judged = |truth: Option<Truth>| judge(&sample(7), truth.as_ref(), Duration::ZERO);
        assert_eq!(judged(Some(truth(5, None, 100))), Judgement::Drift(2));
        assert_eq!(judged(Some(truth(5, Some(7), 99))), Judgement::Drift(0));
        assert_eq!(judged(Some(truth(7, None, 101))), Judgement::Busy);
        assert_eq!(judged(None), Judgement::Drift(7));
    }

    #[test]
    fn what_the_daemon_adds_is_judged_by_what_was_not_added_yet() {
        let judged = |lacks| judge_waiting(&sample(7), Some(truth(9, None, 101)), lacks);
        assert_eq!(judged(Some(2)), Judgement::Drift(0));
        assert_eq!(judged(Some(0)), Judgement::Drift(-2));
        assert_eq!(judged(None), Judgement::Busy);
        assert_eq!(judge_waiting(&sample(7), None, Some(0)), Judgement::Drift(7));
    }

    #[test]
    fn within_the_skew_of_a_producers_clock_a_target_is_busy() {
        let skew = Duration::from_micros(10);
        for (update_at, judgement) in [(90, Judgement::Drift(2)), (91, Judgement::Busy), (100, Judgement::Busy)] {
            assert_eq!(judge(&sample(7), Some(&truth(5, None, update_at)), skew), judgement, "{update_at}");
        }
        let logged = |at| WatchedEvent {
            event: LikeEvent { target: TARGET, user: UserId(1), at: Micros(at), liked: true },
            is_former: false,
        };
        for (at, value) in [(90, Some(1)), (91, None), (110, None), (111, Some(0))] {
            assert_eq!(value_at(Micros(100), skew, 1, [&logged(at)]), value, "{at}");
        }
    }

    #[test]
    fn a_log_of_many_numbers_is_read_for_one_of_them() {
        let target = |id| Target { id: TargetId(id), ..TARGET };
        let liked = |(id, user)| WatchedEvent {
            event: LikeEvent { target: target(id), user: UserId(user), at: Micros(200), liked: true },
            is_former: false,
        };
        let counted = |(id, metric, delta)| WatchedCount {
            number: (target(id), Metric(metric)),
            at: Micros(200),
            delta: Some(delta),
        };
        let watched = Watched {
            likes: [(3, 1), (1, 1), (2, 1), (3, 2), (2, 2), (3, 3)].map(liked).into(),
            counts: [(2, 3, 20), (1, 3, 10), (2, 4, 30), (1, 4, 1)].map(counted).into(),
        };
        let logged = Logged::new(Metric(1), watched);
        let value_at = |id, metric| logged.value_at((target(id), Metric(metric)), Micros(100), Duration::ZERO, 100);
        assert_eq!([0, 1, 2, 3, 4].map(|id| value_at(id, 1)), [100, 99, 98, 97, 100].map(Some));
        assert_eq!([(1, 3), (1, 4), (2, 3), (2, 4)].map(|(id, it)| value_at(id, it)), [90, 99, 80, 70].map(Some));
    }

    fn event() -> impl Strategy<Value = LikeEvent> {
        (1..4_u64, 1..40_i64, any::<bool>()).prop_map(|(user, at, liked)| LikeEvent {
            target: TARGET,
            user: UserId(user),
            at: Micros(at),
            liked,
        })
    }

    proptest! {
        /// Some rows exist before the watch begins. Then batches of events arrive in any order. For any cut after the
        /// watch began, the computed value must be the result of the events up to the cut.
        #[test]
        fn the_value_as_of_a_cut_is_exact(
            before in proptest::collection::vec(event(), 0..20),
            after in proptest::collection::vec(event(), 0..30),
            size in 1..6_usize,
            cut in 41..80_i64,
        ) {
            let after: Vec<LikeEvent> = after.into_iter().map(|event| LikeEvent { at: Micros(event.at.0 + 40), ..event }).collect();
            let mut rows = HashMap::new();
            let mut log = Vec::new();
            for (batch, watched) in std::iter::once((before.as_slice(), false)).chain(after.chunks(size).map(|batch| (batch, true))) {
                if watched {
                    log.extend(batch.iter().map(|event| WatchedEvent { event: *event, is_former: false }));
                    log.extend(batch.iter().filter_map(|event| {
                        let state: &LikeState = rows.get(&(event.target, event.user))?;
                        Some(WatchedEvent { event: LikeEvent { at: state.at, liked: state.liked, ..*event }, is_former: true })
                    }));
                }
                let winners = coalesce(batch);
                let before = meets(&winners, &rows);
                let applied = winners.into_iter().zip(before).filter(|(_, before)| *before != Before::NotOlder);
                rows.extend(applied.map(|(winner, _)| winner));
            }
            let count = |rows: &[(_, LikeState)]| rows.iter().filter(|(_, state)| state.liked).count() as i64;
            let now = count(&rows.into_iter().collect::<Vec<_>>());
            let until_cut = before.iter().chain(&after).filter(|event| event.at <= Micros(cut));
            prop_assert_eq!(value_at(Micros(cut), Duration::ZERO, now, &log), Some(count(&coalesce(until_cut))));
        }

        /// Tests a counter with count and set events. The computed value must be exact. It can be unknown only if the
        /// counter was set after the cut.
        #[test]
        fn a_counted_value_as_of_a_cut_is_exact(
            before in proptest::collection::vec((1..40_i64, prop::bool::weighted(0.2), -5..9_i64), 0..20),
            after in proptest::collection::vec((41..80_i64, prop::bool::weighted(0.1), -5..9_i64), 0..30),
            late in proptest::collection::vec((1..40_i64, prop::bool::weighted(0.2), -5..9_i64), 0..5),
            size in 1..6_usize,
            cut in 40..80_i64,
        ) {
            let after: Vec<Change> = after.into_iter().chain(late).collect();
            let mut number = Kept::default();
            let mut log = Vec::new();
            number.write(&before);
            for batch in after.chunks(size) {
                log.extend(number.write(batch));
            }
            let until_cut: Vec<Change> = before.iter().chain(&after).filter(|(at, ..)| *at <= cut).copied().collect();
            let mut at_cut = Kept::default();
            at_cut.write(&until_cut);
            let is_set_later = log.iter().any(|it| it.delta.is_none() && it.at > Micros(cut));
            let expected = if is_set_later { None } else { Some(at_cut.value) };
            prop_assert_eq!(counted_at(Micros(cut), Duration::ZERO, number.value, &log), expected);
        }
    }

    /// A change: its `at`, a flag that says whether it sets the counter, and the added amount or the new value.
    type Change = (i64, bool, i64);

    /// A counter that the test changes by the consumer's rules.
    #[derive(Default)]
    struct Kept {
        value: i64,
        known: HashMap<(Target, Metric), LastSet>,
        recent: Vec<(Micros, i64)>,
    }

    impl Kept {
        const KEY: (Target, Metric) = (TARGET, Metric(3));

        /// Writes a batch and returns the logged changes.
        fn write(&mut self, batch: &[Change]) -> Vec<WatchedCount> {
            let (target, metric) = Self::KEY;
            let of = |sets: bool| batch.iter().filter(move |(_, is_set, _)| *is_set == sets);
            let sets = of(true).map(|(at, _, value)| SetEvent { target, metric, value: *value, at: Micros(*at) });
            let counts = of(false).map(|(at, _, delta)| CountEvent {
                target,
                metric,
                delta: *delta,
                at: Micros(*at),
                id: EventId([0; 16]),
            });
            let resolved = resolve(&newest(sets), counts.collect(), &self.known);
            let standing = |(number, set): &(_, LastSet)| {
                let since =
                    self.recent.iter().filter(|(at, _)| *at > set.at).map(|(_, delta)| i128::from(*delta)).sum();
                (*number, Standing { counted: self.value.into(), since, update_at: None })
            };
            let standing = resolved.won.iter().map(standing).collect();
            self.value += resolved.differences(&standing).unwrap().iter().map(|it| it.delta).sum::<i64>();
            let added = resolved.live.iter().map(|it| WatchedCount {
                number: (target, it.metric),
                at: it.at,
                delta: Some(it.delta),
            });
            let set =
                resolved.won.iter().map(|(number, set)| WatchedCount { number: *number, at: set.at, delta: None });
            let logged = added.chain(set).collect();
            self.recent.extend(resolved.live.iter().map(|it| (it.at, it.delta)));
            self.known.extend(resolved.won);
            logged
        }
    }

    #[test]
    fn a_counted_value_is_not_known_where_it_was_set_after_the_cut_or_something_is_too_close_to_it() {
        let logged = |at, delta| WatchedCount { number: Kept::KEY, at: Micros(at), delta };
        let value = |skew, counts: &[WatchedCount]| counted_at(Micros(100), Duration::from_micros(skew), 10, counts);
        assert_eq!(value(0, &[logged(100, Some(3)), logged(101, Some(4)), logged(102, Some(-1))]), Some(7));
        assert_eq!(value(0, &[logged(100, None), logged(101, Some(4))]), Some(6));
        assert_eq!(value(0, &[logged(101, Some(4)), logged(102, None)]), None);
        for (at, expected) in [(90, Some(10)), (91, None), (110, None), (111, Some(9))] {
            assert_eq!(value(10, &[logged(at, Some(1))]), expected, "{at}");
        }
    }
}
