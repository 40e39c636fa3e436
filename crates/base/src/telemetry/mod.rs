//! Data about the work of this process: metrics, running jobs, and what the observer has read from the servers.
//!
//! Like the log, telemetry is global to the process, and all code can write to it. Tasks update metrics once for each
//! batch, not for each message, and never wait for a reader. Counters and histograms are registered here once, with all
//! label sets that are known at the start, so a rate begins at zero. `admin/metrics` registers what it reads at each
//! request. Telemetry only records: `health` decides what the records mean.

mod consumer;
mod labels;
mod observed;
pub mod observer;
mod process;
mod pulse;
mod quantile;
mod repairs;
mod runs;
mod systemd;
mod verdict;
mod words;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use prometheus_client::encoding::EncodeMetric;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

pub use consumer::{ConsumerMetrics, PartitionState, Unacked};
pub use labels::{Close, EventType, Label, Named, Reload, Server, Step, WaitsFor};
pub use observed::{ActiveRun, Board, EndedRun, Job, Observed, ObservedReceiver, Reconciled, ServerStatus};
pub use process::Process;
pub(crate) use pulse::POINT_EVERY;
pub use pulse::{Point, Pulse};
pub use repairs::RepairMetrics;
pub use runs::Runs;
pub use systemd::report_status;
pub use verdict::Verdict;
pub use words::{ConsumerState, DaemonState, ReportedOutcome};

use crate::runtime::clock;
use crate::runtime::lock::locked;
use labels::Code;
use quantile::Buckets;
use tallyd_core::control::Order;
use tallyd_core::model::Micros;

/// From the time for which a batch waits for events to a backlog of one day.
const LAG_BOUNDS: [f64; 18] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 7_200.0, 43_200.0,
    86_400.0,
];

pub struct Telemetry {
    pub registry: Registry,
    pub consumer: ConsumerMetrics,
    pub outbox: OutboxMetrics,
    pub repairs: RepairMetrics,
    reloads: Family<Reload, Counter>,
    last_reload_successful: Gauge,
    last_reload_success: Gauge<f64, AtomicU64>,
    bucket_fields: Family<Named<1>, Gauge>,
    draining: Gauge,
    working: AtomicBool,
    pub started_at: Micros,
    refused: Mutex<Option<(Micros, String)>>,
    went_back: Mutex<Option<Micros>>,
    site_differs: Gauge,
    site_difference: Mutex<Option<(Micros, String)>>,
    orders: Mutex<Vec<Order>>,
    pub runs: Runs,
    pub pulse: Pulse,
}

#[derive(Debug)]
pub struct OutboxMetrics {
    pub added: Counter,
    pub lag: Histogram,
}

/// Global, because all code of the process counts, and a reader wants the sums.
static TELEMETRY: LazyLock<Telemetry> = LazyLock::new(Telemetry::new);

pub fn telemetry() -> &'static Telemetry {
    &TELEMETRY
}

impl Telemetry {
    fn new() -> Self {
        let mut to = Registry::default();
        let draining = registered(&mut to, "tallyd_draining", "1 while the daemon is stopping", Gauge::default());
        let started_at = clock::now();
        let help = "1 if the last attempt to read the configuration succeeded, at startup or at a reload";
        let last_reload_successful =
            registered(&mut to, "tallyd_config_last_reload_successful", help, Gauge::default());
        last_reload_successful.set(1);
        let help = "Time at which the configuration was last read successfully";
        let name = "tallyd_config_last_reload_success_timestamp_seconds";
        let last_reload_success = registered(&mut to, name, help, Gauge::<f64, AtomicU64>::default());
        last_reload_success.set(seconds(started_at));
        let help = "1 if this daemon's settings differ from the site card that clients read";
        let site_differs = registered(&mut to, "tallyd_site_differs", help, Gauge::default());
        let bucket_fields = Family::default();
        let help = "Fields of the fullest bucket that the last run scanned";
        to.register("tallyd_bucket_fields_max", help, Described(bucket_fields.clone()));
        Self {
            consumer: ConsumerMetrics::register(&mut to),
            outbox: OutboxMetrics::register(&mut to),
            repairs: RepairMetrics::register(&mut to),
            reloads: counters(&mut to, "tallyd_config_reloads", "Reloads of the configuration"),
            last_reload_successful,
            last_reload_success,
            bucket_fields,
            draining,
            working: AtomicBool::new(false),
            started_at,
            refused: Mutex::default(),
            went_back: Mutex::default(),
            site_differs,
            site_difference: Mutex::default(),
            orders: Mutex::default(),
            runs: Runs::default(),
            pulse: Pulse::default(),
            registry: to,
        }
    }

