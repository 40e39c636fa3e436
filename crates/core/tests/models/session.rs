//! Sessions of two daemons with one queue and one table, in any order of their steps.
//!
//! An acknowledged message is always written. A fence (a job's marker in the queue) passes only after all events that
//! were published before it are written. After another daemon has taken over, a session writes nothing. When all is quiet,
//! every event is written.

use std::collections::BTreeSet;

use proptest::prelude::*;
use tallyd_core::flow::{Flow, Step};
use tallyd_core::partition::Claim;
use tallyd_core::prefetch::{Limits, Prefetch};

use super::queue::{Message, Queue};

const LIMITS: Limits = Limits { messages: 8, bytes: 1 << 20 };

/// Events of a full batch.
const BATCH: usize = 3;

/// The partition's rows in MySQL.
#[derive(Debug, Default)]
struct Table {
    epoch: u64,
    /// The channel of the last session that wrote.
    writer: u64,
    written: BTreeSet<usize>,
    fences: BTreeSet<usize>,
}

impl Table {
    /// Runs the transaction of a session's batch. Returns its epoch, or `None` if another daemon has taken over the
    /// partition.
    fn write(&mut self, session: &Session, queue: &Queue) -> Option<u64> {
        let Session { channel, writing, epoch: ours, .. } = session;
        match Claim::of(self.epoch, *ours) {
            Claim::Keeps => {}
            Claim::Takes(epoch) => self.epoch = epoch,
            Claim::TakenOver => return None,
        }
        assert!(ours.is_none() || self.writer == *channel, "a session writes after another one has taken over");
        self.writer = *channel;
        let (fences, events): (Vec<&Message>, _) = writing.iter().partition(|it| queue.fences.contains(&it.id));
        self.written.extend(events.iter().map(|event: &&Message| event.id));
        // The queue can have returned earlier events behind a fence that was returned.
        for fence in fences.iter().filter(|fence| fence.returns == 0) {
            let waits =
                |id: &usize| !queue.fences.contains(id) && !self.written.contains(id) && !queue.dropped.contains(id);
            assert_eq!((0..fence.id).find(waits), None, "fence {} has passed an event", fence.id);
            self.fences.insert(fence.id);
        }
        Some(self.epoch)
    }
}

struct Session {
    channel: u64,
    flow: Flow<Message, u64>,
    open: Vec<Message>,
    writing: Vec<Message>,
    epoch: Option<u64>,
}

#[derive(Default)]
struct Daemon {
    learned: Prefetch,
    session: Option<Session>,
    is_frozen: bool,
}

#[derive(Default)]
struct World {
    queue: Queue,
    table: Table,
    daemons: [Daemon; 2],
    /// Channels of daemons that died or froze. The broker has not noticed yet.
    silent: Vec<u64>,
}

/// An event of the history. A number selects the daemon, or a count.
#[derive(Clone, Copy, Debug)]
enum Action {
    Publish,
    PublishFence,
    Connect(usize),
    Deliver(usize, usize),
    /// A daemon does what its flow says.
    Step(usize),
    Commit(usize),
    /// The transaction is committed, but the daemon gets an error.
    CommitUnknown(usize),
    /// A daemon dies. Its transaction is committed afterwards, or not.
    Die(usize, bool),
    Freeze(usize),
    Thaw(usize),
    /// The broker closes the channels of daemons that are dead or frozen.
    Notice,
    /// The broker closes all channels.
    Restart,
    Stop(usize),
}

impl From<u32> for Action {
    fn from(number: u32) -> Self {
        let (daemon, most) = ((number >> 8 & 1) as usize, (number >> 9) as usize % 6 + 1);
        match number % 56 {
            0..6 => Self::Publish,
            6..8 => Self::PublishFence,
            8..12 => Self::Connect(daemon),
            12..20 => Self::Deliver(daemon, most),
            20..38 => Self::Step(daemon),
            38..46 => Self::Commit(daemon),
            46..48 => Self::CommitUnknown(daemon),
            48 => Self::Die(daemon, most > 3),
            49 => Self::Freeze(daemon),
            50..52 => Self::Thaw(daemon),
            52..54 => Self::Notice,
            54 => Self::Restart,
            _ => Self::Stop(daemon),
        }
    }
}

impl World {
    fn does(&mut self, action: Action) {
        match action {
            Action::Publish => drop(self.queue.publish(0)),
            Action::PublishFence => self.queue.publish_fence(),
            Action::Connect(daemon) => self.connect(daemon),
            Action::Deliver(daemon, most) => self.deliver(daemon, most),
            Action::Step(daemon) => self.step(daemon),
            Action::Commit(daemon) => self.commit(daemon, true),
            Action::CommitUnknown(daemon) => self.commit(daemon, false),
            Action::Die(daemon, is_late) => self.die(daemon, is_late),
            Action::Freeze(daemon) => {
                self.daemons[daemon].is_frozen = true;
                self.silent.extend(self.daemons[daemon].session.as_ref().map(|session| session.channel));
            }
            Action::Thaw(daemon) => {
                self.daemons[daemon].is_frozen = false;
                if let Some(session) = &self.daemons[daemon].session {
                    self.silent.retain(|channel| *channel != session.channel);
                }
            }
            Action::Notice => {
                std::mem::take(&mut self.silent).into_iter().for_each(|channel| self.queue.close(channel))
            }
            Action::Restart => self.queue.close_all(),
            Action::Stop(daemon) => {
                if let Some(session) = self.running(daemon) {
                    session.flow.end();
                }
            }
        }
    }

