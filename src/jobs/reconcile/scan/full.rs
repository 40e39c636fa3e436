//! Compares every counter in MySQL or Redis, one kind after another. If a run ended early, the next run can resume
//! where it ended.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::ranges::Ranges;
use crate::jobs::reconcile::compare::{Comparer, KnownByBucket};
use crate::jobs::reconcile::context::{JOB, Mode, RunContext};
use crate::jobs::reconcile::orphans::Orphans;
use tallyd_core::model::{Kind, Micros, TargetId};

/// The targets of `kind` are compared up to `target_id`, and all earlier kinds completely, including their orphans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    layout: String,
    clean: bool,
    /// By Redis' clock. After a resume, the beginning of the first run.
    began: i64,
    kind: u8,
    target_id: u64,
}

struct Resumed {
    run: u64,
    checkpoint: Checkpoint,
}

pub(in crate::jobs::reconcile) async fn compare_full(comparer: &mut Comparer<'_>) -> Result<()> {
    let run = comparer.run;
    let servers = run.servers;
    let resumed = resumed(run).await?;
    comparer.report.resumed_run = resumed.as_ref().map(|resumed| resumed.run);
    let resumed = resumed.map(|resumed| resumed.checkpoint);
    // Redis can have lost the loaded counters after the earlier run had compared them, so the result is not clean.
    comparer.report.clean =
        resumed.as_ref().is_none_or(|checkpoint| checkpoint.clean && comparer.report.buckets_loaded == 0);
    let layout = servers.cache.keys.layout().full_name();
    let began = match &resumed {
        Some(checkpoint) => Micros(checkpoint.began),
        None => comparer.measure.fenced_now().await?,
    };
    // Only for the progress bar. After a resume, the number of remaining counters is unknown.
    let total = servers.store.estimate_counters().await.ok().filter(|_| resumed.is_none());
    run.base.show(|progress| progress.total = total);
    for (kind, name) in servers.names.all() {
        let after = match &resumed {
            Some(checkpoint) if checkpoint.kind == kind.0 => TargetId(checkpoint.target_id),
            Some(checkpoint) if checkpoint.kind > kind.0 => continue,
            _ => TargetId(0),
        };
        if run.early_end.is_due() {
            break;
        }
        let mut known =
            if servers.cache.is_packed() { KnownByBucket::new(&servers.cache) } else { KnownByBucket::default() };
        let checkpoint = |after: TargetId, clean| {
            let (layout, kind) = (layout.clone(), kind.0);
            serde_json::to_string(&Checkpoint { layout, clean, began: began.0, kind, target_id: after.0 })
        };
        Ranges::all(comparer).compare_kind(kind, after, &mut known, checkpoint).await?;
        if run.early_end.is_due() {
            break;
        }
        Orphans::new(comparer, kind, name).compare_all(known).await?;
    }
    if run.job.mode == Mode::Full && comparer.is_complete() {
        comparer.report.cut = Some(began.0);
        // Redis may have gone back to an older state between this run and the resumed one.
        if resumed.is_none() && !comparer.report.head.dry_run {
            run.note_compared(began).await?;
        }
    }
    Ok(())
}

async fn resumed(run: &RunContext<'_>) -> Result<Option<Resumed>> {
    let servers = run.servers;
    if !run.base.options.resume {
        return Ok(None);
    }
    let mode = run.job.mode.name();
    let Some((resumed, text)) = servers.store.last_checkpoint(JOB, mode, run.base.number, true).await? else {
        return Ok(None);
    };
    let checkpoint: Checkpoint = serde_json::from_str(&text).context("read the checkpoint of the last run")?;
    if checkpoint.layout != servers.cache.keys.layout().full_name() {
        return Ok(None);
    }
    let (kind, target_id) = (servers.kinds.name(Kind(checkpoint.kind)), checkpoint.target_id);
    info!(
        event = "reconcile-resumed",
        run = resumed,
        kind,
        target_id,
        "resuming after {kind}:{target_id}, where run {resumed} ended"
    );
    Ok(Some(Resumed { run: resumed, checkpoint }))
}
