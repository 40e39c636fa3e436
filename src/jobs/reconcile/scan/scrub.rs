//! Compares all counters in slices. Each scrub resumes where the last one ended, so a large table can be verified once
//! a day or once a week with a small and constant load. A slice consists of rows of `counter`, in the order of kinds
//! and ids. An equally large part of each kind's buckets is searched for orphans, independently of the rows.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::ranges::Ranges;
use crate::jobs::reconcile::compare::{Comparer, KnownByBucket};
use crate::jobs::reconcile::context::{JOB, Mode, Servers};
use crate::jobs::reconcile::orphans::Orphans;
use crate::jobs::reconcile::report::Slice;
use tallyd_core::model::{Kind, Target, TargetId};
use tallyd_mysql::ranges::LAST;

/// Small tables are compared quickly, even if MySQL's statistics are inaccurate.
const SLICE_MIN: u64 = 10;

const BEGINNING: Target = Target { kind: Kind(0), id: TargetId(0) };

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    kind: u8,
    target_id: u64,
    bucket: u32,
}

pub(in crate::jobs::reconcile) async fn compare_slice(comparer: &mut Comparer<'_>) -> Result<()> {
    let run = comparer.run;
    let servers = run.servers;
    let parts = servers.limits.scrub_parts.max(1);
    let last = servers.store.last_checkpoint(JOB, Mode::Scrub.name(), run.base.number, false).await?;
    let last: Place = match last {
        Some((_, text)) => serde_json::from_str(&text).context("read the checkpoint of the last slice")?,
        None => Place::default(),
    };
    let rows = servers.store.estimate_counters().await?.div_ceil(parts).max(SLICE_MIN);
    run.base.show(|progress| progress.total = Some(rows));
    let mut reached = Target { kind: Kind(last.kind), id: TargetId(last.target_id) };
    let began = place_of(servers, reached);
    // First, so that the runs together search all buckets in time, even if each run is short.
    let bucket = search_buckets(comparer, last.bucket, parts).await?;
    let place = |Target { kind, id }| serde_json::to_string(&Place { kind: kind.0, target_id: id.0, bucket });
    let mut slice = Ranges::slice(comparer, rows);
    for (kind, _) in servers.names.all().filter(|(kind, _)| kind.0 >= last.kind) {
        if slice.is_at_end() || run.early_end.is_due() {
            break;
        }
        let after = if kind.0 == last.kind { TargetId(last.target_id) } else { TargetId(0) };
        // If the run is killed, only the work of one page is lost.
        let checkpoint = |id, _| place(Target { kind, id });
        let id = slice.compare_kind(kind, after, &mut KnownByBucket::default(), checkpoint).await?;
        reached = Target { kind, id };
    }
    let next = if run.early_end.was_due() {
        reached
    } else if slice.is_at_end() {
        after(servers, reached)
    } else {
        BEGINNING
    };
    comparer.report.slice = Some(Slice { after: began, until: place_of(servers, next) });
    comparer.note_checkpoint(&place(next)?).await
}

async fn search_buckets(comparer: &mut Comparer<'_>, last: u32, parts: u64) -> Result<u32> {
    let run = comparer.run;
    let buckets = run.servers.cache.keys.buckets();
    let some = u32::try_from(u64::from(buckets).div_ceil(parts)).unwrap_or(buckets);
    let from = if last >= buckets { 0 } else { last };
    let until = buckets.min(from.saturating_add(some));
    for (kind, name) in run.servers.names.all() {
        Orphans::new(comparer, kind, name).compare_buckets(from..until).await?;
        if run.early_end.was_due() {
            return Ok(from);
        }
    }
    Ok(until % buckets)
}

fn after(servers: &Servers, reached: Target) -> Target {
    if reached.id < LAST {
        return reached;
    }
    let next_kind = servers.names.all().find(|(kind, _)| *kind > reached.kind);
    next_kind.map_or(BEGINNING, |(kind, _)| Target { kind, id: TargetId(0) })
}

fn place_of(servers: &Servers, place: Target) -> Option<String> {
    (place.kind != Kind(0)).then(|| servers.name(place))
}
