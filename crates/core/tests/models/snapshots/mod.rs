//! The snapshot of an open board with two members, and its restore after Redis has lost the board. Runs save and
//! restore step by step, in the order of `src/jobs/snapshots`, while clients write. Every order of these events, within
//! the bounds of [`Bounds`].
//!
//! These properties must hold:
//!
//! * No score counts twice: no store has a higher score than clients have written.
//! * After quiet and some runs, the board is restored and saved. If Redis was flushed, each member then has its score of
//!   the last complete snapshot before the flush, plus all later writes. If Redis went back to a state before this
//!   snapshot, each member has the higher of its scores in the snapshot and in Redis. Redis can also go back to a state
//!   in which it already had the snapshot's mark: this is no loss that a run can detect.
//! * A run that another run has overtaken changes nothing.

mod run;

use stateright::Property;

use crate::Following;
use crate::zsets::{EMPTY, MEMBERS, Zset, both, has_all};
use run::{End, MySql, Redis, Run, Step};

/// How often each event can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bounds {
    writes: u8,
    saves: u8,
    restores: u8,
    crashes: u8,
    /// A run takes over while the run before sleeps.
    rivals: u8,
    /// A call times out. It runs later.
    timeouts: u8,
    flushes: u8,
    /// Redis goes back to an older state.
    failovers: u8,
}

const NONE: Bounds =
    Bounds { writes: 2, saves: 2, restores: 0, crashes: 0, rivals: 0, timeouts: 0, flushes: 0, failovers: 0 };

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    left: Bounds,
    /// The scores that clients have written.
    written: Zset,
    /// How many runs have begun.
    begun: u8,
    redis: Redis,
    replica: Option<Redis>,
    mysql: MySql,
    /// The run that took the lock last, and a run that sleeps.
    runs: [Option<Run>; 2],
    late: Option<Run>,
    /// The last complete snapshot before the last loss that a run can detect.
    saved: Zset,
    /// The scores that clients have written since the last flush. `None` if Redis was not flushed.
    since: Option<Zset>,
    lost_data: bool,
    /// Whether an overtaken run has changed something.
    has_trespassed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Writes(usize),
    Begins(Step),
    TakesOver(Step),
    Runs(usize),
    Crashes(usize),
    TimesOut(usize),
    RunsLate,
    Flushes,
    Replicates,
    FailsOver,
}

impl World {
    fn new(left: Bounds) -> Self {
        let redis = Redis { live: [1, 0], generation: 1, claim: 1, ..Redis::default() };
        Self {
            left,
            written: redis.live,
            begun: 1,
            redis,
            replica: None,
            mysql: MySql { snapshot: None, saved: EMPTY, holder: 1 },
            runs: [None; 2],
            late: None,
            saved: EMPTY,
            since: None,
            lost_data: false,
            has_trespassed: false,
        }
    }

    /// A run has saved the board.
    fn saved(left: Bounds) -> Self {
        let mut world = Self::new(left);
        world.ends(Step::FindsSnapshot);
        world
    }

    /// Redis now has only the data in `redis`.
    fn loses(&mut self, redis: Redis) {
        let is_detected = self.mysql.complete().is_some_and(|snapshot| !snapshot.is_marked(redis.mark));
        self.saved = if is_detected { self.mysql.saved } else { EMPTY };
        (self.redis, self.lost_data) = (redis, true);
    }

