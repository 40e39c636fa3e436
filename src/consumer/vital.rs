//! What a partition notes of its work for those who look at the process: once for each batch.

use std::sync::Arc;
use std::time::Instant;

use super::batch::{Batch, Event};
use crate::model::Micros;
use crate::telemetry::{EventType, PartitionState, Step, seconds_between, telemetry};

/// What was received and not noted yet.
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
    /// One more event.
    pub fn event(&mut self, event: &Event) {
        *match event {
            Event::Like(event) if event.liked => &mut self.likes,
            Event::Like(_) => &mut self.unlikes,
            Event::Count(_) => &mut self.counts,
            Event::Set(_) => &mut self.sets,
        } += 1;
    }

    /// Notes them.
    pub fn note(&mut self) {
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

/// Notes a batch, or a part of one, that is committed as so many rows.
pub(super) fn committed(batch: &Batch, rows: usize) {
    let (now, metrics) = (Micros::now(), &telemetry().consumer);
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

/// Notes that a batch is written again, and why.
pub(super) fn again(code: &'static str) {
    telemetry().consumer.retry(code);
}

/// How long the steps of a transaction took: noted once it is committed.
pub(super) struct Steps {
    last: Instant,
    took: Vec<(Step, f64)>,
}

impl Steps {
    pub fn begin() -> Self {
        Self { last: Instant::now(), took: Vec::with_capacity(8) }
    }

    /// That step ends now.
    pub fn end(&mut self, step: Step) {
        let now = Instant::now();
        self.took.push((step, now.duration_since(self.last).as_secs_f64()));
        self.last = now;
    }

    pub fn note(self) {
        for (step, seconds) in self.took {
            telemetry().consumer.steps.get_or_create(&step).observe(seconds);
        }
    }
}

/// Says when the oldest message came that is not acknowledged.
#[derive(Default)]
pub(super) struct Oldest {
    pub open: Option<Micros>,
    pub writing: Option<Micros>,
}

impl Oldest {
    pub fn note(&self, vitals: &Arc<PartitionState>) {
        vitals.oldest(self.writing.or(self.open));
    }
}
