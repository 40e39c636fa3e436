//! A full run in slices: each scrub goes on where the last one ended, so that a large table is verified once a day, or
//! once a week, at a low and steady cost.
//!
//! A slice is so many known targets, in the order of kinds and ids, and as large a part of each kind's buckets, which are
//! searched for what MySQL doesn't know. The two go round independently of each other.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{JOB, Mode, Run};
use crate::model::{Kind, Target, TargetId};
use crate::store::counters::LAST;

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
        let total = self.on.store.estimate_counters().await?.div_ceil(parts);
        self.progress.send_modify(|progress| progress.total = Some(total));
        self.slice_left = total.max(1);
        let slice = self.report.slice.insert(Default::default());
        if last.target_id > 0 {
            let (kind, target_id) = (self.on.kinds.name(Kind(last.kind)), last.target_id);
            slice.after = Some(format!("{kind}:{target_id}"));
        }
        for (_, kind) in self.kinds().into_iter().filter(|(_, kind)| kind.0 >= last.kind) {
            if self.slice_left == 0 || self.is_over() {
                break;
            }
            let after = if kind.0 == last.kind { TargetId(last.target_id) } else { TargetId(0) };
            // Noted page by page: a run that is killed loses one.
            self.compare_known(kind, after, |kind, after| {
                serde_json::to_string(&Place { kind: kind.0, target_id: after.0, bucket: last.bucket })
            })
            .await?;
        }
        self.search_slice(last, parts).await
    }

    /// Searches the next buckets of each kind, and notes where the next run begins.
    async fn search_slice(&mut self, last: Place, parts: u64) -> Result<()> {
        let buckets = self.on.cache.keys.buckets();
        let some = u32::try_from(u64::from(buckets).div_ceil(parts)).unwrap_or(buckets);
        let from = if last.bucket >= buckets { 0 } else { last.bucket };
        let until = buckets.min(from.saturating_add(some));
        for (name, kind) in self.kinds() {
            if self.is_over() {
                return Ok(());
            }
            self.compare_phantoms_of(&name, kind, from..until).await?;
        }
        if self.is_over() {
            return Ok(());
        }
        let next = self.next_place();
        if let (Some(slice), Some(target)) = (&mut self.report.slice, next) {
            slice.until = Some(format!("{}:{}", self.on.kinds.name(target.kind), target.id));
        }
        if self.report.dry_run {
            return Ok(());
        }
        let (kind, target_id) = next.map_or((0, 0), |target| (target.kind.0, target.id.0));
        let text = serde_json::to_string(&Place { kind, target_id, bucket: until % buckets });
        Ok(self.on.store.note_checkpoint(self.number, &text.context("write where the slice ended")?).await?)
    }

    /// The last target of the slice; none where it was the last one of all.
    fn next_place(&self) -> Option<Target> {
        if self.slice_left > 0 {
            return None;
        }
        let Target { kind, id } = self.reached;
        if id < LAST {
            return Some(self.reached);
        }
        let (_, next) = self.kinds().into_iter().find(|(_, other)| *other > kind)?;
        Some(Target { kind: next, id: TargetId(0) })
    }
}
