//! The outbox of one partition: two daemons add its rows to two buckets of Redis, a run loads lost buckets, and a run
//! measures and repairs. Every order of their steps, within the bounds of [`Bounds`].
//!
//! A repair must change a right number only if Redis or MySQL has gone back to an older state. A loaded bucket and the
//! rows that it lacks must always make the counter. After quiet and one full run, Redis must equal MySQL.

use std::collections::BTreeSet;
use std::hash::Hash;

use stateright::Property;
use tallyd_core::model::{Addition, CounterKey, Kind, Metric, Micros, Target, TargetId};
use tallyd_core::outbox::{Accepts, OutboxOffsets, OutboxRow};

use crate::{Following, World as _, size};

mod run;

use run::Run;

const PARTITION: u16 = 0;
const BUCKETS: usize = 2;
const DAEMONS: usize = 2;

/// How often each event can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bounds {
    rows: u8,
    /// Redis loses a bucket.
    losses: u8,
    /// Redis goes back to an older copy.
    failovers: u8,
    /// MySQL goes back to an older copy.
    restores: u8,
    /// A call times out. It runs later.
    timeouts: u8,
    /// A daemon dies.
    deaths: u8,
    /// A run measures and repairs a bucket.
    measures: u8,
}

/// One row of the outbox adds one to the counter in each of these buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Row {
    number: u64,
    adds: [bool; BUCKETS],
}

/// Each bucket has one counter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct MySql {
    rows: Vec<Row>,
    counters: [i64; BUCKETS],
    /// The last row that a daemon has recorded as added.
    applied: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum State {
    #[default]
    Unknown,
    /// A run loads the bucket. The number is that of the last repair.
    Loading(u8),
    Yes(u8),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Bucket {
    state: State,
    mark: u64,
    value: i64,
}

/// A call of the outbox, which adds rows to a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Call {
    bucket: usize,
    lowest: u64,
    highest: u64,
    last: u64,
    sum: i64,
}

/// The rows that a daemon has read.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Pass {
    after: u64,
    rows: Vec<Row>,
    /// The mark that a bucket has answered, or that the daemon assumes. `None` if the bucket has all rows.
    marks: [Option<u64>; BUCKETS],
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Daemon {
    added: u64,
    pass: Option<Pass>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    left: Bounds,
    next: u64,
    mysql: MySql,
    backup: Option<MySql>,
    redis: [Bucket; BUCKETS],
    replica: Option<[Bucket; BUCKETS]>,
    daemons: [Daemon; DAEMONS],
    late: BTreeSet<Call>,
    run: Option<Run>,
    /// Whether Redis or MySQL has gone back to an older state.
    went_back: bool,
    /// Whether a run has changed a right number although nothing has gone back.
    is_wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Commits([bool; BUCKETS]),
    Reads(usize),
    Calls(usize, usize),
    TimesOut(usize, usize),
    RunsLate(Call),
    Ends(usize),
    Notes(usize),
    Dies(usize),
    Loses(usize),
    Replicates,
    FailsOver,
    BacksUp,
    Restores,
    Loads,
    Measures(usize),
    Runs,
}

fn key(bucket: usize) -> CounterKey {
    (Target { kind: Kind(1), id: TargetId(bucket as u64 + 1) }, Metric(1))
}

fn offsets(number: u64) -> OutboxOffsets {
    [(PARTITION, number)].into_iter().collect()
}

impl Row {
    fn is_for(&self, bucket: usize) -> bool {
        self.adds[bucket]
    }

    fn read(&self) -> OutboxRow {
        let adds = (0..BUCKETS).filter(|bucket| self.is_for(*bucket));
        let additions =
            adds.map(|bucket| Addition { target: key(bucket).0, metric: key(bucket).1, delta: 1 }).collect();
        OutboxRow { partition: PARTITION, number: self.number, written_at: Micros(0), additions, likers: Vec::new() }
    }
}

impl MySql {
    fn last(&self) -> u64 {
        self.rows.last().map_or(0, |row| row.number)
    }
}

impl Bucket {
    /// The script apply.lua. Returns the mark if the bucket does not accept the call.
    fn applies(&mut self, call: &Call) -> Option<u64> {
        if self.mark < call.lowest || self.mark > call.highest {
            return Some(self.mark);
        }
        (self.mark, self.value) = (call.last, self.value + call.sum);
        None
    }
}

