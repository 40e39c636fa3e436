//! Metrics of the consumer. The consumer updates its metrics once for each batch, not for each message.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::labels::{Close, Code, EventType, Named, Step};
use super::{ConsumerState, LAG_BOUNDS, counter, counters, counters_of_codes, locked, registered, touched};
use tallyd_core::event::Reason;
use tallyd_core::model::Micros;

const STEP_BOUNDS: [f64; 16] =
    [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Histogram buckets for the number of events in a batch. By default, a batch has at most 10,000 events.
const BATCH_BOUNDS: [f64; 12] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0];

const RETRY_CODES: [&str; 5] = ["1213", "1205", "timeout", "connection", "other"];

#[derive(Debug)]
pub struct ConsumerMetrics {
    pub messages: Counter,
    pub redelivered: Counter,
    pub received: Family<EventType, Counter>,
    pub committed: Counter,
    pub coalesced: Counter,
    dead_letters: Family<Code, Counter>,
    dead_letters_dropped: Family<Code, Counter>,
    pub batches: Family<Close, Counter>,
    pub batch_events: Histogram,
    pub steps: Family<Step, Histogram>,
    pub lag: Histogram,
    retries: Family<Code, Counter>,
    takeovers: Family<Named<1>, Counter>,
    partitions: Mutex<BTreeMap<u16, Arc<PartitionState>>>,
}

impl ConsumerMetrics {
    pub(super) fn register(to: &mut Registry) -> Self {
        let reasons = || counters_of_codes("reason", Reason::ALL.iter().map(|reason| reason.code()));
        let steps = Family::new_with_constructor((|| Histogram::new(STEP_BOUNDS)) as fn() -> Histogram);
        let committed = "Events whose effect is in MySQL; a batch that could not be acknowledged is counted again when it is redelivered";
        let coalesced =
            "Committed events that were merged with another event of the same batch (same row, or same counter)";
        let dropped = "Dead letters that were only counted and not stored, because the dead-letter quota was full";
        let retries = counters_of_codes("code", RETRY_CODES.into_iter());
        let takeovers = "How often this process became the partition's writer: at startup, after another daemon, or after a lost connection";
        // The metrics page shows the metrics in this order.
        Self {
            messages: counter(to, "tallyd_messages_received", "Messages that the broker delivered to this process"),
            redelivered: counter(
                to,
                "tallyd_messages_redelivered",
                "Received messages that the broker had delivered before",
            ),
            received: counters(to, "tallyd_events_received", "Events in received messages; a reset counts as a set"),
            committed: counter(to, "tallyd_events_committed", committed),
            coalesced: counter(to, "tallyd_events_coalesced", coalesced),
            dead_letters: registered(to, "tallyd_dead_letters", "Messages that this process dead-lettered", reasons()),
            dead_letters_dropped: registered(to, "tallyd_dead_letters_dropped", dropped, reasons()),
            batches: counters(to, "tallyd_batches", "Batches, by the reason for closing them"),
            batch_events: registered(to, "tallyd_batch_events", "Events in a batch", Histogram::new(BATCH_BOUNDS)),
            lag: registered(
                to,
                "tallyd_event_lag_seconds",
                "Time from an event's `at` to its commit",
                Histogram::new(LAG_BOUNDS),
            ),
            retries: registered(to, "tallyd_batch_retries", "Retries of batch writes, by error", retries),
            steps: registered(
                to,
                "tallyd_batch_write_duration_seconds",
                "Duration of each step of writing a batch",
                touched(steps),
            ),
            takeovers: registered(to, "tallyd_partition_takeovers", takeovers, Family::default()),
            partitions: Mutex::default(),
        }
    }

    pub fn dead_letter(&self, code: &'static str) {
        self.dead_letters.get_or_create(&Code { key: "reason", code }).inc();
    }

    pub fn dead_letter_dropped(&self, code: &'static str) {
        self.dead_letters_dropped.get_or_create(&Code { key: "reason", code }).inc();
    }

    pub fn retry(&self, code: &'static str) {
        self.retries.get_or_create(&Code { key: "code", code }).inc();
    }

    pub fn takeover(&self, partition: u16) {
        self.takeovers.get_or_create(&[("partition", partition.to_string())]).inc();
    }

    pub fn partition(&self, number: u16) -> Arc<PartitionState> {
        drop(self.takeovers.get_or_create(&[("partition", number.to_string())]));
        Arc::clone(locked(&self.partitions).entry(number).or_default())
    }

    pub fn partitions(&self) -> Vec<(u16, Arc<PartitionState>)> {
        locked(&self.partitions).iter().map(|(number, it)| (*number, Arc::clone(it))).collect()
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Unacked {
    pub messages: u64,
    /// Arrival time of the oldest one.
    pub oldest: Option<Micros>,
}

#[derive(Debug, Default)]
pub struct PartitionState {
    state: Mutex<ConsumerState>,
    unacked: Mutex<Unacked>,
}

impl PartitionState {
    pub fn set_state(&self, state: ConsumerState) {
        *locked(&self.state) = state;
    }

    /// Records that a batch was written. If the session has ended meanwhile, `state` must not change. So only
    /// `Listening` becomes `Writing`.
    pub fn writes(&self) {
        let mut state = locked(&self.state);
        if *state == ConsumerState::Listening {
            *state = ConsumerState::Writing;
        }
    }

    pub fn state(&self) -> ConsumerState {
        *locked(&self.state)
    }

    pub fn set_unacked(&self, unacked: Unacked) {
        *locked(&self.unacked) = unacked;
    }

    pub fn unacked_messages(&self) -> u64 {
        locked(&self.unacked).messages
    }

    /// Seconds since the oldest unacknowledged message arrived, or 0 if there is none.
    pub fn oldest_s(&self, now: Micros) -> f64 {
        locked(&self.unacked).oldest.map_or(0.0, |came| super::seconds_between(came, now))
    }
}
