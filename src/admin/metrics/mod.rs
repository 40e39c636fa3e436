//! `GET /metrics`: what the process counts and what it has seen of the servers, for Prometheus.
//!
//! In OpenMetrics 1.0 to whoever accepts it, as Prometheus does, else in Prometheus' text format 0.0.4. Every label set is
//! there from the start, so that a rate has a zero to begin with; labels are names of the configuration, never ids.

mod observed;
mod process;

use std::fmt::{self, Write};
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::Asked;
use crate::config::Config;
use crate::model::Micros;
use crate::telemetry::observer::Observed;
use crate::telemetry::{Buckets, telemetry};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) async fn show(State(asked): State<Asked>, headers: HeaderMap) -> Response {
    let seen = Arc::clone(&asked.sight.borrow());
    let accepts = headers.get(ACCEPT).and_then(|accepted| accepted.to_str().ok()).unwrap_or("");
    let Ok(text) = openmetrics(asked.live.current(), seen) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    match accepts.contains("application/openmetrics-text") {
        true => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        false => ([(CONTENT_TYPE, PROMETHEUS)], in_prometheus_format(&text)).into_response(),
    }
}

fn openmetrics(config: Arc<Config>, seen: Arc<Observed>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape { config, seen, now: Micros::now() }));
    let mut text = String::new();
    encode(&mut text, &registry)?;
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

/// One look of Prometheus.
#[derive(Debug)]
struct Scrape {
    config: Arc<Config>,
    seen: Arc<Observed>,
    now: Micros,
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        process::write(&mut page, telemetry(), self.now)?;
        observed::write(&mut page, telemetry(), &self.config, &self.seen)
    }
}

/// A name and what it is for this sample.
type Label<'a> = (&'static str, &'a str);

/// What is written.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    /// A number that only grows; `name` without `_total`.
    fn counter(&mut self, name: &str, help: &str, value: impl EncodeCounterValue) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    /// Numbers that only grow, one for each value of a label.
    fn counters<'l>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'l str, u64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (of, value) in values {
            encoder.encode_family(&[(label, of)])?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }

    /// A number that goes up and down.
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// Numbers that go up and down, one for each set of labels.
    fn gauges<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = ([Label<'l>; N], f64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            encoder.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// How often values fell into ranges.
    fn histogram(&mut self, name: &str, help: &str, held: &Buckets) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        encoder.encode_histogram::<NoLabelSet>(held.sum, held.total(), &held.counts, None)
    }

    /// The same, for each value of a label.
    fn histograms<'l>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        held: impl IntoIterator<Item = (&'l str, Buckets)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (of, held) in held {
            let labels = [(label, of)];
            let mut encoder = encoder.encode_family(&labels)?;
            encoder.encode_histogram::<NoLabelSet>(held.sum, held.total(), &held.counts, None)?;
        }
        Ok(())
    }
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