    /// A run takes the job's lock.
    fn begins(&mut self, step: Step) {
        self.begun += 1;
        self.mysql.holder = self.begun;
        self.runs[0] = Some(Run::new(self.begun, step));
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

    fn runs_late(&mut self) {
        if let Some(run) = self.late.take() {
            let _ = self.step(run);
        }
    }

    fn step(&mut self, mut run: Run) -> Result<Run, End> {
        let (redis, mysql) = (self.redis, self.mysql);
        let step = run.does(&mut self.redis, &mut self.mysql);
        let is_claim = matches!(run.step, Step::Claims(_) | Step::ClaimsLost);
        let changes_redis = !is_claim && self.redis != redis && !(redis.claim == run.id && run.was_holder);
        self.has_trespassed |= changes_redis || (self.mysql != mysql && mysql.holder != run.id);
        step.map(|step| Run { step, ..run })
    }

    fn ends(&mut self, step: Step) -> End {
        self.begins(step);
        loop {
            if let Some(end) = self.runs(0) {
                return end;
            }
        }
    }

    /// Does what runs do when all is quiet: saves the board, and restores it first if a run reports a loss. Returns
    /// whether the end is right. A late call runs before or afterwards.
    fn settles(&self, is_late: bool) -> bool {
        let mut world = self.clone();
        if !is_late {
            world.runs_late();
        }
        let before = world.redis.live;
        let mut end = world.ends(Step::FindsSnapshot);
        if end == End::Lost {
            let restored = world.ends(Step::ClaimsLost);
            end = if restored == End::Done { world.ends(Step::FindsSnapshot) } else { restored };
        }
        world.runs_late();
        let Self { redis: Redis { live, .. }, mysql, saved, since, .. } = world;
        let least =
            since.map_or(both(saved, before, u8::max), |since| both(saved, since, |saved, since| saved + since));
        let is_saved = mysql.complete().is_none_or(|_| mysql.saved == live);
        let is_exact = self.lost_data || live == self.written;
        end == End::Done && is_saved && is_exact && has_all(live, least)
    }

    fn counts_once(&self) -> bool {
        let zsets = [self.redis.live, self.mysql.saved, self.redis.filling];
        let restored = self.redis.restored.map_or(EMPTY, |restored| restored.zset);
        let moved = both(restored, self.redis.live, |restored, live| restored + live);
        zsets.iter().all(|zset| has_all(self.written, *zset))
            && (self.redis.restored.is_none() || has_all(self.written, moved))
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
        for (step, left_runs) in [(Step::FindsSnapshot, left.saves), (Step::ClaimsLost, left.restores)] {
            add(left_runs > 0 && runs[0].is_none(), Event::Begins(step));
            add(left.rivals > 0 && runs[0].is_some() && runs[1].is_none(), Event::TakesOver(step));
        }
        for (slot, run) in runs.iter().enumerate() {
            add(run.is_some(), Event::Runs(slot));
            add(run.is_some() && left.crashes > 0, Event::Crashes(slot));
            add(run.is_some_and(|run| run.changes()) && left.timeouts > 0, Event::TimesOut(slot));
        }
        add(self.late.is_some(), Event::RunsLate);
        add(left.flushes > 0, Event::Flushes);
        // A server that no run has claimed counts as flushed, so it must not lag.
        let is_known = left.flushes == 0 && self.redis.generation != 0;
        match self.replica {
            None => add(left.failovers > 0 && is_known, Event::Replicates),
            Some(_) => add(true, Event::FailsOver),
        }
        events
    }

    fn does(&mut self, event: Event) {
        let left = &mut self.left;
        match event {
            Event::Writes(member) => {
                left.writes -= 1;
                self.redis.live[member] += 1;
                self.written[member] += 1;
                if let Some(since) = &mut self.since {
                    since[member] += 1;
                }
            }
            Event::Begins(step) => {
                let left_runs = if step == Step::ClaimsLost { &mut left.restores } else { &mut left.saves };
                *left_runs -= 1;
                self.begins(step);
            }
            Event::TakesOver(step) => {
                left.rivals -= 1;
                self.runs[1] = self.runs[0];
                self.begins(step);
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
                self.loses(Redis::default());
                self.since = Some(EMPTY);
            }
            Event::Replicates => self.replica = Some(self.redis),
            Event::FailsOver => {
                left.failovers -= 1;
                let replica = self.replica.take().unwrap_or_default();
                self.loses(replica);
                self.since = None;
            }
        }
    }

    fn properties() -> Vec<Property<Following<Self>>> {
        vec![
            Property::always("no score counts twice", |_, world: &World| world.counts_once()),
            Property::always("after quiet the board is restored and saved", |_, world: &World| {
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
fn an_open_board_is_saved_exactly_although_runs_crash() {
    check(World::new(Bounds { crashes: 1, ..NONE }));
    check(World::saved(Bounds { saves: 1, rivals: 1, ..NONE }));
}

#[test]
fn a_flushed_board_is_restored_with_all_that_came_since() {
    check(World::saved(Bounds { saves: 1, restores: 1, flushes: 1, crashes: 1, ..NONE }));
    check(World::saved(Bounds { saves: 1, restores: 1, flushes: 1, timeouts: 1, ..NONE }));
    check(World::saved(Bounds { saves: 1, restores: 1, flushes: 1, failovers: 1, ..NONE }));
}

#[test]
fn an_older_board_is_raised_and_no_score_counts_twice() {
    check(World::new(Bounds { restores: 1, failovers: 1, ..NONE }));
    check(World::saved(Bounds { saves: 1, restores: 1, failovers: 2, ..NONE }));
}
