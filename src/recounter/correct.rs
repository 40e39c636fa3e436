//! What two looks agree on, noted and at last corrected.

use anyhow::Result;
use tracing::warn;

use super::page::Sight;
use super::report::{LISTED_MAX, Report, TargetReport};
use super::{JOB, Run, stopped};
use crate::caution::Brake;
use crate::config::Reconcile as Limits;
use crate::model::Target;
use crate::runtime::fault;
use crate::store::repairs::Intent;

/// Corrections of one transaction.
const CHUNK: usize = 100;

impl Run<'_> {
    /// A target is off, and will be corrected.
    pub(super) fn note(&mut self, sight: &Sight, added: i64) {
        let target = Target { kind: self.on.kind, id: sight.id };
        self.report.drifted += 1;
        self.report.drift_sum = self.report.drift_sum.saturating_add(added.unsigned_abs());
        self.largest = self.largest.max(added.unsigned_abs());
        if self.report.targets.len() < LISTED_MAX {
            let name = format!("{}:{}", self.on.kind_name, sight.id);
            let Sight { truth, counted, .. } = *sight;
            self.report.targets.push(TargetReport { target: name, truth, counter: counted, added });
        }
        if !self.order.dry_run {
            self.intents.push(Intent { target, before: sight.counted, added });
        }
    }

    /// Makes the corrections that are held, unless they are too much to be true.
    pub(super) async fn correct(&mut self) -> Result<()> {
        if self.intents.is_empty() {
            return Ok(());
        }
        let Report { checked, drifted, drift_sum, .. } = self.report;
        let recount = &self.on.name;
        if !self.order.force {
            let Limits { repair_targets_max_percent, repair_abs_max, .. } = self.on.limits;
            let command = format!("`tallyd recount {recount} --force`");
            let brake =
                Brake { targets_max_percent: repair_targets_max_percent, abs_max: repair_abs_max, command: &command };
            brake.check(checked, drifted, self.largest)?;
        }
        warn!(
            event = "recount-off",
            recount,
            drifted,
            drift_sum,
            "{drifted} numbers of {recount} differ from what the query says, by {drift_sum} in all"
        );
        let pass = self.next_number();
        let intents = std::mem::take(&mut self.intents);
        for chunk in intents.chunks(CHUNK) {
            if self.stop.is_cancelled() {
                return Err(stopped());
            }
            fault::point("recount:correcting");
            let (on, fencing) = (self.on, (JOB, self.number, pass));
            on.store.correct_counters(fencing, on.metric, on.writer, chunk).await?;
            self.report.corrected += chunk.len() as u64;
            fault::point("recount:corrected");
        }
        Ok(())
    }
}
