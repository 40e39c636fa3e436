//! A run that loads a lost bucket, or measures and repairs a bucket. Only one run has the lock.

use tallyd_core::drift::{Judgement, Sample, Truth, judge_waiting};
use tallyd_core::layout::Loaded;
use tallyd_core::model::{Micros, TargetId};
use tallyd_core::outbox::{OutboxLag, OutboxOffsets};
use tallyd_core::touched::Touched;

use super::{Bucket, MySql, State, World, key, offsets};

/// A sample of a bucket, and what was read before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sampled {
    pub bucket: usize,
    pub applied: u64,
    pub held: Bucket,
}

/// The next step of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Run {
    /// The load has read the last row of the outbox.
    LoadBegun {
        outbox: u64,
    },
    /// The load has read a bucket.
    LoadHeld {
        outbox: u64,
        bucket: usize,
        held: Bucket,
    },
    /// The load must measure the bucket.
    LoadMeasures {
        outbox: u64,
        bucket: usize,
    },
    LoadSampled {
        outbox: u64,
        of: Sampled,
    },
    /// The run adds the amount if the bucket is as it was, and ends the load.
    Adds {
        of: Sampled,
        amount: i64,
        loads: bool,
    },
    /// The load has added everything.
    LoadEnds {
        bucket: usize,
    },
    /// A measurement has read how far the outbox was added.
    Measures {
        bucket: usize,
        applied: u64,
    },
    Sampled(Sampled),
}

impl MySql {
    /// Reads the rows that a sample can lack.
    fn lag(&self, applied: u64, bucket: usize, held: &OutboxOffsets) -> OutboxLag {
        let mut lag = OutboxLag::after(offsets(applied));
        for row in self.rows.iter().filter(|row| row.number > applied) {
            lag.note(&row.read(), |number| Some(held).filter(|_| number == key(bucket)));
        }
        lag
    }
}

impl World {
    /// One step of the run.
    pub fn runs(&mut self) {
        let Some(run) = self.run.take() else { return };
        self.run = match run {
            Run::LoadBegun { outbox } => {
                let bucket = self.redis.iter().position(|bucket| !matches!(bucket.state, State::Yes(_)));
                bucket.map(|bucket| {
                    let held = self.redis[bucket];
                    // The script load.lua.
                    self.redis[bucket] = Bucket { state: State::Loading(0), mark: held.mark.max(outbox), ..held };
                    Run::LoadHeld { outbox, bucket, held }
                })
            }
            Run::LoadHeld { outbox, bucket, held } => {
                // A page is one snapshot: the counter, and the rows after those that the load includes.
                let mut touched = Touched::none_after(offsets(outbox));
                touched.note(TargetId(0), &self.mysql.lag(outbox, bucket, &OutboxOffsets::default()));
                Some(if touched.has(key(bucket)) {
                    Run::LoadMeasures { outbox, bucket }
                } else {
                    let amount = self.mysql.counters[bucket] - held.value;
                    let of = Sampled { bucket, applied: outbox, held: Bucket { state: State::Loading(0), ..held } };
                    Run::Adds { of, amount, loads: true }
                })
            }
            Run::LoadMeasures { outbox, bucket } => {
                let applied = self.mysql.applied.max(outbox);
                matches!(self.redis[bucket].state, State::Loading(_))
                    .then(|| Run::LoadSampled { outbox, of: Sampled { bucket, applied, held: self.redis[bucket] } })
            }
            Run::LoadSampled { of, .. } => self.judged(of).map(|amount| Run::Adds { of, amount, loads: true }),
            Run::Measures { bucket, applied } => matches!(self.redis[bucket].state, State::Yes(_))
                .then(|| Run::Sampled(Sampled { bucket, applied, held: self.redis[bucket] })),
            Run::Sampled(of) => {
                let amount = self.judged(of).filter(|amount| *amount != 0);
                self.is_wrong |= amount.is_some() && !self.went_back;
                amount.map(|amount| Run::Adds { of, amount, loads: false })
            }
            Run::Adds { of, amount, loads } => self.adds(of, amount, loads),
            Run::LoadEnds { bucket } => {
                if let State::Loading(pass) = self.redis[bucket].state {
                    self.redis[bucket].state = State::Yes(pass);
                }
                None
            }
        };
    }

    /// Returns the amount that a sample lacks.
    fn judged(&self, Sampled { bucket, applied, held }: Sampled) -> Option<i64> {
        let held_offsets = offsets(held.mark);
        let lag = self.mysql.lag(applied, bucket, &held_offsets);
        let sample = Sample { value: held.value, cut: Micros(0), loaded: Loaded::No, offsets: held_offsets.clone() };
        let truth = Truth { counted: self.mysql.counters[bucket], ..Truth::default() };
        match judge_waiting(&sample, Some(truth), lag.of(key(bucket), &held_offsets)) {
            Judgement::Drift(drift) => Some(-drift),
            Judgement::Busy => None,
        }
    }

    /// The script repair.lua.
    fn adds(&mut self, of: Sampled, amount: i64, loads: bool) -> Option<Run> {
        let bucket = &mut self.redis[of.bucket];
        if bucket.state != of.held.state {
            return None;
        }
        bucket.value += amount;
        bucket.state = match bucket.state {
            State::Loading(pass) => State::Loading(pass + 1),
            State::Yes(pass) => State::Yes(pass + 1),
            State::Unknown => State::Unknown,
        };
        loads.then_some(Run::LoadEnds { bucket: of.bucket })
    }
}
