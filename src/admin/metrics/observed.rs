//! What was seen of the servers, by the observer. What is not known (yet) has no sample, but for servers, which are down.

use std::fmt;

use super::Page;
use crate::config::Config;
use crate::event::Reason;
use crate::model::Micros;
use crate::telemetry::observer::Observed;
use crate::telemetry::status::{Board, Job, Reconciled, Status};
use crate::telemetry::{SERVERS, Telemetry, WaitsFor};

pub(super) fn write(page: &mut Page<'_>, vitals: &Telemetry, config: &Config, seen: &Observed) -> fmt::Result {
    let ready = Status::tell(config, "", vitals, seen, Micros::now()).ready;
    page.gauge("tallyd_ready", "1 while events are written: what /readyz says.", f64::from(u8::from(ready)))?;
    servers(page, seen)?;
    queues(page, seen)?;
    jobs(page, vitals, seen)?;
    reconciles(page, seen)?;
    boards(page, seen)?;
    let Some(letters) = &seen.dead_letters else { return Ok(()) };
    // What another version has set aside may have other reasons.
    let all = Reason::ALL.iter().map(|reason| reason.code()).chain(letters.keys().map(String::as_str));
    let all: std::collections::BTreeSet<&str> = all.collect();
    let open = all.iter().map(|reason| ([("reason", *reason)], letters.get(*reason).copied().unwrap_or(0) as f64));
    page.gauges("tallyd_dead_letters_open", "Dead letters that were not replayed.", open)?;
    let help = "Open dead letters of the fullest partition, by how many it may have: 1 is full.";
    page.gauge("tallyd_dead_letters_full_ratio", help, seen.dead_letters_full.unwrap_or(0.0))
}

fn servers(page: &mut Page<'_>, seen: &Observed) -> fmt::Result {
    let of = |name: &str| seen.servers.iter().find(|server| server.server == name);
    let up = SERVERS.map(|name| ([("server", name)], f64::from(u8::from(of(name).is_some_and(|server| server.up)))));
    page.gauges("tallyd_server_up", "1 where the server answered the last time it was asked.", up)?;
    let took = SERVERS.map(|name| ([("server", name)], of(name).map_or(0.0, |server| server.look_s)));
    page.gauges("tallyd_server_look_seconds", "Time that it took to answer.", took)
}

fn queues(page: &mut Page<'_>, seen: &Observed) -> fmt::Result {
    let queues: Vec<_> = seen.queues.iter().map(|(number, queue)| (number.to_string(), queue)).collect();
    let messages = queues.iter().map(|(number, (messages, _))| ([("partition", number.as_str())], *messages as f64));
    page.gauges("tallyd_queue_messages", "Messages that wait in the partition's queue.", messages)?;
    let consumers = queues.iter().map(|(number, (_, consumers))| ([("partition", number.as_str())], *consumers as f64));
    page.gauges("tallyd_queue_consumers", "Consumers of the partition's queue, over all daemons.", consumers)?;
    if let Some(returned) = seen.returned {
        page.gauge("tallyd_returned_messages", "Messages that the broker has given up on.", returned as f64)?;
    }
    match seen.outbox_rows {
        Some(rows) => page.gauge("tallyd_outbox_rows", "Rows of the outbox that are not in Redis yet.", rows as f64),
        None => Ok(()),
    }
}

