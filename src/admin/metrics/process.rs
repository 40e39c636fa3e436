//! What this process counts of its own work.

use std::fmt;
use std::sync::atomic::Ordering;

use tokio::runtime::Handle;

use super::Page;
use crate::event::Reason;
use crate::model::Micros;
use crate::telemetry::{Process, STEPS, Standing, Telemetry};

pub(super) fn write(page: &mut Page<'_>, vitals: &Telemetry, now: Micros) -> fmt::Result {
    process(page, vitals)?;
    consumer(page, vitals)?;
    partitions(page, vitals, now)?;
    page.counter(
        "tallyd_outbox_added",
        "Additions that the outbox's rows brought to Redis.",
        vitals.outbox_added.get(),
    )?;
    page.histogram(
        "tallyd_outbox_lag_seconds",
        "From a row's transaction, by MySQL's clock, to its addition in Redis, by this machine's.",
        &vitals.outbox_lag.get(),
    )?;
    let fullest = vitals.fullest_buckets();
    let fullest = fullest.iter().map(|(kind, most)| ([("kind", kind.as_str())], *most as f64));
    page.gauges("tallyd_bucket_fields", "Fields of the fullest bucket that the last run went through.", fullest)?;
    page.counters("tallyd_connections_opened", "Connections that were opened.", "server", vitals.opened())?;
    page.gauge("tallyd_waits", "How many things fail now and are tried again.", vitals.waits.open().len() as f64)?;
    page.counter("tallyd_waits_begun", "How often something began to fail.", vitals.waits.begun())
}

fn process(page: &mut Page<'_>, vitals: &Telemetry) -> fmt::Result {
    let process = Process::now();
    page.gauge("process_resident_memory_bytes", "Resident memory size in bytes.", process.resident_bytes as f64)?;
    page.counter("process_cpu_seconds", "Total user and system CPU time spent in seconds.", process.cpu_s)?;
    page.gauge("process_open_fds", "Number of open file descriptors.", process.open_fds as f64)?;
    page.gauge("process_max_fds", "Maximum number of open file descriptors.", process.fds_max as f64)?;
    page.gauge("process_threads", "Number of threads.", process.threads as f64)?;
    let tasks = Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    page.gauge("tallyd_tasks", "Tasks within the process that have not ended.", tasks as f64)?;
    let started = vitals.started_at.0 as f64 / 1e6;
    page.gauge("process_start_time_seconds", "Start time of the process since the epoch in seconds.", started)?;
    let version = [([("version", env!("CARGO_PKG_VERSION"))], 1.0)];
    page.gauges("tallyd_build_info", "tallyd's version.", version)?;
    let flag = |flag: bool| f64::from(u8::from(flag));
    let draining = vitals.draining.load(Ordering::Relaxed);
    page.gauge("tallyd_draining", "1 once it was told to stop.", flag(draining))?;
    page.counters("tallyd_reloads", "Reloads of the configuration.", "result", vitals.reloads.get())
}

fn consumer(page: &mut Page<'_>, vitals: &Telemetry) -> fmt::Result {
    page.counter("tallyd_messages_received", "Messages that the broker delivered.", vitals.messages.get())?;
    let redelivered = vitals.redelivered.get();
    page.counter("tallyd_messages_redelivered", "Of those, how many it had delivered before.", redelivered)?;
    page.counters("tallyd_events_received", "Events in messages. A reset is a set.", "type", vitals.received.get())?;
    page.counter(
        "tallyd_events_committed",
        "Events whose effect is in MySQL; of a batch that could not be acknowledged, once more when it comes again.",
        vitals.committed.get(),
    )?;
    let help = "Of the committed ones, how many came down to another event's row, or to a sum.";
    page.counter("tallyd_events_coalesced", help, vitals.coalesced.get())?;
    let letters = vitals.dead_letters();
    let letters = Reason::ALL.map(|reason| (reason.code(), letters.get(reason.code()).copied().unwrap_or(0)));
    page.counters("tallyd_dead_letters", "Messages that were set aside by this process.", "reason", letters)?;
    let dropped = vitals.dropped_dead_letters();
    let dropped = Reason::ALL.map(|reason| (reason.code(), dropped.get(reason.code()).copied().unwrap_or(0)));
    let help = "Of those, how many were only counted: dead letters were at their bound.";
    page.counters("tallyd_dead_letters_dropped", help, "reason", dropped)?;
    page.counters("tallyd_batches", "Batches by why they were closed.", "closed", vitals.batches.get())?;
    page.histogram("tallyd_batch_events", "Events in a batch.", &vitals.batch_events.get())?;
    let steps = STEPS.into_iter().zip(vitals.steps.iter().map(|step| step.get()));
    page.histograms("tallyd_flush_seconds", "Time that each step of writing a batch took.", "step", steps)?;
    page.histogram("tallyd_event_lag_seconds", "From an event's `at` to its commit.", &vitals.lag.get())?;
    page.counters("tallyd_retries", "Batches that were written again, by why.", "code", vitals.retries.get())
}

fn partitions(page: &mut Page<'_>, vitals: &Telemetry, now: Micros) -> fmt::Result {
    let partitions: Vec<_> =
        vitals.partitions().into_iter().map(|(number, partition)| (number.to_string(), partition)).collect();
    let help = "Since the oldest message came here that is not acknowledged.";
    let oldest = partitions.iter().map(|(number, it)| ([("partition", number.as_str())], it.oldest_s(now)));
    page.gauges("tallyd_oldest_unacked_seconds", help, oldest)?;
    let active = partitions.iter().map(|(number, it)| {
        let active = it.standing() == Standing::Writing;
        ([("partition", number.as_str())], f64::from(u8::from(active)))
    });
    page.gauges("tallyd_partition_active", "1 where this process writes the partition.", active)
}
