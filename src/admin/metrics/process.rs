//! Metrics of this process whose values are read at each request. The counters of this process are in [`Telemetry`].

use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use tokio::runtime::Handle;

use super::{Row, ScrapedMetrics, flag};
use tallyd_base::runtime::log;
use tallyd_base::runtime::waits::waits;
use tallyd_base::telemetry::{ConsumerState, Named, Process, Server, Telemetry, seconds};
use tallyd_base::version;
use tallyd_connect::opened::OPENED;
use tallyd_core::control::{Command, Task};
use tallyd_core::model::Micros;

pub(super) fn register(page: &mut ScrapedMetrics, telemetry: &Telemetry, now: Micros) {
    let process = Process::now();
    page.gauge("process_resident_memory_bytes", "Resident memory size in bytes", process.resident_bytes as f64);
    let help = "Total user and system CPU time spent in seconds";
    page.0.register("process_cpu_seconds", help, ConstCounter::new(process.cpu_s));
    page.gauges(&process, &PROCESS);
    let tasks = Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    page.gauge("tallyd_tasks", "Running tasks in the process", tasks as f64);
    let started = seconds(telemetry.started_at);
    page.gauge("process_start_time_seconds", "Start time of the process since the epoch in seconds", started);
    let build = [
        ("version", version::VERSION),
        ("revision", version::REVISION),
        ("rustc", version::RUSTC),
        ("target", version::TARGET),
    ];
    page.samples("tallyd_build_info", "Version, commit, compiler and target of the program", [(build, 1.0)]);
    paused(page, telemetry);
    page.0.register("tallyd_log_messages", "Logged lines", log_messages());
    partitions(page, telemetry, now);
    page.0.register("tallyd_connections_opened", "Opened connections", connections_opened());
    let help = "Operations that are failing and being retried";
    page.gauge("tallyd_retrying_operations", help, waits().open().len() as f64);
    let help = "Operations that failed and were retried, each counted once";
    page.0.register("tallyd_retried_operations", help, ConstCounter::new(waits().begun()));
}

const PROCESS: [Row<Process>; 3] = [
    ("process_open_fds", "Number of open file descriptors", |it| Some(it.open_fds as f64)),
    ("process_max_fds", "Maximum number of open file descriptors", |it| Some(it.fds_max as f64)),
    ("process_threads", "Number of threads", |it| Some(it.threads as f64)),
];

fn paused(page: &mut ScrapedMetrics, telemetry: &Telemetry) {
    let orders = telemetry.orders();
    let is_paused = |task| orders.iter().any(|it| it.task == task && it.command == Command::Pause);
    let tasks = Task::ALL.map(|task| ([("task", task.name())], flag(is_paused(task))));
    page.samples("tallyd_paused", "1 while an operator's order pauses the task in all daemons", tasks);
}

fn partitions(page: &mut ScrapedMetrics, telemetry: &Telemetry, now: Micros) {
    let all: Vec<_> = telemetry.consumer.partitions().into_iter().map(|(number, it)| (number, it, now)).collect();
    page.gauges_of_each(
        &all,
        |(number, ..)| [("partition", number.to_string())],
        &[
            (
                "tallyd_oldest_unacked_age_seconds",
                "Age of the oldest unacknowledged message in this process; 0 if there is none",
                |(_, it, now)| Some(it.oldest_s(*now)),
            ),
            ("tallyd_held_messages", "Messages that this process has received and not acknowledged", |(_, it, _)| {
                Some(it.unacked_messages() as f64)
            }),
            ("tallyd_partition_active", "1 if this process writes the partition", |(_, it, _)| {
                Some(flag(it.state() == ConsumerState::Writing))
            }),
        ],
    );
}

fn connections_opened() -> Family<Server, Counter> {
    let opened = Family::<Server, Counter>::default();
    for (server, connections) in
        [(Server::Mysql, &OPENED.mysql), (Server::Redis, &OPENED.redis), (Server::Rabbitmq, &OPENED.rabbitmq)]
    {
        opened.get_or_create(&server).inc_by(connections.get());
    }
    opened
}

fn log_messages() -> Family<Named<1>, Counter> {
    let messages = Family::<Named<1>, Counter>::default();
    for (level, count) in log::logged() {
        messages.get_or_create(&[("level", level.as_str().to_ascii_lowercase())]).inc_by(count);
    }
    messages
}
