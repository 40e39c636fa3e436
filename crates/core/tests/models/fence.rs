//! The fences of two runs in one partition: a queue whose depth may lie, consumers that die, freeze and wake up, and
//! runs that die. Every order of their steps, within the bounds of [`Bounds`].
//!
//! If a fence has passed, or the partition is idle, every event that the broker had accepted before must be committed.

use stateright::Property;
use tallyd_core::fence::{Depth, Fence, Look, Next, Passed};
use tallyd_core::partition::Claim;

use crate::{Following, size};

/// The maximum number of passes of one run.
const PASSES: u64 = 2;

/// How often each event can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bounds {
    events: u8,
    /// A consumer begins.
    sessions: u8,
    /// A consumer freezes.
    freezes: u8,
    runs: u8,
    /// The passes of each run.
    passes: u64,
    /// The runs' node is cut off from the other nodes, which have the queue.
    partitions: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Body {
    Event(u8),
    Fence(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Message {
    body: Body,
    is_returned: bool,
}

/// A consumer's session. `epoch` is that of its first commit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Session {
    epoch: Option<u64>,
    unacked: Vec<Message>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct MySql {
    committed: u8,
    epoch: u64,
    passed: u64,
    /// The fences that were left, and whether each is confirmed.
    left: Vec<(u64, bool)>,
    /// The run that has the job's lock.
    run: u64,
}

/// MySQL's rows as a run has read them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Known {
    passed: u64,
    epoch: u64,
    left: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Step {
    Reads,
    Looks(Known),
    /// The queue had fewer messages than fences: the run deletes the rows of others.
    Forgets(Known),
    Decides(Known, Look),
    ReadsAgain(Known),
    Notes(u64),
    Publishes {
        epoch: u64,
        leaves: bool,
    },
    Confirms(u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Run {
    number: u64,
    sent_in: Option<u64>,
    /// The events that the broker had accepted before this pass.
    must: u8,
    step: Step,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    left: Bounds,
    published: u8,
    /// Returned messages are delivered before all others.
    returned: Vec<Message>,
    ready: Vec<Message>,
    active: Option<Session>,
    /// A session whose process froze. The broker has returned its messages.
    frozen: Option<Session>,
    mysql: MySql,
    run: Option<Run>,
    /// The answer of the runs' node while it is cut off. It confirms nothing then.
    cut_off: Option<Depth>,
    passes: u8,
    is_wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Publishes,
    Begins,
    Receives,
    /// The session commits its first messages, and acknowledges them if it does not die first.
    Commits(usize),
    CommitsAndDies(usize),
    Dies,
    Freezes,
    WakesUp,
    RunBegins,
    RunDies,
    Runs,
    /// The broker answers "no messages and no consumers".
    Lies,
    CutsOff,
    Joins,
}

fn run_of(fence: u64) -> u64 {
    fence / PASSES
}

impl MySql {
    fn known(&self) -> Known {
        let left = self.left.iter().filter(|(_, is_confirmed)| *is_confirmed).map(|(fence, _)| *fence).collect();
        Known { passed: self.passed, epoch: self.epoch, left }
    }

    /// The transaction of a batch. Returns whether the session still holds the partition.
    fn commits(&mut self, session: &mut Session, messages: usize) -> bool {
        match Claim::of(self.epoch, session.epoch) {
            Claim::Keeps => {}
            Claim::Takes(epoch) => (self.epoch, session.epoch) = (epoch, Some(epoch)),
            Claim::TakenOver => return false,
        }
        for Message { body, is_returned } in &session.unacked[..messages] {
            match *body {
                Body::Event(event) => self.committed |= 1 << event,
                // The queue can have returned earlier events behind this fence.
                Body::Fence(_) if *is_returned => {}
                Body::Fence(fence) => {
                    if run_of(fence) == self.run {
                        self.passed = self.passed.max(fence);
                    }
                    self.left.retain(|(left, _)| *left > fence);
                }
            }
        }
        true
    }
}

impl World {
    fn new(left: Bounds) -> Self {
        Self {
            left,
            published: 0,
            returned: Vec::new(),
            ready: Vec::new(),
            active: None,
            frozen: None,
            mysql: MySql::default(),
            run: None,
            cut_off: None,
            passes: 0,
            is_wrong: false,
        }
    }

    fn begins(&self, number: u64) -> Run {
        Run { number, sent_in: None, must: (1 << self.published) - 1, step: Step::Reads }
    }

    fn returns(&mut self, session: Session) {
        self.returned.extend(session.unacked.into_iter().map(|message| Message { is_returned: true, ..message }));
    }

    fn depth(&self) -> Depth {
        Depth::of((self.returned.len() + self.ready.len()) as u32, u32::from(self.active.is_some()))
    }

    /// One step of the run. `depth` is the broker's answer.
    fn runs(&mut self, depth: Depth) {
        let Some(mut run) = self.run.take() else { return };
        let number = run.number;
        run.step = match run.step.clone() {
            Step::Reads => Step::Looks(self.mysql.known()),
            Step::Looks(known) => {
                let fence = fence(&run, &known);
                match fence.passed() {
                    Passed::Yes => return self.passed(&run),
                    Passed::TakenOver => return,
                    Passed::No => {}
                }
                match Look::of(depth, known.left.len()) {
                    Some(look) => Step::Decides(known, look),
                    None => Step::Forgets(known),
                }
            }
            Step::Forgets(known) => {
                self.mysql.left.retain(|(fence, _)| run_of(*fence) == run_of(number));
                Step::Decides(known, Look::Unknown)
            }
            Step::Decides(known, look) => match fence(&run, &known).next(look) {
                Next::Idle => Step::ReadsAgain(known),
                Next::Wait => Step::Reads,
                Next::Send => Step::Publishes { epoch: known.epoch, leaves: false },
                Next::Leave => Step::Notes(known.epoch),
            },
            Step::ReadsAgain(known) if self.mysql.known().left == known.left => return self.passed(&run),
            Step::ReadsAgain(_) => Step::Reads,
            Step::Notes(epoch) => {
                self.mysql.left.retain(|(fence, _)| *fence != number);
                self.mysql.left.push((number, false));
                self.mysql.left.sort_unstable();
                Step::Publishes { epoch, leaves: true }
            }
            Step::Publishes { epoch, leaves } => {
                self.ready.push(Message { body: Body::Fence(number), is_returned: false });
                if leaves {
                    Step::Confirms(epoch)
                } else {
                    run.sent_in = Some(epoch);
                    Step::Reads
                }
            }
            Step::Confirms(epoch) => {
                self.mysql.left.iter_mut().filter(|(fence, _)| *fence == number).for_each(|left| left.1 = true);
                run.sent_in = Some(epoch);
                Step::Reads
            }
        };
        self.run = Some(run);
    }

    /// The run concludes that nothing is in flight, and makes its next pass.
    fn passed(&mut self, run: &Run) {
        self.passes += 1;
        self.is_wrong |= run.must & !self.mysql.committed != 0;
        let next = run.number + 1;
        self.run = (next % PASSES < self.left.passes && !next.is_multiple_of(PASSES)).then(|| self.begins(next));
    }
}

fn fence(run: &Run, known: &Known) -> Fence {
    Fence {
        number: run.number,
        passed: known.passed,
        epoch: known.epoch,
        sent_in: run.sent_in,
        has_own: known.left.iter().any(|fence| run_of(*fence) == run_of(run.number)),
    }
}

impl crate::World for World {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        let Bounds { events: more, sessions, freezes, runs, partitions, .. } = self.left;
        events.extend((more > 0).then_some(Event::Publishes));
        match &self.active {
            None => events.extend((sessions > 0).then_some(Event::Begins)),
            Some(Session { unacked, .. }) => {
                let is_empty = self.returned.is_empty() && self.ready.is_empty();
                events.extend((!is_empty).then_some(Event::Receives));
                for messages in 1..=unacked.len() {
                    events.extend([Event::Commits(messages), Event::CommitsAndDies(messages)]);
                }
                events.push(Event::Dies);
                events.extend((freezes > 0).then_some(Event::Freezes));
            }
        }
        events.extend(self.frozen.as_ref().map(|_| Event::WakesUp));
        match &self.run {
            None => events.extend((runs > 0).then_some(Event::RunBegins)),
            Some(Run { step, .. }) => {
                events.push(Event::RunDies);
                let waits = self.cut_off.is_some() && matches!(step, Step::Publishes { .. });
                events.extend((!waits).then_some(Event::Runs));
                events.extend(matches!(step, Step::Looks(_)).then_some(Event::Lies));
            }
        }
        match self.cut_off {
            None => events.extend((partitions > 0).then_some(Event::CutsOff)),
            Some(_) => events.push(Event::Joins),
        }
        events
    }

    fn does(&mut self, event: Event) {
        match event {
            Event::Publishes => {
                self.left.events -= 1;
                self.ready.push(Message { body: Body::Event(self.published), is_returned: false });
                self.published += 1;
            }
            Event::Begins => {
                self.left.sessions -= 1;
                self.mysql.left.clear();
                self.active = Some(Session::default());
            }
            Event::Receives => {
                let from = if self.returned.is_empty() { &mut self.ready } else { &mut self.returned };
                let message = from.remove(0);
                self.active.as_mut().unwrap().unacked.push(message);
            }
            Event::Commits(messages) => {
                let mut session = self.active.take().unwrap();
                if self.mysql.commits(&mut session, messages) {
                    session.unacked.drain(..messages);
                    self.active = Some(session);
                } else {
                    self.returns(session);
                }
            }
            Event::CommitsAndDies(messages) => {
                let mut session = self.active.take().unwrap();
                self.mysql.commits(&mut session, messages);
                self.returns(session);
            }
            Event::Dies => {
                let session = self.active.take().unwrap();
                self.returns(session);
            }
            Event::Freezes => {
                self.left.freezes -= 1;
                let session = self.active.take().unwrap();
                self.returns(session.clone());
                self.frozen = Some(session).filter(|session| !session.unacked.is_empty());
            }
            Event::WakesUp => {
                let mut session = self.frozen.take().unwrap();
                let messages = session.unacked.len();
                self.mysql.commits(&mut session, messages);
            }
            Event::RunBegins => {
                self.left.runs -= 1;
                self.mysql.run += 1;
                self.run = Some(self.begins(self.mysql.run * PASSES));
            }
            Event::RunDies => self.run = None,
            Event::Runs => self.runs(self.cut_off.unwrap_or_else(|| self.depth())),
            Event::Lies => self.runs(Depth::of(0, 0)),
            Event::CutsOff => {
                self.left.partitions -= 1;
                self.cut_off = Some(self.depth());
            }
            Event::Joins => self.cut_off = None,
        }
    }

    fn is_within_bounds(&self) -> bool {
        // A run can send a fence in each epoch. More than three in a queue show nothing new.
        let fences = self.returned.iter().chain(&self.ready).filter(|message| matches!(message.body, Body::Fence(_)));
        fences.count() <= 3
    }

    fn properties() -> Vec<Property<Following<Self>>> {
        vec![
            Property::always("no fence passes an event", |_, world: &World| !world.is_wrong),
            Property::sometimes("a queue without a consumer is idle", |_, world: &World| {
                world.passes > 0 && world.mysql.passed == 0
            }),
            Property::sometimes("a consumer passes a fence", |_, world: &World| {
                world.passes > 0 && world.mysql.passed > 0
            }),
        ]
    }
}

fn check(bounds: Bounds) {
    crate::check(&bounds, vec![World::new(bounds)]);
}

const ONE: Bounds = Bounds { events: 1, sessions: 1, freezes: 0, runs: 1, passes: 1, partitions: 0 };

#[test]
fn no_fence_passes_an_event_whose_consumer_dies_or_freezes() {
    check(Bounds { events: 2, sessions: size(1, 2), freezes: 1, passes: 2, ..ONE });
    check(Bounds { sessions: 2, freezes: 1, ..ONE });
    check(Bounds { sessions: 3, events: size(1, 2), ..ONE });
}

#[test]
fn the_fences_that_a_dead_run_left_hide_no_event() {
    check(Bounds { runs: 2, passes: 2, sessions: size(1, 2), ..ONE });
}

#[test]
fn a_node_that_is_cut_off_makes_no_partition_idle() {
    check(Bounds { runs: 2, partitions: 1, ..ONE });
}
