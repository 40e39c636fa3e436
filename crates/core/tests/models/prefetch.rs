//! The prefetch over many sessions and deaths of the daemon: how many sessions a queue needs until it is empty, and
//! which messages the queue drops.

use std::collections::VecDeque;

use proptest::prelude::*;
use tallyd_core::prefetch::{Prefetch, portion};

use super::queue::{Message, Queue};

/// The defaults of `[amqp] prefetch` and `[consumer] batch_events_max`.
const CONFIGURED: u16 = 20_000;
const BATCH: usize = 10_000;
const BYTES_MAX: usize = 32 << 20;

/// The size of a message.
const BYTES: usize = 150;

/// A queue that needs more sessions than this is never emptied.
const SESSIONS_MAX: usize = 20_000;

#[derive(Debug, Default)]
struct Outcome {
    sessions: usize,
    deaths: usize,
    /// The messages that the queue dropped.
    dropped: Vec<usize>,
}

/// What the daemon does when a message kills it.
#[derive(Clone, Copy, Debug)]
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

#[derive(PartialEq)]
enum End {
    Empty,
    OtherPrefetch,
    Died,
}

impl Daemon<'_> {
    /// Works until the queue is empty.
    fn empties(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while !self.queue.is_empty() && outcome.sessions < SESSIONS_MAX {
            outcome.sessions += 1;
            let end = self.session();
            self.queue.close();
            if end == End::Died {
                outcome.deaths += 1;
                (self.learned, self.written) = (Prefetch::default(), 0);
            }
        }
        outcome.dropped = self.queue.dropped.iter().map(|message| message.id).collect();
        outcome.dropped.sort_unstable();
        outcome
    }

    /// As the real session, this one decodes a batch while the batch before it is not acknowledged. Both stay unacknowledged
    /// if the daemon dies.
    fn session(&mut self) -> End {
        let prefetch = self.learned.begin(CONFIGURED, BYTES_MAX);
        let (mut inbox, mut committed, mut ends) = (VecDeque::new(), 0, false);
        loop {
            let delivered = self.queue.deliver(prefetch);
            if self.dies_of(Step::Receive, &delivered) {
                return End::Died;
            }
            inbox.extend(delivered);
            if ends && inbox.is_empty() {
                self.queue.acknowledge(committed);
                // The queue delivers again before the channel is closed.
                let delivered = self.queue.deliver(prefetch);
                return if self.dies_of(Step::Receive, &delivered) { End::Died } else { End::OtherPrefetch };
            }
            let mut batch = Vec::new();
            ends |= self.fill(&mut inbox, &mut batch, committed == 0);
            if self.dies_of(Step::Decode, &batch) {
                return End::Died;
            }
            if !ends || batch.is_empty() {
                self.queue.acknowledge(std::mem::take(&mut committed));
            }
            self.written += batch.len();
            if self.dies_of(Step::Write, &batch) {
                return End::Died;
            }
            committed += batch.len();
            if inbox.is_empty() && committed == 0 && self.queue.is_empty() {
                return End::Empty;
            }
        }
    }

    fn fill(&mut self, inbox: &mut VecDeque<Message>, batch: &mut Vec<Message>, is_acknowledged: bool) -> bool {
        let (mut is_off, mut returns_max) = (false, 0);
        while let Some(message) = inbox.front().filter(|_| batch.len() < BATCH) {
            let portion = portion(message.returns.max(returns_max));
            if portion < u16::MAX && !(is_acknowledged && batch.len() < usize::from(portion)) {
                break;
            }
            returns_max = message.returns.max(returns_max);
            self.learned.note(message.returns, BYTES);
            is_off |= self.learned.is_off(CONFIGURED, BYTES_MAX);
            batch.extend(inbox.pop_front());
        }
        is_off
    }

    fn dies_of(&mut self, step: Step, messages: &[Message]) -> bool {
        if self.deaths.front().is_some_and(|after| *after < self.written) {
            self.deaths.pop_front();
            return true;
        }
        let (at, deadly) = self.deadly;
        at as u8 == step as u8 && messages.iter().any(|message| deadly.contains(&message.id))
    }
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
        let outcome = emptied(&mut Queue::with(returns), (Step::Write, &[]), Vec::new());
        assert!(outcome.sessions <= sessions_max(0), "{often} returns, one of {every}: {outcome:?}");
        assert_eq!(outcome.dropped, [0; 0]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sessions_grow_with_deaths_and_not_with_messages(
        messages in 1_usize..120_000,
        deaths in prop::collection::vec(0_usize..30_000, 0..12),
    ) {
        let count = deaths.len();
        let outcome = emptied(&mut Queue::with(std::iter::repeat_n(0, messages)), (Step::Write, &[]), deaths);
        prop_assert!(outcome.sessions <= sessions_max(count), "{:?}", outcome);
        prop_assert_eq!(outcome.dropped, Vec::<usize>::new());
    }

    #[test]
    fn a_deadly_message_takes_no_other_message_with_it(
        messages in 1_usize..60_000,
        step in prop::sample::select(vec![Step::Receive, Step::Decode, Step::Write]),
        deadly in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let mut deadly: Vec<usize> = deadly.iter().map(|place| place.index(messages)).collect();
        deadly.sort_unstable();
        deadly.dedup();
        let outcome = emptied(&mut Queue::with(std::iter::repeat_n(0, messages)), (step, &deadly), Vec::new());
        prop_assert_eq!(&outcome.dropped, &deadly);
        prop_assert!(outcome.sessions <= sessions_max(outcome.deaths), "{:?}", outcome);
    }
}
