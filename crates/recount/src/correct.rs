//! Records the drifts that two measurements agree on, and corrects the counters.

use anyhow::Result;
use tracing::warn;

use super::page::Measured;
use super::report::{Report, TargetReport};
use super::{Comparison, JOB};
use tallyd_base::config::Reconcile as Limits;
use tallyd_base::jobs::run::LISTED_MAX;
use tallyd_base::runtime::fault;
use tallyd_base::telemetry::telemetry;
use tallyd_core::model::Target;
use tallyd_core::repair_limits::{LimitExceeded, RepairLimits};
use tallyd_mysql::repairs::{CORRECTIONS_MAX, Intent};

impl Comparison<'_, '_> {
    pub(super) fn note(&mut self, found: &Measured, added: i64) {
        let target = Target { kind: self.on.kind, id: found.id };
        self.largest = self.largest.max(added.unsigned_abs());
        let report = &mut self.run.report;
        report.drifted += 1;
        report.drift_sum = report.drift_sum.saturating_add(added.unsigned_abs());
        if report.targets.len() < LISTED_MAX {
            let name = format!("{}:{}", self.on.kind_name, found.id);
            let Measured { truth, counted, .. } = *found;
            report.targets.push(TargetReport { target: name, truth, counter: counted, added });
        }
        if !self.run.options.dry_run {
            self.intents.push(Intent { number: (target, self.on.metric), before: found.counted, added });
        }
    }

    pub(super) async fn correct(&mut self) -> Result<()> {
        if self.run.options.dry_run {
            self.run.report.would_brake = self.check_limits().err().map(|braked| braked.to_string());
            return Ok(());
        }
        if self.intents.is_empty() {
            return Ok(());
        }
        self.check_limits()?;
        let Report { drifted, drift_sum, .. } = self.run.report;
        let recount = &self.on.name;
        warn!(
            event = "recount-off",
            recount,
            drifted,
            drift_sum,
            "{drifted} counters of {recount} differ from the query's result: the differences are {drift_sum} in total"
        );
        let pass = self.run.next_number();
        let mut intents = std::mem::take(&mut self.intents);
        // The corrections are sorted by key here, because all writers lock rows in the order of their keys.
        intents.sort_unstable_by_key(|intent| intent.number);
        for chunk in intents.chunks(CORRECTIONS_MAX) {
            self.run.check_stop()?;
            fault::point("recount:correcting");
            let (on, fencing) = (self.on, (JOB, self.run.number, pass));
            self.run.report.untold += self.run.servers.store.correct_counters(fencing, on.follows, chunk).await?;
            self.run.report.corrected += chunk.len() as u64;
            telemetry().repairs.in_mysql(JOB, chunk.len() as u64);
            fault::point("recount:corrected");
        }
        let untold = self.run.report.untold;
        if untold > 0 {
            warn!(
                event = "recount-untold",
                recount,
                untold,
                "the next `changed` reconcile will not compare {untold} corrected counters of {recount}: run `tallyd reconcile --full`"
            );
        }
        Ok(())
    }

    fn check_limits(&self) -> Result<(), LimitExceeded> {
        if self.run.options.force {
            return Ok(());
        }
        let Report { checked, drifted, .. } = self.run.report;
        let Limits { repair_targets_max_percent, repair_abs_max, .. } = self.on.limits;
        let command = format!("`tallyd admin recount {} --force`", self.on.name);
        let limits = RepairLimits {
            targets_max_percent: repair_targets_max_percent,
            abs_max: repair_abs_max,
            command: &command,
            reload: None,
        };
        limits.check(checked, drifted, self.largest)
    }
}
