//! Simulates how partitions, their queues, batches and connections process events on a number of cores.
//!
//! Each partition has three steps. RabbitMQ's queue delivers events up to the prefetch, the consumer adds them to the
//! open batch, and one connection to MySQL writes a batch while the next batch fills. Each step is one thread. If there
//! are at least as many cores as active threads, each thread has a core. If there are fewer cores, the active threads
//! share the cores equally. Several threads accept published events. Time advances in steps of [`STEP_US`].

use std::collections::VecDeque;

/// Length of a step, in microseconds.
const STEP_US: f64 = 100.0;

/// The simulated time before the model counts anything (warm-up), in microseconds. After the warm-up, queues and
/// batches have their normal size.
const WARM_UP_US: f64 = 1e6;

/// The number of threads that accept published events for one partition. There are several, because many clients are
/// connected.
const PUBLISHING_THREADS: usize = 4;

/// The costs of the parts. A cost is in microseconds of one core, unless stated otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Costs {
    /// RabbitMQ's cost of accepting an event with a confirm.
    pub publish: f64,
    /// RabbitMQ's cost of delivering an event and handling its acknowledgement.
    pub deliver: f64,
    /// The daemon's cost of an event.
    pub consume: f64,
    /// MySQL's cost of each event in a batch.
    pub row: f64,
    /// MySQL's cost of a batch, without the cost of its events.
    pub batch: f64,
    /// During the write of a batch, the connection waits for this time per event. No core is busy during this wait.
    pub row_wait: f64,
    /// During the write of a batch, the connection also waits for this time once, because of the disk.
    pub batch_wait: f64,
}

/// The cores that RabbitMQ, the daemons and MySQL can use.
#[derive(Clone, Copy, Debug)]
pub enum Cores {
    /// One machine with this number of cores, shared by all parts.
    Shared(f64),
    /// Separate machines.
    Own { rabbitmq: f64, daemons: f64, mysql: f64 },
}

#[derive(Clone, Copy, Debug)]
pub struct Site {
    pub costs: Costs,
    pub cores: Cores,
    pub partitions: usize,
    pub batch_events_max: f64,
    pub prefetch: f64,
    pub linger_us: f64,
    /// Published events a second. `None` if the queues are full from the beginning.
    pub arrivals: Option<f64>,
    /// Duration in seconds, after the warm-up.
    pub seconds: f64,
}

/// The result.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub events_per_second: f64,
    pub events_per_batch: f64,
    /// Time from publishing to commit, in milliseconds. This time is measured only if events arrive during the
    /// simulation.
    pub lag_p50_ms: f64,
    pub lag_p99_ms: f64,
}

/// Where a thread runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Publish,
    Deliver,
    Consume,
    Write,
}

/// A batch that is being written.
struct Writing {
    events: f64,
    work_us: f64,
    wait_us: f64,
}

#[derive(Default)]
struct Partition {
    /// Events that are published, but not accepted by the broker yet.
    arriving: f64,
    queued: f64,
    /// Events that are delivered to the consumer, but not in a batch yet.
    delivered: f64,
    open: f64,
    wrote_at: f64,
    writing: Option<Writing>,
    /// Uncommitted events: their arrival time and their count.
    arrived: VecDeque<(f64, f64)>,
}

impl Partition {
    fn wants(&self, role: Role, site: &Site) -> bool {
        match role {
            Role::Publish => self.arriving > 0.0,
            Role::Deliver => self.queued > 0.0 && self.credit(site) > 0.0,
            Role::Consume => self.delivered > 0.0 && self.open < site.batch_events_max,
            Role::Write => self.writing.as_ref().is_some_and(|writing| writing.work_us > 0.0),
        }
    }

    /// Returns the number of further events that the prefetch allows.
    fn credit(&self, site: &Site) -> f64 {
        let writing = self.writing.as_ref().map_or(0.0, |writing| writing.events);
        site.prefetch - self.delivered - self.open - writing
    }

    /// Uses `us` microseconds of a core's time.
    fn work(&mut self, role: Role, us: f64, site: &Site) {
        let done = |us: f64, cost: f64| if cost > 0.0 { us / cost } else { f64::INFINITY };
        match role {
            Role::Publish => {
                let events = done(us, site.costs.publish).min(self.arriving);
                self.arriving -= events;
                self.queued += events;
            }
            Role::Deliver => {
                let events = done(us, site.costs.deliver).min(self.queued).min(self.credit(site));
                self.queued -= events;
                self.delivered += events;
            }
            Role::Consume => {
                let room = site.batch_events_max - self.open;
                let events = done(us, site.costs.consume).min(self.delivered).min(room);
                self.delivered -= events;
                self.open += events;
            }
            Role::Write => {
                if let Some(writing) = &mut self.writing {
                    writing.work_us -= us;
                }
            }
        }
    }

