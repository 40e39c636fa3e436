//! `GET /metrics` for Prometheus: metrics of the process, and the observed state of the servers.
//!
//! [`tallyd_base::telemetry`] registers counters and histograms. This module registers metrics whose values are read at each
//! request. Labels contain names from the configuration, never ids.

mod observed;
mod process;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use super::Asked;
use tallyd_base::http::exposition;
use tallyd_base::runtime::clock;
use tallyd_base::telemetry::{Described, Named, seconds, telemetry};
use tallyd_core::model::Micros;

pub(super) async fn show(State(asked): State<Asked>, headers: HeaderMap) -> Response {
    let seen = Arc::clone(&asked.observed.borrow());
    let mut now = ScrapedMetrics(Registry::default());
    process::register(&mut now, telemetry(), clock::now());
    observed::register(&mut now, telemetry(), &asked.live.current(), &seen);
    exposition::page(&[&telemetry().registry, &now.0], &headers)
}

/// The metrics whose values are read at each request. The library adds a full stop to each help text.
struct ScrapedMetrics(Registry);

/// The name, the help text, and how to read the value. `None` if the value is unknown.
type Row<T> = (&'static str, &'static str, fn(&T) -> Option<f64>);

impl ScrapedMetrics {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.0.register(name, help, ConstGauge::new(value));
    }

    /// Gauges without labels. A gauge with an unknown value does not appear.
    fn gauges<T>(&mut self, of: &T, table: &[Row<T>]) {
        for (name, help, read) in table {
            read(of).into_iter().for_each(|value| self.gauge(name, help, value));
        }
    }

    /// Gauges with a sample for each item whose value is known.
    fn gauges_of_each<'i, T, L: Into<String>, const N: usize>(
        &mut self,
        items: &'i [T],
        labels: fn(&'i T) -> [(&'static str, L); N],
        table: &[Row<T>],
    ) {
        for (name, help, read) in table {
            self.samples(name, help, items.iter().filter_map(|item| Some((labels(item), read(item)?))));
        }
    }

    fn samples<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = ([(&'static str, impl Into<String>); N], f64)>,
    ) {
        let family = Family::<Named<N>, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels.map(|(label, of)| (label, of.into()))).set(value);
        }
        self.0.register(name, help, Described(family));
    }
}

fn flag(value: bool) -> f64 {
    f64::from(u8::from(value))
}

fn instant(at: Option<i64>) -> Option<f64> {
    at.map(|at| seconds(Micros(at)))
}
