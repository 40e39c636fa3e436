//! `GET /metrics`: what the process counts and what it has seen of the servers, for Prometheus.
//!
//! The answer is OpenMetrics 1.0 if the client accepts it, as Prometheus does, else Prometheus' text format 0.0.4. Counters and histograms are
//! registered where they are counted ([`crate::telemetry`]); what is read for each answer is registered here. Labels are names of the
//! configuration, never ids.

mod observed;
mod process;

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use super::Asked;
use crate::config::Config;
use crate::runtime::clock;
use crate::telemetry::status::Observed;
use crate::telemetry::{Described, Named, telemetry};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) async fn show(State(asked): State<Asked>, headers: HeaderMap) -> Response {
    let seen = Arc::clone(&asked.sight.borrow());
    let accepts = headers.get(ACCEPT).and_then(|accepted| accepted.to_str().ok()).unwrap_or("");
    let Ok(text) = openmetrics(&asked.live.current(), &seen) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    if accepts.contains("application/openmetrics-text") {
        ([(CONTENT_TYPE, OPENMETRICS)], text).into_response()
    } else {
        ([(CONTENT_TYPE, PROMETHEUS)], in_prometheus_format(&text)).into_response()
    }
}

fn openmetrics(config: &Config, seen: &Observed) -> Result<String, fmt::Error> {
    let mut now = Page(Registry::default());
    process::register(&mut now, telemetry(), clock::now());
    observed::register(&mut now, telemetry(), config, seen);
    let mut text = String::new();
    encode_registry(&mut text, &telemetry().registry)?;
    encode_registry(&mut text, &now.0)?;
    encode_eof(&mut text)?;
    Ok(text)
}

/// The older format has the whole name of a counter in its descriptions, and no mark of its end.
fn in_prometheus_format(openmetrics: &str) -> String {
    let mut counters: Vec<&str> = Vec::new();
    for line in openmetrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        counters.extend(line.strip_suffix(" counter"));
    }
    let mut text = String::with_capacity(openmetrics.len() + counters.len() * 12);
    for line in openmetrics.lines().filter(|line| *line != "# EOF") {
        let described = ["# HELP ", "# TYPE "].into_iter().find_map(|begin| {
            let (name, rest) = line.strip_prefix(begin)?.split_once(' ')?;
            counters.contains(&name).then_some((begin, name, rest))
        });
        // A String can't fail.
        let _ = match described {
            Some((begin, name, rest)) => writeln!(text, "{begin}{name}_total {rest}"),
            None => writeln!(text, "{line}"),
        };
    }
    text
}

/// What is read for one answer. The library ends each help text with a full stop.
struct Page(Registry);

impl Page {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.0.register(name, help, ConstGauge::new(value));
    }

    fn flag(&mut self, name: &str, help: &str, value: bool) {
        self.gauge(name, help, flag(value));
    }

    fn gauges<const N: usize>(
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

fn instant(at: Option<i64>) -> f64 {
    at.map_or(0.0, |at| at as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_describes_counters_by_their_whole_names() {
        let text = "# HELP a Of a.\n# TYPE a counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n# EOF\n";
        let expected = "# HELP a_total Of a.\n# TYPE a_total counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n";
        assert_eq!(in_prometheus_format(text), expected);
    }
}
