//! Metrics of the servers, with the values that the observer has read. A metric whose value is unknown has no sample. A
//! server with an unknown state is shown as down.

use std::collections::BTreeSet;

use super::{Row, ScrapedMetrics, flag, instant};
use tallyd_base::config::Config;
use tallyd_base::health::Status;
use tallyd_base::runtime::clock;
use tallyd_base::telemetry::{Board, Job, Label, Observed, ReportedOutcome, Server, Telemetry, WaitsFor};
use tallyd_core::event::Reason;

pub(super) fn register(page: &mut ScrapedMetrics, telemetry: &Telemetry, config: &Config, seen: &Observed) {
    let ready = Status::report(config, "", telemetry, seen, clock::now()).ready;
    page.gauge("tallyd_ready", "1 while the daemon writes events, as /readyz reports", flag(ready));
    let servers: Vec<_> =
        Server::ALL.iter().map(|server| (*server, seen.servers.iter().find(|it| it.server == *server))).collect();
    page.gauges_of_each(
        &servers,
        |(server, _)| [("server", server.name())],
        &[
            ("tallyd_server_up", "1 if the server answered the last check", |(_, it)| {
                Some(flag(it.is_some_and(|it| it.up)))
            }),
            ("tallyd_server_probe_duration_seconds", "Time that the server took to answer", |(_, it)| {
                it.map(|it| it.look_s)
            }),
        ],
    );
    let queues: Vec<_> = seen.queues.iter().collect();
    page.gauges_of_each(
        &queues,
        |(number, _)| [("partition", number.to_string())],
        &[
            (
                "tallyd_queue_messages",
                "Messages in the partition's queue that no daemon has received",
                |(_, (messages, _))| Some(*messages as f64),
            ),
            (
                "tallyd_queue_consumers",
                "Consumers of the partition's queue, over all daemons",
                |(_, (_, consumers))| Some(*consumers as f64),
            ),
        ],
    );
    page.gauges(
        seen,
        &[
            ("tallyd_returned_messages", "Messages in the queue of returned messages", |it| Some(it.returned? as f64)),
            ("tallyd_outbox_rows", "Rows of the outbox whose additions are not in Redis yet", |it| {
                Some(it.outbox_rows? as f64)
            }),
        ],
    );
    page.gauges_of_each(&seen.jobs, |it| [("job_name", &it.job), ("mode", &it.mode)], &JOBS);
    waiting(page, telemetry, seen);
    reconciles(page, seen);
    page.gauges_of_each(&seen.boards, |it| [("board", &it.board)], &BOARDS);
    dead_letters(page, seen);
}

const JOBS: [Row<Job>; 8] = [
    ("tallyd_job_running", "1 while a run is running, in any process", |job| Some(flag(job.running.is_some()))),
    ("tallyd_job_progress_ratio", "Progress of a run in this process, 0 to 1", |job| {
        Some(job.running.as_ref().and_then(|run| run.progress).unwrap_or(0.0))
    }),
    ("tallyd_job_last_success_timestamp_seconds", "When a run last succeeded", |job| instant(job.last_success_at)),
    ("tallyd_job_last_end_timestamp_seconds", "When the last run ended", |job| {
        instant(job.last.as_ref().map(|last| last.ended_at))
    }),
    ("tallyd_job_last_run_duration_seconds", "Duration of the last run", |job| {
        instant(job.last.as_ref().map(|last| last.ended_at - last.started_at))
    }),
    ("tallyd_job_last_run_successful", "0 if the last run failed, was refused, or exceeded a safety limit", |job| {
        job.last.as_ref().map(|last| flag(last.outcome.is_well()))
    }),
    ("tallyd_job_last_run_limit_exceeded", "1 if the last run exceeded a safety limit", |job| {
        job.last.as_ref().map(|last| flag(last.outcome == ReportedOutcome::Braked))
    }),
    ("tallyd_job_next_run_timestamp_seconds", "When the next run is due by the schedule", |job| instant(job.next_at)),
];

const BOARDS: [Row<Board>; 6] = [
    ("tallyd_board_members", "Members of the current period", |board| Some(board.members as f64)),
    ("tallyd_board_end_timestamp_seconds", "When the current period ends", |board| instant(board.ends_at)),
    ("tallyd_board_unarchived_periods", "Finished periods that are past archive_grace and not archived", |board| {
        Some(board.unarchived.len() as f64)
    }),
    ("tallyd_board_oldest_unarchived_timestamp_seconds", "When the oldest unarchived period ended", |board| {
        instant(board.oldest_unarchived_at)
    }),
    ("tallyd_board_lost_periods", "Periods that Redis lost after their snapshots", |board| {
        Some(board.lost.len() as f64)
    }),
    ("tallyd_board_archived_rows", "Rows of the last archived period", |board| {
        board.archived.as_ref().map(|(_, rows)| *rows as f64)
    }),
];

fn waiting(page: &mut ScrapedMetrics, telemetry: &Telemetry, seen: &Observed) {
    let names: BTreeSet<&str> = seen.jobs.iter().map(|job| job.job.as_str()).collect();
    let each = names.iter().flat_map(|job| {
        let now = telemetry.runs.get(job).waits.map(|(waits, _)| waits);
        WaitsFor::ALL.iter().map(move |why| ([("job_name", *job), ("reason", why.name())], flag(now == Some(*why))))
    });
    page.samples("tallyd_job_waiting", "1 while a run in this process waits for the reason in `reason`", each);
}

fn reconciles(page: &mut ScrapedMetrics, seen: &Observed) {
    let last = seen.last_reconciles.iter().flat_map(|run| {
        let verdicts = [
            ("exact", run.exact),
            ("repaired", run.repaired),
            ("drifted", run.drifted.saturating_sub(run.repaired + run.left)),
            ("transient", run.transient),
            ("undecided", run.undecided),
            ("unknown", run.unknown),
            ("left", run.left),
        ];
        verdicts.map(|(verdict, count)| ([("mode", run.mode.as_str()), ("verdict", verdict)], count as f64))
    });
    page.samples("tallyd_reconcile_last_run_targets", "Counters that the last run of any process compared", last);
}

fn dead_letters(page: &mut ScrapedMetrics, seen: &Observed) {
    let Some(letters) = &seen.dead_letters else { return };
    // Dead letters that another version stored can have other reasons.
    let all: BTreeSet<&str> =
        Reason::ALL.iter().map(|reason| reason.code()).chain(letters.keys().map(String::as_str)).collect();
    let open = all.iter().map(|reason| ([("reason", *reason)], letters.get(*reason).copied().unwrap_or(0) as f64));
    page.samples("tallyd_dead_letters_open", "Dead letters that were not replayed", open);
    let help = "Open dead letters of the fullest partition, divided by its limit";
    page.gauge("tallyd_dead_letters_full_ratio", help, seen.dead_letters_full.unwrap_or(0.0));
}
