//! Stops the repairs of a metric that an API server counts in Redis without publishing events. Otherwise each run would
//! remove its likes, and the next run would find more of them. The rule is in `tallyd_core::raised_again`.

use std::collections::BTreeMap;

use anyhow::Result;
use tracing::warn;

use super::context::{Mode, RunContext};
use tallyd_core::model::Metric;
use tallyd_core::raised_again::RaisedAgain;
use tallyd_redis::repairs::Repair;

pub(super) struct Raised<'a> {
    run: &'a RunContext<'a>,
    /// `None` until this run finds a counter that is too high.
    raised: Option<RaisedAgain>,
    reasons: BTreeMap<Metric, String>,
}

impl<'a> Raised<'a> {
    pub(super) fn new(run: &'a RunContext<'a>) -> Self {
        Self { run, raised: None, reasons: BTreeMap::new() }
    }

    pub(super) async fn part(&mut self, repairs: Vec<Repair>) -> Result<(Vec<Repair>, Vec<Repair>)> {
        let RunContext { base, job, .. } = self.run;
        // A second layout has no earlier runs.
        let is_exempt = base.options.force || matches!(job.mode, Mode::Targets(_) | Mode::Layout);
        if is_exempt || self.raised.is_none() && repairs.iter().all(|repair| repair.delta >= 0) {
            return Ok((repairs, Vec::new()));
        }
        let raised = match &mut self.raised {
            Some(raised) => raised,
            none => none.insert(self.run.servers.store.raised_again(self.run.base.number).await?),
        };
        for Repair { number, delta, .. } in repairs.iter().filter(|repair| repair.delta < 0) {
            raised.note(*number, delta.unsigned_abs());
        }
        let (stopped, made) = repairs.into_iter().partition(|repair| raised.stops(repair.number.1).is_some());
        self.log_stopped();
        Ok((made, stopped))
    }

    pub(super) fn reason(&self) -> Option<String> {
        let reasons: Vec<&str> = self.reasons.values().map(String::as_str).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    fn log_stopped(&mut self) {
        let servers = self.run.servers;
        let Some(raised) = &self.raised else { return };
        for metric in servers.metrics.codes() {
            let Some(targets) = raised.stops(metric).filter(|_| !self.reasons.contains_key(&metric)) else { continue };
            let (name, place) = (servers.metrics.name(metric), servers.cache.keys.counter_names());
            let reason = format!(
                "the {name} counters of {targets} targets are too high again, although the last run lowered or skipped them. The \
                 same happened in the previous run: an API server still counts in {place} without publishing. tallyd \
                 stops the repairs of {name}. Stop that server (docs/moving-reference.md, \"Old \
                 keys\"), then run `tallyd reconcile --force`"
            );
            warn!(event = "reconcile-braked", reason, "the reconcile makes no more repairs of {name}: {reason}");
            self.reasons.insert(metric, reason);
        }
    }
}
