//! Runs all parsers of Redis' answers. A real Redis gives only valid answers. The fuzz tests (`fuzz/`) pass invalid
//! answers to the parsers, too.

use redis::Value;
use tallyd_core::layout::Layout;
use tallyd_core::model::Metric;

use super::recent::shape;
use super::slots::SlotMap;
use super::{boards, counters, filters, read, scan, sentinel, snapshots};

const MEMBERS_MAX: usize = 4;

pub fn read(answer: &Value, layout: &Layout, metrics: &[Metric]) -> usize {
    let parts: &[Value] = match answer {
        Value::Array(parts) | Value::Set(parts) => parts,
        _ => &[],
    };
    let first = metrics.first().copied().unwrap_or(Metric(1));
    let samples = (0..MEMBERS_MAX).filter(|members| {
        let members: Vec<(usize, Metric)> = (0..*members).map(|field| (field, first)).collect();
        counters::read_sample(answer, layout, &members).is_some()
    });
    let map = SlotMap::read(answer, "asked");
    // The fuzz tests also look up nodes in each parsed map, because each Redis command looks up its node.
    let nodes = map.iter().filter(|map| map.node(0).is_some() || map.node(u16::MAX).is_some());
    let could_be = [
        read::read_found(layout, metrics, answer).is_some(),
        boards::read_part(answer).is_some(),
        boards::read_members(answer).is_some(),
        boards::changed("read an answer", answer.clone()).is_ok(),
        snapshots::scanned(answer.clone(), snapshots::scan_page).is_ok(),
        snapshots::scanned(answer.clone(), snapshots::scores).is_ok(),
        filters::read_config(answer).is_some(),
        scan::read_scan(answer).is_some(),
        shape(parts).is_some(),
        sentinel::address(answer).is_some(),
    ];
    could_be.into_iter().filter(|could| *could).count() + samples.count() + nodes.count()
}
