//! A full run in slices: each scrub goes on where the last one ended, so that a large table is verified once a day, or
//! once a week, at a low and steady cost.
//!
//! A slice is so many rows of `counter`, in the order of kinds and ids, and as large a part of each kind's buckets, which
//! are searched for what MySQL doesn't know. The two go round independently of each other.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::report::Slice;
use super::{JOB, Mode, Run};
use crate::model::{Kind, Target, TargetId};
use crate::store::ranges::LAST;

/// Rows of `counter` that a slice has at least: small tables need no patience, and statistics may be off.
const SLICE_MIN: u64 = 10;

/// Where the next slice begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    kind: u8,
    target_id: u64,
    /// The first bucket that is searched next, in every kind.
    bucket: u32,
}

impl Run<'_> {
    pub(super) async fn compare_slice(&mut self) -> Result<()> {
        let parts = self.on.limits.scrub_parts.max(1);
        let last = self.on.store.last_checkpoint(JOB, Mode::Scrub.name(), self.number, false).await?;
        let last: Place = match last {
            Some((_, text)) => serde_json::from_str(&text).context("read where the last slice ended")?,
            None => Place::default(),
        };
        self.slice_left = self.on.store.estimate_counters().await?.div_ceil(parts).max(SLICE_MIN);
        self.progress.send_modify(|progress| progress.total = Some(self.slice_left));
        self.reached = Target { kind: Kind(last.kind), id: TargetId(last.target_id) };
        let began = self.place_of(self.reached);
        // Buckets first: they are few, and a run whose time is short gets round them, too.
        let bucket = self.search_buckets(last.bucket, parts).await?;
        let place = |Target { kind, id }| serde_json::to_string(&Place { kind: kind.0, target_id: id.0, bucket });
        for (_, kind) in self.kinds() {
            if kind.0 < last.kind {
                continue;
            }
            if self.slice_left == 0 || self.is_over() {
                break;
            }
            let after = if kind.0 == last.kind { TargetId(last.target_id) } else { TargetId(0) };
            // Noted page by page: a run that is killed loses one.
            self.compare_known(kind, after, |after, _| place(Target { kind, id: after })).await?;
        }
        let next = if self.cut_short.load(Ordering::Relaxed) { Some(self.reached) } else { self.next_place() };
        let next = next.unwrap_or(Target { kind: Kind(0), id: TargetId(0) });
        self.report.slice = Some(Slice { after: began, until: self.place_of(next) });
        self.note_checkpoint(&place(next)?).await
    }

    /// Searches the next buckets of each kind; says which one is next.
    async fn search_buckets(&mut self, last: u32, parts: u64) -> Result<u32> {
        let buckets = self.on.cache.keys.buckets();
        let some = u32::try_from(u64::from(buckets).div_ceil(parts)).unwrap_or(buckets);
        let from = if last >= buckets { 0 } else { last };
        let until = buckets.min(from.saturating_add(some));
        for (name, kind) in self.kinds() {
            self.compare_orphans_of(&name, kind, from..until).await?;
            if self.cut_short.load(Ordering::Relaxed) {
                return Ok(from);
            }
        }
        Ok(until % buckets)
    }

    /// The last target of the slice; none where it was the last one of all.
    fn next_place(&self) -> Option<Target> {
        if self.slice_left > 0 {
            return None;
        }
        if self.reached.id < LAST {
            return Some(self.reached);
        }
        let (_, kind) = self.kinds().into_iter().find(|(_, kind)| *kind > self.reached.kind)?;
        Some(Target { kind, id: TargetId(0) })
    }

    /// A place in words; none where it is before the first target of all.
    fn place_of(&self, place: Target) -> Option<String> {
        (place.kind != Kind(0)).then(|| self.name(place))
    }
}