    /// Returns the session of a daemon that is not frozen.
    fn running(&mut self, daemon: usize) -> Option<&mut Session> {
        let daemon = &mut self.daemons[daemon];
        daemon.session.as_mut().filter(|_| !daemon.is_frozen)
    }

    fn connect(&mut self, daemon: usize) {
        let Daemon { learned, session, is_frozen } = &mut self.daemons[daemon];
        if session.is_none() && !*is_frozen {
            let channel = self.queue.consume(learned.begin(LIMITS));
            let flow = Flow::new(std::mem::take(learned), LIMITS);
            *session = Some(Session { channel, flow, open: Vec::new(), writing: Vec::new(), epoch: None });
        }
    }

    fn deliver(&mut self, daemon: usize, most: usize) {
        // Messages also arrive while the daemon is frozen.
        let Some(session) = &mut self.daemons[daemon].session else { return };
        for (message, tag) in self.queue.deliver(session.channel, most) {
            session.flow.received(message, tag).unwrap();
        }
    }

    fn step(&mut self, daemon: usize) {
        let Some(session) = self.running(daemon) else { return };
        match session.flow.next(session.open.len() >= BATCH, || true) {
            Some(Step::Join(message)) => session.open.push(message),
            Some(Step::Write) => session.writing = std::mem::take(&mut session.open),
            Some(Step::Acknowledge(tag)) => {
                let channel = session.channel;
                match self.queue.acknowledge(channel, tag) {
                    Some(messages) => self.acknowledged(&messages),
                    None => self.ends(daemon),
                }
            }
            Some(Step::Close) => self.ends(daemon),
            None => {}
        }
    }

    fn acknowledged(&self, messages: &[Message]) {
        for Message { id, .. } in messages {
            let is_known = self.table.written.contains(id) || self.queue.fences.contains(id);
            assert!(is_known, "message {id} is acknowledged and not written");
        }
    }

    fn commit(&mut self, daemon: usize, is_known: bool) {
        let Daemon { session: Some(session), is_frozen: false, .. } = &mut self.daemons[daemon] else { return };
        if !session.flow.is_writing() {
            return;
        }
        match self.table.write(session, &self.queue) {
            Some(epoch) if is_known => {
                session.epoch = Some(epoch);
                session.writing.clear();
                session.flow.committed();
            }
            // The writer tries again.
            Some(_) => {}
            None => self.ends(daemon),
        }
    }

    /// The session acknowledges what is committed, and closes its channel. A daemon waits for its transaction before it
    /// begins another session.
    fn ends(&mut self, daemon: usize) {
        let Some(mut session) = self.daemons[daemon].session.take() else { return };
        if let Some(messages) = session.flow.failed().and_then(|tag| self.queue.acknowledge(session.channel, tag)) {
            self.acknowledged(&messages);
        }
        self.queue.close(session.channel);
        if session.flow.is_writing() {
            self.table.write(&session, &self.queue);
        }
        self.daemons[daemon].learned = session.flow.close();
    }

    fn die(&mut self, daemon: usize, is_late: bool) {
        let Some(session) = std::mem::take(&mut self.daemons[daemon]).session else { return };
        self.silent.push(session.channel);
        // The transaction holds the partition's lock until it ends, so no other daemon writes before that.
        if session.flow.is_writing() && is_late {
            self.table.write(&session, &self.queue);
        }
    }

    /// Nothing fails any longer.
    fn settles(&mut self) {
        for daemon in 0..2 {
            self.does(Action::Thaw(daemon));
        }
        self.does(Action::Notice);
        for _ in 0..10_000 {
            for daemon in 0..2 {
                self.connect(daemon);
                self.deliver(daemon, usize::MAX);
                self.step(daemon);
                self.commit(daemon, true);
            }
            let lost = |session: &Session| !self.queue.has(session.channel);
            let lost: Vec<usize> =
                (0..2).filter(|daemon| self.daemons[*daemon].session.as_ref().is_some_and(lost)).collect();
            lost.into_iter().for_each(|daemon| self.ends(daemon));
            if self.queue.is_empty() {
                break;
            }
        }
        assert!(self.queue.is_empty(), "the queue is never emptied");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::size(4_000, 100_000)))]

    #[test]
    fn what_is_acknowledged_is_written_and_no_fence_passes_an_event(
        actions in prop::collection::vec(any::<u32>(), 0..300),
    ) {
        let mut world = World::default();
        actions.into_iter().for_each(|action| world.does(action.into()));
        world.settles();
        for id in (0..world.queue.published).filter(|id| !world.queue.fences.contains(id)) {
            prop_assert!(world.table.written.contains(&id) || world.queue.dropped.contains(&id), "event {} is lost", id);
        }
    }
}
