//! The archive of one period of a board with two members. Runs archive it step by step while clients write to it. A run
//! can crash, or sleep while another run takes over. A call can time out and run later. Redis and MySQL can lose data.
//! Every order of these events, within the bounds of [`Bounds`].
//!
//! These properties must hold:
//!
//! * While no store loses data, each member's score is in Redis or in the verified archive. A frozen zset that expires does
//!   not count.
//! * No score counts twice: an archived score is never higher than the score that clients have written.
//! * After quiet and some runs, the archive has exactly these scores, or the last run reports late writes that came after
//!   the end. Together with these writes, it has exactly these scores. If a store lost data, no period has ended with less
//!   than the stores could still prove: a member's score in both zsets of Redis, and its score in the verified archive. A
//!   period that an operator must decide on keeps all of this.
//! * A run that another run has overtaken changes nothing.
//!
//! Two pairs of events can lose archived scores, so no check has them together:
//!
//! * A run sleeps before its freeze. Another run archives the board. Redis goes back to the first run's claim, and the
//!   first run wakes up before a later run claims the board. Nothing tells the zset that it freezes from the archived one.
//! * MySQL goes back to a state before the freeze, after the zset has left Redis. A late write is then the whole board. If
//!   Redis also goes back, to the frozen zset, its archive replaces that of the late write.

mod run;
mod stores;

use stateright::Property;
use tallyd_core::archive::{PeriodState, Reason};
use tallyd_core::model::Freeze;

use crate::Following;
use crate::zsets::{EMPTY, MEMBERS, Zset, both, has_all};
use run::{End, Run, Step};
use stores::{MySql, Redis};

/// How often each event can happen, and how long a board stays in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bounds {
    writes: u8,
    runs: u8,
    crashes: u8,
    /// A run takes over while the run before sleeps.
    rivals: u8,
    /// A call times out. It runs later.
    timeouts: u8,
    flushes: u8,
    /// Redis goes back to an older state.
    failovers: u8,
    /// MySQL goes back to an older state.
    restores: u8,
    /// The frozen zset expires.
    expiries: u8,
    /// An hour passes.
    hours: u8,
    expire_after: u8,
}

const NONE: Bounds = Bounds {
    writes: 2,
    runs: 2,
    crashes: 0,
    rivals: 0,
    timeouts: 0,
    flushes: 0,
    failovers: 0,
    restores: 0,
    expiries: 0,
    hours: 0,
    expire_after: 1,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    left: Bounds,
    /// The scores that clients have written.
    written: Zset,
    now: u8,
    /// How many runs have begun.
    begun: u8,
    redis: Redis,
    replica: Option<Redis>,
    mysql: MySql,
    backup: Option<MySql>,
    /// The run that took the lock last, and a run that sleeps.
    runs: [Option<Run>; 2],
    late: Option<Run>,
    has_lost_redis: bool,
    has_lost_mysql: bool,
    /// Whether an overtaken run has changed something.
    has_trespassed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Writes(usize),
    Begins,
    TakesOver,
    Runs(usize),
    Crashes(usize),
    TimesOut(usize),
    RunsLate,
    Flushes,
    Replicates,
    FailsOver,
    BacksUp,
    Restores,
    Expires,
    HourPasses,
}

impl World {
    fn new(left: Bounds) -> Self {
        // An earlier run has claimed the board.
        let redis = Redis { live: [1, 0], freeze: Freeze { generation: 1, note: None }, claim: 1, ..Redis::FLUSHED };
        Self {
            left,
            written: redis.live,
            now: 0,
            begun: 1,
            redis,
            replica: None,
            mysql: MySql { row: None, rows: [EMPTY; 2], holder: 1, next: 2 },
            backup: None,
            runs: [None; 2],
            late: None,
            has_lost_redis: false,
            has_lost_mysql: false,
            has_trespassed: false,
        }
    }

    /// A run has archived the board.
    fn archived(left: Bounds) -> Self {
        let mut world = Self::new(left);
        world.completes_run();
        world
    }

    /// A run takes the job's lock.
    fn begins(&mut self) {
        self.begun += 1;
        let (id, number, now, expire_after) = (self.begun, self.mysql.next, self.now, self.left.expire_after);
        (self.mysql.holder, self.mysql.next) = (id, number + 1);
        self.runs[0] = Some(Run { id, number, now, expire_after, was_holder: false, step: Step::FindsFrozen });
    }

