//! Draws the README's chart: tallyd and typical other consumers.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::contenders::{BATCHED, GO_EXACT, NODE_ROW, TALLYD};
use crate::rounds::Standing;

const WIDTH: f64 = 760.0;
/// Width of the names, to the left of the bars.
const NAMES: f64 = 260.0;
/// Width of the column that contains the numbers. This column is to the right of the longest bar.
const NUMBERS: f64 = 90.0;
const ROW: f64 = 34.0;

const LABELS: [(&str, &str); 6] = [
    (TALLYD, "tallyd"),
    (BATCHED[2], "Go, batches"),
    (BATCHED[0], "Node, batches"),
    (GO_EXACT, "Go, batches"),
    (BATCHED[1], "Python, batches"),
    (NODE_ROW, "Node, row by row"),
];

/// Draws one bar for tallyd and one bar for each peer. The fastest peer comes first. Returns `None` if tallyd or one of
/// the peers did not run.
pub fn svg(standings: &BTreeMap<&str, Standing>) -> Option<String> {
    let bar = |(name, label)| standings.get(name).map(|standing| (label, standing));
    let mut bars: Vec<(&str, &Standing)> = LABELS.into_iter().map(bar).collect::<Option<_>>()?;
    bars.sort_by(|(_, one), (_, other)| other.median.events_per_second.total_cmp(&one.median.events_per_second));
    let longest = bars.first()?.1.median.events_per_second;
    let height = ROW * (bars.len() as f64 + 1.5);
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">
<title>Events a second from a full queue into MySQL</title>
<style>
text {{ font: 15px system-ui, sans-serif; fill: #1f2933 }}
.small {{ font-size: 13px; fill: #52606d }}
.bar {{ fill: #9aa5b1 }}
.exact {{ fill: #2f7d4f }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e4e7eb }}
.small {{ fill: #b0bac5 }}
.bar {{ fill: #616e7c }}
.exact {{ fill: #63b384 }}
}}
</style>
"#
    );
    for (place, (label, standing)) in bars.into_iter().enumerate() {
        let rate = standing.median.events_per_second;
        let (y, width) = (ROW * place as f64 + 10.0, rate / longest * (WIDTH - NAMES - NUMBERS));
        let (class, counters) = if standing.counters { ("exact", "exact counters") } else { ("bar", "no counters") };
        let thousands = format!("{:.0},{:03}", (rate / 1_000.0).floor(), (rate % 1_000.0).floor());
        let (text, end) = (y + 17.0, NAMES + width + 8.0);
        let _ = writeln!(
            svg,
            "<text x=\"8\" y=\"{text}\">{label} <tspan class=\"small\">{counters}</tspan></text>\n\
             <rect class=\"{class}\" x=\"{NAMES}\" y=\"{y}\" width=\"{width:.1}\" height=\"24\" rx=\"3\"/>\n\
             <text x=\"{end:.1}\" y=\"{text}\">{thousands}</text>"
        );
    }
    let below = height - 12.0;
    let _ = writeln!(
        svg,
        "<text class=\"small\" x=\"8\" y=\"{below}\">Events a second from a full queue into MySQL. \
         Servers and consumer share two cores. dev/bench ingest</text>\n</svg>"
    );
    Some(svg)
}
