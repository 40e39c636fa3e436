//! The named figures, and the values that they should reach.

use std::collections::BTreeMap;

use crate::common::report::Aim;
use crate::contenders::{
    BATCHED, FLOOR, GO_EXACT, NODE_ROW, NOOP, TALLYD, TALLYD_4, TALLYD_API, TALLYD_ARRAYS, TALLYD_ARRAYS_2,
    TALLYD_ARRAYS_2_GROUPED,
};
use crate::drain::Drained;
use crate::rounds::Standing;

/// The values that tallyd's consumer should reach on one small machine that also runs its servers.
pub const AIMS: [(&str, Aim); 10] = [
    ("pipe_limit_ratio", Aim::AtLeast(0.9)),
    ("best_batched_peer_ratio", Aim::AtLeast(1.1)),
    ("exact_peer_ratio", Aim::AtLeast(1.7)),
    ("row_peer_ratio", Aim::AtLeast(8.0)),
    ("array_ratio", Aim::AtLeast(2.0)),
    ("cpu_us_per_event", Aim::AtMost(4.5)),
    ("all_us_per_event", Aim::AtMost(19.0)),
    ("peak_rss_mib", Aim::AtMost(64.0)),
    ("four_partitions_peak_rss_mib", Aim::AtMost(64.0)),
    ("backlog_peak_rss_mib", Aim::AtMost(64.0)),
];

/// If a contender was not measured, the figures that need this contender are left out. For `array_ratio`, tallyd has
/// two partitions: with one partition, tallyd has one connection to MySQL, and can't write faster than `floor`. For all
/// other figures, tallyd has one partition, like its peers.
pub fn compute(standings: &BTreeMap<&str, Standing>, cores: usize) -> BTreeMap<String, f64> {
    let of = |name: &str| standings.get(name).map(|standing| standing.median);
    let rate = |name: &str| of(name).map(|run| run.events_per_second);
    let ratio = |name: &str, to: Option<f64>| Some(rate(name)? / to?);
    // If one peer is missing, the fastest peer is unknown.
    let batched: Option<Vec<f64>> = BATCHED.iter().map(|name| rate(name)).collect();
    let best = batched.and_then(|rates| rates.into_iter().max_by(f64::total_cmp));
    let limit = of(NOOP).zip(of(FLOOR)).map(|(noop, floor)| pipe_limit(&noop, &floor, cores));
    let figures = [
        ("pipe_limit_events_per_second", limit),
        ("array_ratio_1", ratio(TALLYD_ARRAYS, best)),
        ("array_ratio", ratio(TALLYD_ARRAYS_2, best)),
        ("grouped_array_ratio", ratio(TALLYD_ARRAYS_2_GROUPED, best)),
        ("four_partitions_peak_rss_mib", of(TALLYD_4).map(|run| run.peak_rss_mib)),
    ];
    let of_mode = |name, suffix| {
        let figures = [
            ("pipe_limit_ratio", ratio(name, limit)),
            ("best_batched_peer_ratio", ratio(name, best)),
            ("exact_peer_ratio", ratio(name, rate(GO_EXACT))),
            ("row_peer_ratio", ratio(name, rate(NODE_ROW))),
            ("cpu_us_per_event", of(name).map(|run| run.consumer_us)),
            ("all_us_per_event", of(name).map(|run| run.all_us())),
            ("peak_rss_mib", of(name).map(|run| run.peak_rss_mib)),
        ];
        figures.map(|(figure, value)| (format!("{figure}{suffix}"), value))
    };
    let figures = figures.map(|(name, value)| (name.to_owned(), value)).into_iter();
    let figures = figures.chain(of_mode(TALLYD, "")).chain(of_mode(TALLYD_API, "_api"));
    figures.filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Returns an upper limit for the rate of events: no consumer of one queue can be faster on this machine. The slower of
/// the two servers limits this rate. The machine's cores limit this rate too, because both servers need CPU time even
/// with the cheapest clients.
fn pipe_limit(noop: &Drained, floor: &Drained, cores: usize) -> f64 {
    let cpu_seconds = (noop.all_us() + floor.all_us()) * noop.events as f64 / 1e6;
    noop.events as f64 / noop.seconds.max(floor.seconds).max(cpu_seconds / cores as f64)
}
