//! Writes metrics as text for Prometheus: in OpenMetrics 1.0 if the client accepts this format, otherwise in the text
//! format 0.0.4. Prometheus accepts OpenMetrics.

use std::fmt::{self, Write};

use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::registry::Registry;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

pub fn page(registries: &[&Registry], headers: &HeaderMap) -> Response {
    let accepts = headers.get(ACCEPT).and_then(|accepted| accepted.to_str().ok()).unwrap_or("");
    let Ok(text) = openmetrics(registries) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    if accepts.contains("application/openmetrics-text") {
        ([(CONTENT_TYPE, OPENMETRICS)], text).into_response()
    } else {
        ([(CONTENT_TYPE, PROMETHEUS)], in_prometheus_format(&text)).into_response()
    }
}

fn openmetrics(registries: &[&Registry]) -> Result<String, fmt::Error> {
    let mut text = String::new();
    registries.iter().try_for_each(|registry| encode_registry(&mut text, registry))?;
    encode_eof(&mut text)?;
    Ok(text)
}

/// The older text format has the full name of a counter in HELP and TYPE lines, and has no end marker.
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
        // Writing to a String can't fail.
        let _ = match described {
            Some((begin, name, rest)) => writeln!(text, "{begin}{name}_total {rest}"),
            None => writeln!(text, "{line}"),
        };
    }
    text
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
