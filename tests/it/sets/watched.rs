//! A reconcile run can watch counters. Then the consumers note each change of these counters for the run. Most of the
//! counters in these tests do not count likes.

use std::time::Duration;

use tallyd_core::drift::{Watched, WatchedCount, counted_at};
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{Metric, Micros, TargetId, UserId};
use tallyd_mysql::Store;
use tallyd_mysql::jobs::number_of;

use super::common::{World, body, target};
use super::{Event, UNREAD, What, published, start};

/// The start time of a test. `at` returns the time of an event that happens a number of seconds after the start.
struct Clock(i64);

impl Clock {
    fn at(&self, second: i64) -> Micros {
        Micros(self.0 + second * 1_000_000)
    }

    /// Makes an event for the unread messages of target `id`. `number` makes the event's id unique.
    fn unread(&self, number: usize, (id, second, what): Event) -> (UserId, Vec<u8>) {
        published(number, (id, self.at(second).0, what), 1)
    }

    fn view(&self, event_id: &str, second: i64) -> (UserId, Vec<u8>) {
        (UserId(1), encode_count(TargetId(1), ("video", "view"), 3, self.at(second), event_id, None))
    }

    fn like(&self, user: u64) -> (UserId, Vec<u8>) {
        body(&LikeEvent { target: target(1), user: UserId(user), at: self.at(9), liked: true })
    }

    fn logged(&self, second: i64, (metric, delta): (Metric, Option<i64>)) -> WatchedCount {
        WatchedCount { number: (target(1), metric), at: self.at(second), delta }
    }

    /// Returns the count that the counter had at `second`. `now` is the current count.
    fn value(&self, second: i64, now: i64, counts: &[WatchedCount]) -> Option<i64> {
        counted_at(self.at(second), Duration::ZERO, now, counts)
    }
}

const VIEW: Metric = Metric(3);
const UNREAD_METRIC: Metric = Metric(4);

/// Returns two results of the watch: the count of target 1, and the noted changes of all watched counters. The changes
/// are in the order of their times.
async fn watched(store: &Store, world: &World, metric: Metric, watch: u64) -> (i64, Vec<WatchedCount>) {
    let numbers = [(target(1), metric), (target(5), metric)];
    let (truths, Watched { mut counts, .. }) =
        store.watched(&numbers, watch, &world.broker.numbered(1)).await.unwrap().unwrap();
    counts.sort_unstable_by_key(|count| count.at);
    (truths[&(target(1), metric)].counted, counts)
}

#[tokio::test]
async fn what_changes_a_watched_number_is_logged_once() {
    let world = World::new("sets_watched", UNREAD).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let clock = Clock(start());
    let before = [clock.unread(1, (1, 1, What::Count(2))), clock.unread(2, (1, 2, What::Set(10))), clock.view("a", 1)];
    world.consumed(&publisher, &before).await;

    let store = Store::new(&world.config.mysql, 2).unwrap();
    let watch = number_of(1, 1);
    store
        .watch(watch, &[(target(1), UNREAD_METRIC), (target(5), UNREAD_METRIC)], &world.broker.numbered(1), 60)
        .await
        .unwrap();
    let [again, void, lost] = [(1, 1, What::Count(2)), (1, 2, What::Count(100)), (1, 1, What::Set(100))];
    let (counted, taken, other) = ((1, 5, What::Count(4)), (1, 7, What::Count(-1)), (2, 7, What::Count(8)));
    let events = [(1, again), (3, void), (4, lost), (5, counted), (5, counted), (6, taken), (7, other)];
    let mut bodies: Vec<_> = events.into_iter().map(|(number, event)| clock.unread(number, event)).collect();
    bodies.extend([clock.view("b", 7), clock.like(1)]);
    world.consumed(&publisher, &bodies).await;
    let (now, counts) = watched(&store, &world, UNREAD_METRIC, watch).await;
    assert_eq!(
        (now, counts.as_slice()),
        (13, [clock.logged(5, (UNREAD_METRIC, Some(4))), clock.logged(7, (UNREAD_METRIC, Some(-1)))].as_slice())
    );
    let values = [4, 5, 6, 7].map(|second| clock.value(second, now, &counts));
    assert_eq!(values, [Some(10), Some(14), Some(14), Some(13)]);

    world.consumed(&publisher, &[clock.unread(8, (1, 6, What::Reset))]).await;
    let (now, counts) = watched(&store, &world, UNREAD_METRIC, watch).await;
    assert_eq!((now, counts[1]), (-1, clock.logged(6, (UNREAD_METRIC, None))));
    assert_eq!([5, 6, 7].map(|second| clock.value(second, now, &counts)), [None, Some(0), Some(-1)]);
    assert_eq!(world.count("SELECT COUNT(*) FROM watched_event").await, 0, "the run must not watch likes");
}

#[tokio::test]
async fn a_watch_is_of_one_number_and_leaves_nothing_behind() {
    let world = World::new("sets_watches", UNREAD).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let (clock, store) = (Clock(start()), Store::new(&world.config.mysql, 2).unwrap());
    let [first, second, third] = [(1, 1), (2, 1), (2, 2)].map(|(run, number)| number_of(run, number));
    store.watch(first, &[(target(1), UNREAD_METRIC)], &world.broker.numbered(1), 60).await.unwrap();
    world.consumed(&publisher, &[clock.view("a", 6), clock.unread(1, (1, 6, What::Count(1)))]).await;
    assert_eq!(
        watched(&store, &world, UNREAD_METRIC, first).await,
        (1, vec![clock.logged(6, (UNREAD_METRIC, Some(1)))])
    );
    // The second watch is for a counter that events can't set.
    store.watch(second, &[(target(1), VIEW)], &world.broker.numbered(1), 60).await.unwrap();
    assert!(
        store.watched(&[(target(1), UNREAD_METRIC)], first, &world.broker.numbered(1)).await.unwrap().is_none(),
        "the first watch must be over"
    );
    let bodies = [clock.view("a", 6), clock.view("b", 8), clock.unread(2, (1, 8, What::Count(1))), clock.like(1)];
    world.consumed(&publisher, &bodies).await;
    assert_eq!(watched(&store, &world, VIEW, second).await, (6, vec![clock.logged(8, (VIEW, Some(3)))]));
    // The third watch is for a like counter.
    store.watch(third, &[(target(1), Metric(1))], &world.broker.numbered(1), 60).await.unwrap();
    world.consumed(&publisher, &[clock.view("c", 8), clock.like(2)]).await;
    let (truths, logged) =
        store.watched(&[(target(1), Metric(1))], third, &world.broker.numbered(1)).await.unwrap().unwrap();
    assert_eq!((truths[&(target(1), Metric(1))].counted, logged.likes.len()), (2, 1));
    assert_eq!(world.count("SELECT COUNT(*) FROM watched_count").await, 2);
    store.unwatch(2).await.unwrap();
    for table in [
        "SELECT COUNT(*) FROM watched_count",
        "SELECT COUNT(*) FROM watched_target",
        "SELECT COUNT(*) FROM watched_event",
    ] {
        assert_eq!(world.count(table).await, 0, "{table}");
    }
}