impl Pass {
    fn last(&self) -> u64 {
        self.rows.last().map_or(self.after, |row| row.number)
    }

    fn call(&self, bucket: usize) -> Option<Call> {
        let Accepts { lowest, highest } = Accepts::rows(self.after, self.marks[bucket]?, self.last())?;
        let sum = self.rows.iter().filter(|row| row.is_for(bucket) && row.number > highest).count() as i64;
        Some(Call { bucket, lowest, highest, last: self.last(), sum })
    }
}

impl World {
    fn new(left: Bounds) -> Self {
        let loaded = Bucket { state: State::Yes(0), ..Bucket::default() };
        Self {
            left,
            next: 1,
            mysql: MySql::default(),
            backup: None,
            redis: [loaded; BUCKETS],
            replica: None,
            daemons: Default::default(),
            late: BTreeSet::new(),
            run: None,
            went_back: false,
            is_wrong: false,
        }
    }

    fn reads(&mut self, daemon: usize) {
        let after = self.daemons[daemon].added;
        let rows: Vec<Row> = self.mysql.rows.iter().filter(|row| row.number > after).copied().collect();
        let marks = [0, 1].map(|bucket| rows.iter().any(|row| row.is_for(bucket)).then_some(after));
        self.daemons[daemon].pass = Some(Pass { after, rows, marks });
    }

    fn calls(&mut self, daemon: usize, bucket: usize) {
        let Some(pass) = &mut self.daemons[daemon].pass else { return };
        let Some(call) = pass.call(bucket) else { return };
        pass.marks[bucket] = self.redis[bucket].applies(&call);
    }

    /// Whether the bucket and the rows that it lacks make the counter. Only rows after `added` of a daemon are still sent.
    fn is_exact(&self, bucket: usize) -> bool {
        let Bucket { state, mark, value } = self.redis[bucket];
        let waits = self.mysql.rows.iter().filter(|row| row.is_for(bucket) && row.number > mark).count() as i64;
        !matches!(state, State::Yes(_)) || value + waits == self.mysql.counters[bucket]
    }

    /// Whether no daemon and no run is between two steps.
    fn is_quiet(&self) -> bool {
        self.run.is_none() && self.daemons.iter().all(|daemon| daemon.pass.is_none())
    }

    /// Does what daemons and one full run do when all is quiet. Late calls run afterwards. Returns whether Redis then
    /// equals MySQL.
    fn settles(&self) -> bool {
        let mut world = self.clone();
        for daemon in 0..DAEMONS {
            world.reads(daemon);
            for bucket in 0..BUCKETS {
                // A first call, and one with the mark of its answer.
                (0..2).for_each(|_| world.calls(daemon, bucket));
            }
            world.does(Event::Ends(daemon));
            world.does(Event::Notes(daemon));
        }
        for _ in 0..BUCKETS {
            world.does(Event::Loads);
            while world.run.is_some() {
                world.runs();
            }
        }
        for bucket in 0..BUCKETS {
            world.run = Some(Run::Measures { bucket, applied: world.mysql.applied });
            while world.run.is_some() {
                world.runs();
            }
        }
        let calls: Vec<Call> = world.late.iter().copied().collect();
        calls.into_iter().for_each(|call| world.does(Event::RunsLate(call)));
        (0..BUCKETS).all(|bucket| {
            matches!(world.redis[bucket].state, State::Yes(_))
                && world.redis[bucket].value == world.mysql.counters[bucket]
        })
    }
}

