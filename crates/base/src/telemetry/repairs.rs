//! Counts the counters that the reconciles and recounts of this process compared and changed.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::labels::Named;
use super::{Verdict, registered};
use tallyd_redis::repairs::Repaired;

const RECONCILE: &str = "reconcile";

const MODES: [&str; 4] = ["changed", "full", "scrub", "rebuild"];

#[derive(Debug)]
pub struct RepairMetrics {
    targets: Family<Named<2>, Counter>,
    repairs: Family<Named<3>, Counter>,
}

impl RepairMetrics {
    pub(super) fn register(to: &mut Registry) -> Self {
        let targets = "Counters that reconciles of this process compared";
        let repairs = "Counters that reconciles and recounts of this process changed or tried to change";
        let metrics = Self {
            targets: registered(to, "tallyd_reconcile_targets", targets, Family::default()),
            repairs: registered(to, "tallyd_repairs", repairs, Family::default()),
        };
        for mode in MODES {
            Verdict::ALL.iter().for_each(|verdict| metrics.compared(mode, *verdict, 0));
        }
        Repaired::ALL.into_iter().for_each(|outcome| metrics.in_redis(outcome, 0));
        [RECONCILE, "recount"].iter().for_each(|job| metrics.in_mysql(job, 0));
        metrics
    }

    pub fn compared(&self, mode: &str, verdict: Verdict, more: u64) {
        let labels = [("mode", mode.to_owned()), ("verdict", verdict.as_str().to_owned())];
        self.targets.get_or_create(&labels).inc_by(more);
    }

    pub fn in_redis(&self, outcome: Repaired, more: u64) {
        self.repaired(RECONCILE, "redis", outcome.name(), more);
    }

    pub fn in_mysql(&self, job: &str, more: u64) {
        self.repaired(job, "mysql", "done", more);
    }

    fn repaired(&self, job: &str, store: &str, outcome: &str, more: u64) {
        let labels = [("job_name", job.to_owned()), ("store", store.to_owned()), ("outcome", outcome.to_owned())];
        self.repairs.get_or_create(&labels).inc_by(more);
    }
}