fn jobs(page: &mut Page<'_>, vitals: &Telemetry, seen: &Observed) -> fmt::Result {
    let mut of = |name: &str, help: &str, value: fn(&Job) -> f64| {
        let values = seen.jobs.iter().map(|job| ([("job_name", job.job.as_str()), ("mode", &job.mode)], value(job)));
        page.gauges(name, help, values)
    };
    of("tallyd_job_running", "1 while a run is under way, whoever runs it.", |job| {
        f64::from(u8::from(job.running.is_some()))
    })?;
    of("tallyd_job_progress_ratio", "How much of a run in this process is done.", |job| {
        job.running.as_ref().and_then(|run| run.progress).unwrap_or(0.0)
    })?;
    of("tallyd_job_last_success_timestamp_seconds", "When a run was last done; 0 where none ever was.", |job| {
        job.last_success_at.map_or(0.0, |at| at as f64 / 1e6)
    })?;
    of("tallyd_job_last_end_timestamp_seconds", "When the last run ended; 0 where none ever did.", |job| {
        job.last.as_ref().map_or(0.0, |last| last.ended_at as f64 / 1e6)
    })?;
    of("tallyd_job_last_duration_seconds", "How long the last run took.", |job| {
        job.last.as_ref().map_or(0.0, |last| (last.ended_at - last.started_at) as f64 / 1e6)
    })?;
    of("tallyd_job_last_ok", "0 where the last run failed, was refused, or would have changed too much.", |job| {
        f64::from(u8::from(job.last.as_ref().is_none_or(|last| matches!(last.outcome.as_str(), "done" | "stopped"))))
    })?;
    of("tallyd_job_braked", "1 where the last run would have changed too much.", |job| {
        f64::from(u8::from(job.last.as_ref().is_some_and(|last| last.outcome == "braked")))
    })?;
    of("tallyd_job_next_timestamp_seconds", "When it is next due by its schedule; 0 where it has none.", |job| {
        job.next_at.map_or(0.0, |at| at as f64 / 1e6)
    })?;
    let mut names: Vec<&str> = seen.jobs.iter().map(|job| job.job.as_str()).collect();
    names.dedup();
    let waits = names.iter().flat_map(|job| {
        let now = vitals.jobs.get(job).waits.map(|(waits, _)| waits);
        WaitsFor::ALL.map(|for_what| {
            ([("job_name", *job), ("reason", for_what.name())], f64::from(u8::from(now == Some(for_what))))
        })
    });
    page.gauges("tallyd_job_waiting", "1 while a run in this process waits for that.", waits)
}

fn reconciles(page: &mut Page<'_>, seen: &Observed) -> fmt::Result {
    let modes: Vec<&str> = seen.jobs.iter().filter(|job| job.job == "reconcile").map(|job| job.mode.as_str()).collect();
    let mut of = |name: &str, help: &str, value: fn(&Reconciled) -> u64| {
        let values = modes.iter().map(|mode| {
            let run = seen.last_reconciles.iter().find(|run| run.mode == *mode);
            ([("mode", *mode)], run.map_or(0, value) as f64)
        });
        page.gauges(name, help, values)
    };
    of("tallyd_reconcile_checked", "Counters that the last run compared.", |run| run.checked)?;
    of("tallyd_reconcile_drifted", "Of those, how many had drifted.", |run| run.drifted)?;
    of("tallyd_reconcile_repaired", "Of those, how many it repaired.", |run| run.repaired)?;
    of("tallyd_reconcile_transient", "Off at the first look alone: events on the way.", |run| run.transient)?;
    of("tallyd_reconcile_unknown", "In buckets that nobody had loaded.", |run| run.unknown)?;
    of("tallyd_reconcile_busy", "Judged by watching their events.", |run| run.busy)
}

fn boards(page: &mut Page<'_>, seen: &Observed) -> fmt::Result {
    let mut of = |name: &str, help: &str, value: fn(&Board) -> f64| {
        let values = seen.boards.iter().map(|board| ([("board", board.board.as_str())], value(board)));
        page.gauges(name, help, values)
    };
    of("tallyd_board_members", "Members of the current period.", |board| board.members as f64)?;
    of("tallyd_board_end_timestamp_seconds", "When the current period ends; 0 for never.", |board| {
        board.ends_at.map_or(0.0, |at| at as f64 / 1e6)
    })?;
    of("tallyd_board_unarchived_periods", "Periods that are closed, past archive_grace, and not archived.", |board| {
        board.unarchived.len() as f64
    })?;
    of("tallyd_board_oldest_unarchived_timestamp_seconds", "The end of the oldest of them; 0 for none.", |board| {
        board.oldest_unarchived_at.map_or(0.0, |at| at as f64 / 1e6)
    })?;
    of("tallyd_board_lost", "Periods that Redis has lost since their snapshots.", |board| board.lost.len() as f64)?;
    of("tallyd_board_archived_rows", "Rows of the last period that was archived.", |board| {
        board.archived.as_ref().map_or(0.0, |(_, rows)| *rows as f64)
    })
}
