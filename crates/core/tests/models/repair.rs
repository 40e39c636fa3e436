//! One counter that API servers count in Redis: clicks are counted, published and committed, while runs measure and
//! repair the counter. A run can freeze at any step, and then another run takes over. Every order of these steps,
//! within the bounds of [`Bounds`].
//!
//! Each repair must move the counter towards the value that was right at the run's sample, and not beyond.

use std::time::Duration;

use stateright::Property;
use tallyd_core::drift::{Judgement, Sample, Truth, judge};
use tallyd_core::layout::Loaded;
use tallyd_core::model::Micros;
use tallyd_core::outbox::OutboxOffsets;
use tallyd_core::repair_limits::{Decision, decide};

use crate::{Following, size};

/// A click is published within this time after it was counted (`publish_grace`).
const GRACE: i64 = 2;

/// A run holds its lock for this time.
const LEASE: i64 = 3;

/// A repair must be made within this time after it was recorded.
const WITHIN: i64 = LEASE - 1;

const CLICKS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bounds {
    clicks: usize,
    runs: u8,
    /// The last instant.
    end: i64,
    /// The highest difference between the clocks of Redis and of the API servers.
    skew: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Click {
    #[default]
    None,
    /// Redis has counted the click at this time of the API server's clock. A lost click is never published.
    Counted {
        at: i64,
        counted_at: i64,
        is_lost: bool,
    },
    Published {
        at: i64,
    },
    Committed {
        at: i64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Counter {
    value: i64,
    /// The number of the last repair.
    pass: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Sampled {
    held: Counter,
    cut: i64,
    /// The lost clicks before the cut. No run knows them.
    lost: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Script {
    expected: u64,
    pass: u64,
    delta: i64,
    until: i64,
    lost: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Samples,
    /// The fence is sent `grace` after the sample.
    Fences(Sampled),
    /// The run waits until these clicks are committed.
    Waits(Sampled, [bool; CLICKS]),
    /// The run has planned a repair, and records it.
    Notes(Script),
    Repairs(Script),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Run {
    number: u8,
    earlier: Option<i64>,
    /// Whether there was a measurement before. All later measurements wait for the grace.
    is_again: bool,
    step: Step,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    left: Bounds,
    now: i64,
    clicks: [Click; CLICKS],
    redis: Counter,
    passes: u64,
    /// The holder of the lock, and the end of its lease.
    lock: (u8, i64),
    runs: [Option<Run>; 2],
    /// A script that timed out. It runs later.
    late: Option<Script>,
    repairs: u8,
    is_wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    Ticks,
    Counts { click: usize, is_lost: bool, skew: i64 },
    Publishes(usize),
    Commits(usize),
    RunBegins,
    Runs(usize),
    TimesOut(usize),
    RunsLate,
}

impl Counter {
    fn sample(self, cut: i64) -> Sample {
        let loaded = Loaded::Yes { generation: 1, pass: self.pass };
        Sample { value: self.value, cut: Micros(cut), loaded, offsets: OutboxOffsets::default() }
    }
}

impl World {
    fn new(left: Bounds, drift: i64) -> Self {
        Self {
            left,
            now: 1,
            clicks: Default::default(),
            redis: Counter { value: drift, pass: 0 },
            passes: 0,
            lock: (0, 0),
            runs: [None; 2],
            late: None,
            repairs: 0,
            is_wrong: false,
        }
    }

    fn truth(&self) -> Truth {
        let committed = self.clicks.iter().filter_map(|click| match click {
            Click::Committed { at } => Some(*at),
            _ => None,
        });
        let counted = committed.clone().count() as i64;
        Truth { counted, rows: None, update_at: committed.max().map(Micros) }
    }

    fn lost(&self) -> i64 {
        self.clicks.iter().filter(|click| matches!(click, Click::Counted { is_lost: true, .. })).count() as i64
    }

    /// Redis' value minus its right value: the clicks that are not lost.
    fn error(&self) -> i64 {
        let counted = self.clicks.iter().filter(|click| **click != Click::None).count() as i64;
        self.redis.value - (counted - self.lost())
    }

    fn can_tick(&self) -> bool {
        let must_publish = |click: &Click| matches!(*click, Click::Counted { counted_at, is_lost: false, .. } if counted_at + GRACE <= self.now + 1);
        self.now < self.left.end && !self.clicks.iter().any(must_publish)
    }

    fn is_ready(&self, run: &Run) -> bool {
        match run.step {
            Step::Samples => self.can_tick(),
            Step::Fences(Sampled { cut, .. }) => !run.is_again || self.now >= cut + GRACE,
            Step::Waits(_, clicks) => {
                let is_committed = |click: usize| matches!(self.clicks[click], Click::Committed { .. });
                (0..CLICKS).all(|click| !clicks[click] || is_committed(click))
            }
            _ => true,
        }
    }

    /// One step of a run. Returns `None` at its end.
    fn runs(&mut self, run: Run) -> Option<Run> {
        let step = match run.step {
            Step::Samples => {
                let of = Sampled { held: self.redis, cut: self.now, lost: self.lost() };
                // Redis dates no later click with the same microsecond.
                self.now += 1;
                Step::Fences(of)
            }
            Step::Fences(of) => Step::Waits(
                of,
                self.clicks.map(|click| matches!(click, Click::Published { .. } | Click::Committed { .. })),
            ),
            Step::Waits(of, _) => {
                let skew = Duration::from_micros(self.left.skew.unsigned_abs());
                let newest = judge(&of.held.sample(of.cut), Some(&self.truth()), skew);
                match decide(run.earlier.map(Judgement::Drift), newest) {
                    Decision::Busy if run.is_again => return None,
                    Decision::Busy => return Some(Run { is_again: true, step: Step::Samples, ..run }),
                    Decision::Exact | Decision::Confirmed(0) => return None,
                    Decision::Suspect => {
                        let Judgement::Drift(drift) = newest else { return None };
                        return Some(Run { earlier: Some(drift), is_again: true, step: Step::Samples, ..run });
                    }
                    Decision::Confirmed(delta) => {
                        self.passes += 1;
                        let (expected, pass) = (of.held.pass, self.passes);
                        Step::Notes(Script { expected, pass, delta, until: self.now + WITHIN, lost: of.lost })
                    }
                }
            }
            Step::Notes(script) => {
                if self.lock.0 != run.number {
                    return None;
                }
                self.lock.1 = self.now + LEASE;
                Step::Repairs(script)
            }
            Step::Repairs(script) => {
                self.repairs(script);
                return None;
            }
        };
        Some(Run { step, ..run })
    }

    /// The script repair.lua.
    fn repairs(&mut self, Script { expected, pass, delta, until, lost }: Script) {
        if self.redis.pass != expected || self.now > until {
            return;
        }
        // Clicks that were lost after the sample are found later.
        let error = self.error() - (self.lost() - lost);
        self.is_wrong |= error.signum() * delta.signum() != -1 || delta.abs() > error.abs();
        self.redis = Counter { value: self.redis.value + delta, pass };
        self.repairs += 1;
    }
}

impl crate::World for World {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        if self.can_tick() {
            events.push(Event::Ticks);
        }
        for (click, state) in self.clicks[..self.left.clicks].iter().enumerate() {
            match state {
                // The clicks are alike, so they are counted in their order.
                Click::None if self.clicks[..click].iter().all(|earlier| *earlier != Click::None) => {
                    for skew in -self.left.skew..=self.left.skew {
                        events.extend([true, false].map(|is_lost| Event::Counts { click, is_lost, skew }));
                    }
                }
                Click::Counted { is_lost: false, .. } => events.push(Event::Publishes(click)),
                Click::Published { .. } => events.push(Event::Commits(click)),
                _ => {}
            }
        }
        if self.left.runs > 0 && self.lock.1 <= self.now && self.runs.contains(&None) {
            events.push(Event::RunBegins);
        }
        for (place, run) in self.runs.iter().enumerate() {
            let Some(run) = run else { continue };
            events.extend(self.is_ready(run).then_some(Event::Runs(place)));
            events.extend(matches!(run.step, Step::Repairs(_)).then_some(Event::TimesOut(place)));
        }
        events.extend(self.late.map(|_| Event::RunsLate));
        events
    }

    fn does(&mut self, event: Event) {
        match event {
            Event::Ticks => self.now += 1,
            Event::Counts { click, is_lost, skew } => {
                self.redis.value += 1;
                self.clicks[click] = Click::Counted { at: self.now + skew, counted_at: self.now, is_lost };
            }
            Event::Publishes(click) => {
                if let Click::Counted { at, .. } = self.clicks[click] {
                    self.clicks[click] = Click::Published { at };
                }
            }
            Event::Commits(click) => {
                if let Click::Published { at } = self.clicks[click] {
                    self.clicks[click] = Click::Committed { at };
                }
            }
            Event::RunBegins => {
                self.left.runs -= 1;
                let number = self.lock.0 + 1;
                self.lock = (number, self.now + LEASE);
                let free = self.runs.iter().position(Option::is_none).unwrap_or_default();
                self.runs[free] = Some(Run { number, earlier: None, is_again: false, step: Step::Samples });
            }
            Event::Runs(place) => self.runs[place] = self.runs[place].and_then(|run| self.runs(run)),
            Event::TimesOut(place) => {
                if let Some(Run { step: Step::Repairs(script), .. }) = self.runs[place].take() {
                    self.late = Some(script);
                }
            }
            Event::RunsLate => {
                if let Some(script) = self.late.take() {
                    self.repairs(script);
                }
            }
        }
    }

    fn properties() -> Vec<Property<Following<Self>>> {
        vec![
            Property::always("a repair does not go too far", |_, world: &World| !world.is_wrong),
            Property::sometimes("a repair makes a counter right", |_, world: &World| {
                world.repairs > 0 && world.error() == 0
            }),
            Property::sometimes("a second run takes over", |_, world: &World| {
                world.left.runs + world.lock.0 < 2 || world.runs.iter().all(Option::is_some)
            }),
        ]
    }
}

fn check(bounds: Bounds) {
    crate::check(&bounds, [-1, 0, 1].map(|drift| World::new(bounds, drift)).into());
}

#[test]
fn a_repair_of_a_counter_of_api_servers_never_goes_too_far() {
    check(Bounds { clicks: 2, runs: 1, end: size(6, 8), skew: 1 });
    check(Bounds { clicks: size(1, 2), runs: 2, end: 9, skew: 0 });
}