    fn runs(&mut self, slot: usize) -> Option<End> {
        let run = self.runs[slot].take()?;
        match self.step(run) {
            Ok(next) => {
                self.runs[slot] = Some(next);
                None
            }
            Err(end) => Some(end),
        }
    }

    fn completes_run(&mut self) -> End {
        self.begins();
        loop {
            if let Some(end) = self.runs(0) {
                return end;
            }
        }
    }

    fn runs_late(&mut self) {
        if let Some(run) = self.late.take() {
            let _ = self.step(run);
        }
    }

    fn step(&mut self, mut run: Run) -> Result<Run, End> {
        let (redis, mysql) = (self.redis, self.mysql);
        let step = run.does(&mut self.redis, &mut self.mysql);
        let is_claim = matches!(run.step, Step::Claims(_));
        let changes_redis = !is_claim && self.redis != redis && !(redis.claim == run.id && run.was_holder);
        self.has_trespassed |= changes_redis || (self.mysql != mysql && mysql.holder != run.id);
        step.map(|step| Run { step, ..run })
    }

    fn has_lost_data(&self) -> bool {
        self.has_lost_redis || self.has_lost_mysql
    }

    /// The scores that the stores can prove.
    fn proven(&self) -> Zset {
        let Redis { live, frozen, .. } = self.redis;
        both(both(live, frozen, |live, frozen| live + frozen), self.mysql.archived(), u8::max)
    }

    /// Whether Redis was flushed before the copy of the frozen zset was verified.
    fn is_lost(&self) -> bool {
        let Redis { frozen, freeze, .. } = self.redis;
        self.mysql.row.is_some_and(|row| row.copy.is_none() && row.frozen.generation != freeze.generation)
            && frozen == EMPTY
    }

    /// Whether each score is in Redis or in the verified archive.
    fn has_all(&self) -> bool {
        let Redis { live, frozen, expires, .. } = self.redis;
        let kept = if expires { EMPTY } else { frozen };
        both(both(kept, self.mysql.archived(), u8::max), live, |kept, live| kept + live) == self.written
    }

    /// Does what runs do when all is quiet. Returns whether the end is right. A late call runs before or afterwards.
    fn settles(&self, is_late: bool) -> bool {
        let mut world = self.clone();
        if !is_late {
            world.runs_late();
        }
        let (proven, is_lost) = (world.proven(), world.is_lost());
        let mut end = End::Done;
        for _ in 0..4 {
            world.now += 10;
            end = world.completes_run();
        }
        world.runs_late();
        let Self { redis: Redis { live, frozen, .. }, mysql, .. } = world;
        let archived = mysql.archived();
        let has_ended = mysql.row.is_none_or(|row| row.state == PeriodState::Ended) && (live, frozen) == (EMPTY, EMPTY);
        let keeps = both(both(archived, frozen, u8::max), live, |kept, live| kept + live);
        let is_right = match &end {
            End::Done => has_ended && !is_lost && has_all(archived, proven),
            // A run does not notice that MySQL goes back to the middle of this run, and lacks its rows.
            End::Kept(Reason::NotAsVerified) => self.has_lost_mysql,
            // An operator then adds these writes to the archive.
            End::Kept(Reason::Late) => has_all(self.written, both(archived, live, |archived, live| archived + live)),
            End::Kept(_) => self.has_lost_data(),
            End::Failed => false,
        };
        let is_exact = self.has_lost_data() || keeps == self.written;
        is_right && is_exact && has_all(keeps, proven) && has_all(self.written, archived)
    }
}

