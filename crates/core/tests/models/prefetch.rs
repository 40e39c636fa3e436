//! The prefetch over many sessions and deaths of the daemon: how many sessions a queue needs until it is empty, and
//! which messages the queue drops.

use std::collections::VecDeque;

use proptest::prelude::*;
use tallyd_core::flow::{self, Flow};
use tallyd_core::prefetch::{Limits, Prefetch};

use super::queue::{Message, Queue};

/// A tenth of the limits of a daemon with the default configuration.
const LIMITS: Limits = Limits { messages: 2_000, bytes: 3 << 20 };
const BATCH: usize = 1_000;

/// A queue that needs more sessions than this is never emptied.
const SESSIONS_MAX: usize = 20_000;

#[derive(Debug, Default)]
struct Outcome {
    sessions: usize,
    deaths: usize,
    /// The messages that the queue dropped.
    dropped: Vec<usize>,
}

/// The step at which a message kills the daemon.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Receive,
    Decode,
    Write,
}

struct Daemon<'q> {
    queue: &'q mut Queue,
    learned: Prefetch,
    /// The daemon dies at this step of these messages.
    deadly: (Step, &'q [usize]),
    /// The daemon also dies after each of these numbers of written messages, counted from its last death.
    deaths: VecDeque<usize>,
    written: usize,
}

impl Daemon<'_> {
    /// Works until the queue is empty.
    fn empties(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while !self.queue.is_empty() && outcome.sessions < SESSIONS_MAX {
            outcome.sessions += 1;
            let channel = self.queue.consume(self.learned.begin(LIMITS));
            let is_dead = self.session(channel);
            self.queue.close(channel);
            if is_dead {
                outcome.deaths += 1;
                (self.learned, self.written) = (Prefetch::default(), 0);
            }
        }
        outcome.dropped = self.queue.dropped.clone();
        outcome.dropped.sort_unstable();
        outcome
    }

    /// Returns true if the daemon dies.
    fn session(&mut self, channel: u64) -> bool {
        let mut flow = Flow::new(std::mem::take(&mut self.learned), LIMITS);
        let mut open = Vec::new();
        loop {
            let delivered = self.queue.deliver(channel, usize::MAX);
            if self.dies_of(Step::Receive, delivered.iter().map(|(message, _)| message)) {
                return true;
            }
            for (message, tag) in delivered {
                flow.received(message, tag).unwrap();
            }
            match flow.next(open.len() >= BATCH, || true) {
                Some(flow::Step::Join(message)) => {
                    if self.dies_of(Step::Decode, [&message]) {
                        return true;
                    }
                    open.push(message);
                }
                Some(flow::Step::Write) => {
                    self.written += open.len();
                    if self.dies_of(Step::Write, &open) {
                        return true;
                    }
                    open.clear();
                }
                Some(flow::Step::Acknowledge(tag)) => {
                    self.queue.acknowledge(channel, tag).unwrap();
                }
                Some(flow::Step::Close) => break,
                // The batch that is written is committed before the next step.
                None if flow.is_writing() => flow.committed(),
                None => break,
            }
        }
        self.learned = flow.close();
        false
    }

    fn dies_of<'m>(&mut self, step: Step, messages: impl IntoIterator<Item = &'m Message>) -> bool {
        if self.deaths.front().is_some_and(|after| *after < self.written) {
            self.deaths.pop_front();
            return true;
        }
        let (at, deadly) = self.deadly;
        at == step && !deadly.is_empty() && messages.into_iter().any(|message| deadly.contains(&message.id))
    }
}

/// A queue with messages that were returned so often.
fn queue_of(returns: impl IntoIterator<Item = i64>) -> Queue {
    let mut queue = Queue::default();
    for returns in returns {
        queue.publish(returns);
    }
    queue
}

fn emptied(queue: &mut Queue, deadly: (Step, &[usize]), deaths: Vec<usize>) -> Outcome {
    let daemon = Daemon { queue, learned: Prefetch::default(), deadly, deaths: deaths.into(), written: 0 };
    daemon.empties()
}

/// The greatest number of sessions for so many deaths. It does not depend on the number of messages. After its start,
/// a daemon has one session of one message, one with small messages, and one with the full prefetch.
fn sessions_max(deaths: usize) -> usize {
    (deaths + 1) * 3
}

#[test]
fn messages_of_many_returns_between_others_cost_few_sessions() {
    for (often, every) in [(11, 2), (11, 3), (11, 7), (7, 2), (12, 100), (11, 499), (11, 501), (7, 2_000)] {
        let returns = (0..20_000).map(|place| if place % every == 0 { often } else { 0 });
        let outcome = emptied(&mut queue_of(returns), (Step::Write, &[]), Vec::new());
        assert!(outcome.sessions <= sessions_max(0), "{often} returns, one of {every}: {outcome:?}");
        assert_eq!(outcome.dropped, [0; 0]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sessions_grow_with_deaths_and_not_with_messages(
        messages in 1_usize..12_000,
        deaths in prop::collection::vec(0_usize..3_000, 0..12),
    ) {
        let count = deaths.len();
        let outcome = emptied(&mut queue_of(std::iter::repeat_n(0, messages)), (Step::Write, &[]), deaths);
        prop_assert!(outcome.sessions <= sessions_max(count), "{:?}", outcome);
        prop_assert_eq!(outcome.dropped, Vec::<usize>::new());
    }

    #[test]
    fn a_deadly_message_takes_no_other_message_with_it(
        messages in 1_usize..6_000,
        step in prop::sample::select(vec![Step::Receive, Step::Decode, Step::Write]),
        deadly in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let mut deadly: Vec<usize> = deadly.iter().map(|place| place.index(messages)).collect();
        deadly.sort_unstable();
        deadly.dedup();
        let outcome = emptied(&mut queue_of(std::iter::repeat_n(0, messages)), (step, &deadly), Vec::new());
        prop_assert_eq!(&outcome.dropped, &deadly);
        prop_assert!(outcome.sessions <= sessions_max(outcome.deaths), "{:?}", outcome);
    }
}
