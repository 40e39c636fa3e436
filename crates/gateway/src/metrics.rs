//! The metrics of the gateway, and `GET /metrics`. Labels are routes, statuses and verdicts, never ids.

use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::Shared;
use tallyd_base::http::exposition;
use tallyd_base::telemetry::{Named, Process};

/// Histogram buckets for the duration of a request, in seconds. The buckets range from the duration of a read from
/// Redis to the longest wait for a confirm.
const SECONDS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

const ROUTES: [&str; 5] = ["events", "counters", "likes", "boards", "other"];

pub(super) struct Metrics {
    registry: Registry,
    requests: Family<Named<2>, Counter>,
    seconds: Family<Named<1>, Histogram>,
    events: Family<Named<1>, Counter>,
    pub connections: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let requests = Family::default();
        registry.register("tallyd_gateway_requests", "Answered requests", requests.clone());
        let seconds = Family::<Named<1>, Histogram>::new_with_constructor(|| Histogram::new(SECONDS));
        registry.register("tallyd_gateway_request_seconds", "Duration of requests", seconds.clone());
        let events = Family::default();
        registry.register("tallyd_gateway_events", "Events, by verdict", events.clone());
        let connections = Gauge::default();
        registry.register("tallyd_gateway_connections", "Open connections", connections.clone());
        let metrics = Self { registry, requests, seconds, events, connections };
        for route in ROUTES {
            drop(metrics.seconds.get_or_create(&[("route", route.to_owned())]));
        }
        for verdict in ["confirmed", "refused", "unconfirmed", "limited"] {
            metrics.judged(verdict, 0);
        }
        metrics
    }
}

impl Metrics {
    pub(super) fn answered(&self, route: &'static str, status: StatusCode, took: Duration) {
        let labels = [("route", route.to_owned()), ("status", status.as_u16().to_string())];
        self.requests.get_or_create(&labels).inc();
        self.seconds.get_or_create(&[("route", route.to_owned())]).observe(took.as_secs_f64());
    }

    pub(super) fn judged(&self, verdict: &str, events: u64) {
        self.events.get_or_create(&[("verdict", verdict.to_owned())]).inc_by(events);
    }
}

pub(super) fn route(path: &str) -> &'static str {
    let name = path.strip_prefix("/v1/").unwrap_or_default().split('/').next();
    ROUTES.into_iter().find(|route| Some(*route) == name).unwrap_or("other")
}

pub(super) async fn show(State(gate): Shared, headers: HeaderMap) -> Response {
    let (mut now, process) = (Registry::default(), Process::now());
    let memory = ConstGauge::new(process.resident_bytes as f64);
    now.register("process_resident_memory_bytes", "Resident memory size in bytes", memory);
    let help = "Total user and system CPU time spent in seconds";
    now.register("process_cpu_seconds", help, ConstCounter::new(process.cpu_s));
    let files = ConstGauge::new(process.open_fds as f64);
    now.register("process_open_fds", "Number of open file descriptors", files);
    let files_max = ConstGauge::new(process.fds_max as f64);
    now.register("process_max_fds", "Maximum number of open file descriptors", files_max);
    exposition::page(&[&gate.metrics.registry, &now], &headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_named_without_what_follows() {
        let paths = ["/v1/events", "/v1/boards/hot", "/v1/other", "/livez", "/v1/", "/v1/eventsx"];
        assert_eq!(paths.map(route), ["events", "boards", "other", "other", "other", "other"]);
    }
}