    /// Begins to write the open batch if no other batch is being written, and the open batch is full or the last one began
    /// longer ago than the linger time.
    fn begin_writing(&mut self, now: f64, site: &Site) {
        let is_full = self.open >= site.batch_events_max - 0.5;
        let has_lingered = self.open >= 1.0 && now - self.wrote_at >= site.linger_us;
        if self.writing.is_some() || !(is_full || has_lingered) {
            return;
        }
        self.wrote_at = now;
        let (events, costs) = (std::mem::take(&mut self.open), &site.costs);
        self.writing = Some(Writing {
            events,
            work_us: costs.batch + costs.row * events,
            wait_us: costs.batch_wait + costs.row_wait * events,
        });
    }

    /// Returns the events of the batch that was just committed, if there is one.
    fn end_writing(&mut self) -> Option<f64> {
        let writing = self.writing.as_mut()?;
        if writing.work_us > 0.0 {
            return None;
        }
        writing.wait_us -= STEP_US;
        let (events, is_through) = (writing.events, writing.wait_us <= 0.0);
        is_through.then(|| {
            self.writing = None;
            events
        })
    }
}

/// Counts commits after the warm-up.
#[derive(Default)]
struct Count {
    events: f64,
    batches: f64,
    lags: Vec<(f64, f64)>,
}

pub fn simulate(site: &Site) -> Outcome {
    let mut partitions: Vec<Partition> = (0..site.partitions).map(|_| Partition::default()).collect();
    let mut count = Count::default();
    let steps = ((WARM_UP_US + site.seconds * 1e6) / STEP_US) as u64;
    for step in 0..steps {
        let now = step as f64 * STEP_US;
        for partition in &mut partitions {
            arrive(partition, now, site);
        }
        share(&mut partitions, site);
        for partition in &mut partitions {
            partition.begin_writing(now, site);
            if let Some(events) = partition.end_writing() {
                commit(partition, events, now, &mut count);
            }
        }
    }
    outcome(site, count)
}

fn arrive(partition: &mut Partition, now: f64, site: &Site) {
    let Some(arrivals) = site.arrivals else {
        partition.queued = f64::INFINITY;
        return;
    };
    let events = arrivals * STEP_US / 1e6 / site.partitions as f64;
    partition.arriving += events;
    partition.arrived.push_back((now, events));
}

/// Divides each pool of cores equally among the active threads that use this pool.
fn share(partitions: &mut [Partition], site: &Site) {
    let pools: Vec<(f64, &[Role])> = match site.cores {
        Cores::Shared(cores) => vec![(cores, &[Role::Publish, Role::Deliver, Role::Consume, Role::Write])],
        Cores::Own { rabbitmq, daemons, mysql } => {
            vec![(rabbitmq, &[Role::Publish, Role::Deliver]), (daemons, &[Role::Consume]), (mysql, &[Role::Write])]
        }
    };
    for (cores, roles) in pools {
        let mut threads = Vec::new();
        for (place, partition) in partitions.iter().enumerate() {
            for role in roles.iter().filter(|role| partition.wants(**role, site)) {
                let threads_of_role = if *role == Role::Publish { PUBLISHING_THREADS } else { 1 };
                threads.extend(std::iter::repeat_n((place, *role), threads_of_role));
            }
        }
        let us = STEP_US * (cores / threads.len().max(1) as f64).min(1.0);
        for (place, role) in threads {
            if let Some(partition) = partitions.get_mut(place) {
                partition.work(role, us, site);
            }
        }
    }
}

fn commit(partition: &mut Partition, events: f64, now: f64, count: &mut Count) {
    let is_counted = now >= WARM_UP_US;
    if is_counted {
        count.events += events;
        count.batches += 1.0;
    }
    let mut left = events;
    while left > 0.0 {
        let Some((at, waiting)) = partition.arrived.front_mut() else { break };
        let taken = left.min(*waiting);
        if is_counted {
            count.lags.push(((now + STEP_US - *at) / 1e3, taken));
        }
        *waiting -= taken;
        left -= taken;
        if *waiting <= 0.0 {
            partition.arrived.pop_front();
        }
    }
}

fn outcome(site: &Site, mut count: Count) -> Outcome {
    count.lags.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let all: f64 = count.lags.iter().map(|(_, events)| events).sum();
    let quantile = |part: f64| {
        let mut sum = 0.0;
        let found = count.lags.iter().find(|(_, events)| {
            sum += events;
            sum >= part * all
        });
        found.map_or(f64::NAN, |(lag, _)| *lag)
    };
    Outcome {
        events_per_second: count.events / site.seconds,
        events_per_batch: count.events / count.batches.max(1.0),
        lag_p50_ms: quantile(0.5),
        lag_p99_ms: quantile(0.99),
    }
}