    pub fn works(&self) {
        self.working.store(true, Ordering::Relaxed);
    }

    pub fn drains(&self) {
        self.draining.set(1);
    }

    pub fn state(&self) -> DaemonState {
        if self.draining.get() > 0 {
            DaemonState::Draining
        } else if self.working.load(Ordering::Relaxed) {
            DaemonState::Running
        } else {
            DaemonState::Starting
        }
    }

    pub fn partition(&self, number: u16) -> std::sync::Arc<PartitionState> {
        self.consumer.partition(number)
    }

    pub fn bucket_fields(&self, kind: &str, most: u64) {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        self.bucket_fields.get_or_create(&[("kind", kind.to_owned())]).set(most);
    }

    pub fn reloaded(&self, wrong: Option<String>) {
        let (now, is_applied) = (clock::now(), wrong.is_none());
        self.reloads.get_or_create(if is_applied { &Reload::Applied } else { &Reload::Refused }).inc();
        self.last_reload_successful.set(i64::from(is_applied));
        if is_applied {
            self.last_reload_success.set(seconds(now));
        }
        *locked(&self.refused) = wrong.map(|wrong| (now, wrong));
    }

    pub fn refused(&self) -> Option<(Micros, String)> {
        locked(&self.refused).clone()
    }

    pub fn mysql_went_back(&self) {
        *locked(&self.went_back) = Some(clock::now());
    }

    pub(crate) fn mysql_went_back_at(&self) -> Option<Micros> {
        *locked(&self.went_back)
    }

    pub fn site_differs(&self, how: Option<String>) -> bool {
        self.site_differs.set(i64::from(how.is_some()));
        let mut known = locked(&self.site_difference);
        let begins = how.is_some() && known.is_none();
        let since = known.take().map_or_else(clock::now, |(since, _)| since);
        *known = how.map(|how| (since, how));
        begins
    }

    pub(crate) fn site_difference(&self) -> Option<(Micros, String)> {
        locked(&self.site_difference).clone()
    }

    pub fn ordered(&self, orders: Vec<Order>) {
        *locked(&self.orders) = orders;
    }

    pub fn orders(&self) -> Vec<Order> {
        locked(&self.orders).clone()
    }

    fn written(&self) -> (u64, Buckets) {
        (self.consumer.committed.get(), Buckets::of(&self.consumer.lag))
    }
}

impl OutboxMetrics {
    fn register(to: &mut Registry) -> Self {
        let help = "Time from a row's transaction (MySQL's clock) to its addition in Redis (this machine's clock)";
        Self {
            added: counter(to, "tallyd_outbox_added", "Additions that the outbox made in Redis"),
            lag: registered(to, "tallyd_outbox_lag_seconds", help, Histogram::new(LAG_BOUNDS)),
        }
    }
}

pub fn seconds(at: Micros) -> f64 {
    at.0 as f64 / 1e6
}

/// Returns the seconds between two times. Returns 0 if `then` is later than `now`, because clocks differ.
pub fn seconds_between(then: Micros, now: Micros) -> f64 {
    (now.0 - then.0).max(0) as f64 / 1e6
}

/// The library appends a full stop to each help text.
fn registered<M: Metric + Clone>(to: &mut Registry, name: &str, help: &str, metric: M) -> M {
    to.register(name, help, metric.clone());
    metric
}

fn counter(to: &mut Registry, name: &str, help: &str) -> Counter {
    registered(to, name, help, Counter::default())
}

fn counters<L: Label>(to: &mut Registry, name: &str, help: &str) -> Family<L, Counter> {
    registered(to, name, help, touched(Family::default()))
}

fn touched<L: Label, M, C: MetricConstructor<M>>(family: Family<L, M, C>) -> Family<L, M, C> {
    L::ALL.iter().for_each(|label| drop(family.get_or_create(label)));
    family
}

fn counters_of_codes(key: &'static str, codes: impl Iterator<Item = &'static str>) -> Family<Code, Counter> {
    let family = Family::<Code, Counter>::default();
    codes.for_each(|code| drop(family.get_or_create(&Code { key, code })));
    family
}

/// A family of metrics. The family's help text is on the metrics page even before the first sample.
#[derive(Debug)]
pub struct Described<F>(pub F);

impl<F: EncodeMetric> EncodeMetric for Described<F> {
    fn encode(&self, encoder: prometheus_client::encoding::MetricEncoder<'_>) -> std::fmt::Result {
        self.0.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        self.0.metric_type()
    }
}