impl crate::World for World {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let Self { left, runs, .. } = self;
        let mut events = Vec::new();
        let mut add = |is_possible: bool, event| events.extend(is_possible.then_some(event));
        for member in 0..MEMBERS {
            add(left.writes > 0, Event::Writes(member));
        }
        add(left.runs > 0 && runs[0].is_none(), Event::Begins);
        add(left.rivals > 0 && runs[0].is_some() && runs[1].is_none(), Event::TakesOver);
        for (slot, run) in runs.iter().enumerate() {
            add(run.is_some(), Event::Runs(slot));
            add(run.is_some() && left.crashes > 0, Event::Crashes(slot));
            add(run.is_some_and(|run| run.changes()) && left.timeouts > 0, Event::TimesOut(slot));
        }
        add(self.late.is_some(), Event::RunsLate);
        add(left.flushes > 0, Event::Flushes);
        add(left.failovers > 0, if self.replica.is_none() { Event::Replicates } else { Event::FailsOver });
        add(left.restores > 0, if self.backup.is_none() { Event::BacksUp } else { Event::Restores });
        add(left.expiries > 0 && self.redis.expires, Event::Expires);
        add(left.hours > 0, Event::HourPasses);
        events
    }

    fn does(&mut self, event: Event) {
        let left = &mut self.left;
        match event {
            Event::Writes(member) => {
                left.writes -= 1;
                self.redis.live[member] += 1;
                self.written[member] += 1;
            }
            Event::Begins => {
                left.runs -= 1;
                self.begins();
            }
            Event::TakesOver => {
                left.rivals -= 1;
                self.runs[1] = self.runs[0];
                self.begins();
            }
            Event::Runs(slot) => drop(self.runs(slot)),
            Event::Crashes(slot) => {
                left.crashes -= 1;
                self.runs[slot] = None;
            }
            Event::TimesOut(slot) => {
                left.timeouts -= 1;
                self.late = self.runs[slot].take();
            }
            Event::RunsLate => self.runs_late(),
            Event::Flushes => {
                left.flushes -= 1;
                (self.redis, self.has_lost_redis) = (Redis::FLUSHED, true);
            }
            Event::Replicates => self.replica = Some(self.redis),
            Event::FailsOver => {
                left.failovers -= 1;
                (self.redis, self.has_lost_redis) = (self.replica.take().unwrap_or(Redis::FLUSHED), true);
                // The call went to the former server.
                self.late = None;
            }
            Event::BacksUp => self.backup = Some(self.mysql),
            Event::Restores => {
                left.restores -= 1;
                (self.mysql, self.has_lost_mysql) = (self.backup.take().unwrap_or(self.mysql), true);
                self.late = None;
            }
            Event::Expires => {
                left.expiries -= 1;
                (self.redis.frozen, self.redis.expires) = (EMPTY, false);
            }
            Event::HourPasses => {
                left.hours -= 1;
                self.now += 1;
            }
        }
    }

    fn properties() -> Vec<Property<Following<Self>>> {
        vec![
            Property::always("each score is in Redis or in the verified archive", |_, world: &World| {
                world.has_lost_data() || world.has_all()
            }),
            Property::always("no score counts twice", |_, world: &World| {
                has_all(world.written, world.mysql.archived())
            }),
            Property::always("after quiet the archive is exact, or an operator knows", |_, world: &World| {
                // Every run ends, so each other state leads to such a state.
                world.runs != [None; 2] || (world.settles(false) && world.settles(true))
            }),
            Property::always("an overtaken run changes nothing", |_, world: &World| !world.has_trespassed),
        ]
    }
}

fn check(world: World) {
    let bounds = world.left;
    crate::check(&bounds, vec![world]);
}

#[test]
fn a_board_is_archived_exactly_although_runs_crash_anywhere() {
    check(World::new(Bounds { runs: 3, crashes: 2, hours: 1, expiries: 1, ..NONE }));
    check(World::new(Bounds { crashes: 1, expire_after: 0, ..NONE }));
}

#[test]
fn a_run_that_wakes_up_or_a_late_call_changes_no_archive() {
    check(World::new(Bounds { writes: 1, crashes: 1, rivals: 1, expire_after: 0, ..NONE }));
    check(World::archived(Bounds { runs: 1, rivals: 1, ..NONE }));
    check(World::new(Bounds { timeouts: 1, expire_after: 0, ..NONE }));
}

#[test]
fn a_flushed_redis_ends_no_board_with_less_than_is_known() {
    check(World::new(Bounds { flushes: 1, ..NONE }));
    check(World::archived(Bounds { timeouts: 1, flushes: 1, ..NONE }));
}

#[test]
fn an_older_redis_is_raised_and_no_score_counts_twice() {
    check(World::new(Bounds { failovers: 1, ..NONE }));
    check(World::archived(Bounds { failovers: 2, ..NONE }));
}

#[test]
fn an_older_mysql_ends_no_board_with_less_than_is_known() {
    check(World::new(Bounds { restores: 1, ..NONE }));
    check(World::archived(Bounds { crashes: 1, restores: 1, ..NONE }));
}
