//! Metrics of this process whose values are read at each request. The counters of this process are in [`Telemetry`].

use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use tokio::runtime::Handle;

use super::{Page, flag};
use tallyd_base::runtime::log;
use tallyd_base::runtime::waits::waits;
use tallyd_base::telemetry::{Named, Process, Server, Standing, Telemetry, seconds};
use tallyd_base::version;
use tallyd_connect::opened::OPENED;
use tallyd_core::control::{Command, Task};
use tallyd_core::model::Micros;

pub(super) fn register(page: &mut Page, telemetry: &Telemetry, now: Micros) {
    let process = Process::now();
    page.gauge("process_resident_memory_bytes", "Resident memory size in bytes", process.resident_bytes as f64);
    let help = "Total user and system CPU time spent in seconds";
    page.0.register("process_cpu_seconds", help, ConstCounter::new(process.cpu_s));
    page.gauge("process_open_fds", "Number of open file descriptors", process.open_fds as f64);
    page.gauge("process_max_fds", "Maximum number of open file descriptors", process.fds_max as f64);
    page.gauge("process_threads", "Number of threads", process.threads as f64);
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
    page.gauges("tallyd_build_info", "Version, commit, compiler and target of the program", [(build, 1.0)]);
    paused(page, telemetry);
    page.0.register("tallyd_log_messages", "Logged lines", log_messages());
    partitions(page, telemetry, now);
    page.0.register("tallyd_connections_opened", "Opened connections", connections_opened());
    page.gauge(
        "tallyd_retrying_operations",
        "Operations that are failing and being retried",
        waits().open().len() as f64,
    );
    let help = "Operations that failed and were retried, each counted once";
    page.0.register("tallyd_retried_operations", help, ConstCounter::new(waits().begun()));
}

fn paused(page: &mut Page, telemetry: &Telemetry) {
    let orders = telemetry.orders();
    let is_paused = |task| orders.iter().any(|it| it.task == task && it.command == Command::Pause);
    let tasks = Task::ALL.map(|task| ([("task", task.name())], flag(is_paused(task))));
    page.gauges("tallyd_paused", "1 while an operator's order pauses the task in all daemons", tasks);
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

fn partitions(page: &mut Page, telemetry: &Telemetry, now: Micros) {
    let partitions = telemetry.consumer.partitions();
    let help = "Age of the oldest unacknowledged message in this process; 0 if there is none";
    let oldest = partitions.iter().map(|(number, it)| ([("partition", number.to_string())], it.oldest_s(now)));
    page.gauges("tallyd_oldest_unacked_age_seconds", help, oldest);
    let help = "Messages that this process has received and not acknowledged";
    let held = partitions.iter().map(|(number, it)| ([("partition", number.to_string())], it.held() as f64));
    page.gauges("tallyd_held_messages", help, held);
    let active = partitions
        .iter()
        .map(|(number, it)| ([("partition", number.to_string())], flag(it.standing() == Standing::Writing)));
    page.gauges("tallyd_partition_active", "1 if this process writes the partition", active);
}
