//! Counts a partition's work. The counts are added to the metrics once per batch, and logged once a minute.

use std::time::{Duration, Instant};

use tracing::info;

use super::batch::{Batch, Event};
use tallyd_base::runtime::clock;
use tallyd_base::telemetry::{EventType, PartitionState, Step, Unacked, seconds_between, telemetry};

const LOG_EVERY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReceivedCounts {
    pub messages: u64,
    pub redelivered: u64,
    likes: u64,
    unlikes: u64,
    counts: u64,
    sets: u64,
}

impl ReceivedCounts {
    pub(super) fn event(&mut self, event: &Event) {
        *match event {
            Event::Like(event) if event.liked => &mut self.likes,
            Event::Like(_) => &mut self.unlikes,
            Event::Count(_) => &mut self.counts,
            Event::Set(_) => &mut self.sets,
        } += 1;
    }

    pub(super) fn note(&mut self) {
        let Self { messages, redelivered, likes, unlikes, counts, sets } = std::mem::take(self);
        let metrics = &telemetry().consumer;
        metrics.messages.inc_by(messages);
        metrics.redelivered.inc_by(redelivered);
        let types = [EventType::Like, EventType::Unlike, EventType::Count, EventType::Set];
        for (of, events) in types.iter().zip([likes, unlikes, counts, sets]) {
            metrics.received.get_or_create(of).inc_by(events);
        }
    }
}

pub(super) fn committed(batch: &Batch, rows: usize) {
    let (now, metrics) = (clock::now(), &telemetry().consumer);
    let events = batch.events.len() as u64;
    metrics.committed.inc_by(events);
    metrics.coalesced.inc_by(events.saturating_sub(rows as u64));
    metrics.batch_events.observe(events as f64);
    for received in &batch.events {
        metrics.lag.observe(seconds_between(received.event.at(), now));
    }
    for letter in &batch.refused {
        metrics.dead_letter(letter.reason);
    }
}

pub(super) fn again(code: &'static str) {
    telemetry().consumer.retry(code);
}

pub(super) struct Steps {
    last: Instant,
    took: Vec<(Step, f64)>,
}

impl Default for Steps {
    fn default() -> Self {
        Self { last: Instant::now(), took: Vec::with_capacity(8) }
    }
}

impl Steps {
    pub(super) fn begin(&mut self) {
        self.last = Instant::now();
        self.took.clear();
    }

    pub(super) fn end(&mut self, step: Step) {
        let now = Instant::now();
        self.took.push((step, now.duration_since(self.last).as_secs_f64()));
        self.last = now;
    }

    pub(super) fn note(&mut self) {
        for (step, seconds) in self.took.drain(..) {
            telemetry().consumer.steps.get_or_create(&step).observe(seconds);
        }
    }
}

#[derive(Default)]
pub(super) struct InBatches {
    pub open: Unacked,
    pub writing: Unacked,
}

impl InBatches {
    pub(super) fn note(&self, more: usize, partition_state: &PartitionState) {
        let Self { open, writing } = self;
        let messages = open.messages + writing.messages + more as u64;
        partition_state.set_unacked(Unacked { messages, oldest: writing.oldest.or(open.oldest) });
    }
}

/// The counts since the last log line. A log line is written once a minute while messages arrive.
#[derive(Default)]
pub(super) struct Throughput {
    logged: Option<Instant>,
    batches: u64,
    events: u64,
    rows: u64,
}

impl Throughput {
    pub(super) fn note(&mut self, partition: u16, batch: &Batch, rows: usize) {
        self.batches += 1;
        self.events += batch.events.len() as u64;
        self.rows += rows as u64;
        self.log(partition, Instant::now());
    }

    fn log(&mut self, partition: u16, now: Instant) {
        let since = *self.logged.get_or_insert(now);
        if now.duration_since(since) < LOG_EVERY {
            return;
        }
        let Self { batches, events, rows, .. } = *self;
        let seconds = now.duration_since(since).as_secs();
        info!(
            event = "consumed",
            partition,
            events,
            batches,
            rows,
            seconds,
            "{events} events in {batches} batches became {rows} rows in {seconds} s"
        );
        *self = Self { logged: Some(now), ..Self::default() };
    }
}