impl crate::World for World {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        if self.left.rows > 0 {
            events.extend([[true, false], [true, true]].map(Event::Commits));
        }
        for (number, daemon) in self.daemons.iter().enumerate() {
            match &daemon.pass {
                None if daemon.added < self.mysql.last() => events.push(Event::Reads(number)),
                None => {}
                Some(pass) => {
                    let open: Vec<usize> = (0..BUCKETS).filter(|bucket| pass.call(*bucket).is_some()).collect();
                    events.extend(open.iter().map(|bucket| Event::Calls(number, *bucket)));
                    if self.left.timeouts > 0 {
                        events.extend(open.iter().map(|bucket| Event::TimesOut(number, *bucket)));
                    }
                    if open.is_empty() {
                        events.push(Event::Ends(number));
                    }
                }
            }
            if daemon.added > self.mysql.applied {
                events.push(Event::Notes(number));
            }
            if self.left.deaths > 0 {
                events.push(Event::Dies(number));
            }
        }
        events.extend(self.late.iter().copied().map(Event::RunsLate));
        if self.left.losses > 0 {
            events.push(Event::Loses(0));
        }
        if self.left.failovers > 0 {
            events.push(if self.replica.is_none() { Event::Replicates } else { Event::FailsOver });
        }
        if self.left.restores > 0 {
            events.push(if self.backup.is_none() { Event::BacksUp } else { Event::Restores });
        }
        match self.run {
            Some(_) => events.push(Event::Runs),
            None => {
                if self.redis.iter().any(|bucket| !matches!(bucket.state, State::Yes(_))) {
                    events.push(Event::Loads);
                }
                if self.left.measures > 0 {
                    events.extend((0..BUCKETS).map(Event::Measures));
                }
            }
        }
        events
    }

    fn does(&mut self, event: Event) {
        match event {
            Event::Commits(adds) => {
                self.left.rows -= 1;
                self.mysql.rows.push(Row { number: self.next, adds });
                self.next += 1;
                for (counter, adds) in self.mysql.counters.iter_mut().zip(adds) {
                    *counter += i64::from(adds);
                }
            }
            Event::Reads(daemon) => self.reads(daemon),
            Event::Calls(daemon, bucket) => self.calls(daemon, bucket),
            Event::TimesOut(daemon, bucket) => {
                self.left.timeouts -= 1;
                let call = self.daemons[daemon].pass.take().and_then(|pass| pass.call(bucket));
                self.late.extend(call);
            }
            Event::RunsLate(call) => {
                self.late.remove(&call);
                self.redis[call.bucket].applies(&call);
            }
            Event::Ends(daemon) => {
                let Daemon { added, pass } = &mut self.daemons[daemon];
                *added = pass.take().map_or(*added, |pass| pass.last());
            }
            Event::Notes(daemon) => self.mysql.applied = self.mysql.applied.max(self.daemons[daemon].added),
            Event::Dies(daemon) => {
                self.left.deaths -= 1;
                self.daemons[daemon] = Daemon { added: self.mysql.applied, pass: None };
            }
            Event::Loses(bucket) => {
                self.left.losses -= 1;
                self.redis[bucket] = Bucket::default();
            }
            Event::Replicates => self.replica = Some(self.redis),
            Event::FailsOver => {
                self.left.failovers -= 1;
                self.went_back = true;
                self.redis = self.replica.take().unwrap_or_default();
            }
            Event::BacksUp => self.backup = Some(self.mysql.clone()),
            Event::Restores => {
                self.left.restores -= 1;
                self.went_back = true;
                self.mysql = self.backup.take().unwrap_or_default();
            }
            Event::Loads => self.run = Some(Run::LoadBegun { outbox: self.mysql.last() }),
            Event::Measures(bucket) => {
                self.left.measures -= 1;
                self.run = Some(Run::Measures { bucket, applied: self.mysql.applied });
            }
            Event::Runs => self.runs(),
        }
    }

    fn sort(&mut self) {
        // The daemons do the same.
        self.daemons.sort();
    }

    fn properties() -> Vec<Property<Following<Self>>> {
        vec![
            Property::always("a loaded bucket and the rows that it lacks make the counter", |_, world: &World| {
                world.went_back || (0..BUCKETS).all(|bucket| world.is_exact(bucket))
            }),
            Property::always("a run changes no right number", |_, world: &World| !world.is_wrong),
            Property::always("after quiet and one full run Redis equals MySQL", |_, world: &World| {
                !world.is_quiet() || world.settles()
            }),
        ]
    }
}

fn check(bounds: Bounds) {
    crate::check(&bounds, vec![World::new(bounds)]);
}

const NONE: Bounds = Bounds { rows: 0, losses: 0, failovers: 0, restores: 0, timeouts: 0, deaths: 0, measures: 0 };

#[test]
fn numbers_stay_exact_while_daemons_die_and_calls_come_late() {
    check(Bounds { rows: 2, timeouts: 1, deaths: size(1, 2), measures: size(1, 2), ..NONE });
}

#[test]
fn a_lost_bucket_is_loaded_exactly_beside_the_outbox() {
    check(Bounds { rows: size(2, 3), losses: 1, timeouts: 1, ..NONE });
}

#[test]
fn an_older_redis_or_mysql_is_repaired_by_one_full_run() {
    check(Bounds { rows: size(2, 3), failovers: 1, ..NONE });
    check(Bounds { rows: 3, restores: 1, ..NONE });
}
