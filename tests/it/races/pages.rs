//! A full run crashes several times, and the next run resumes it each time.

use std::collections::BTreeSet;

use super::stage::{Run, Stage};
use crate::common::{Dice, World, drift, target};

/// The number of targets, which fill twenty pages.
const TARGETS: u64 = 200;

/// With each seed, the test kills the runs at different pages.
const SEEDS: [u64; 3] = [1, 7, 1_914];

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_killed_at_page_after_page_is_resumed_and_misses_nothing() {
    let mut stage = Stage::new("killed_pages", "[reconcile]\npage_targets = 10\nthreads_running_max = 0").await;
    for id in 1..=TARGETS {
        stage.like(id, 9).await;
    }
    stage.drained().await;
    for seed in SEEDS {
        let mut dice = Dice::of_run(seed);
        // A run first compares all targets of a kind, and then repairs the drifts. Until the run repairs the drifts,
        // its checkpoint stays at a target before the first drift.
        let first = 12 + dice.below(25);
        let off: BTreeSet<u64> = (0..20).map(|_| first + dice.below(TARGETS + 1 - first)).collect();
        for id in &off {
            drift(&stage.world, target(*id), 1 + dice.below(3) as i64).await;
        }
        kill_at_pages(&stage, &mut dice, seed).await;
        let report = stage.world.report(&["reconcile", "--resume", "--force", "--yes"]);
        assert!(report["resumed_run"].is_u64(), "seed {seed}: {report}");
        assert_eq!(report["repaired"], off.len() as u64, "seed {seed}: {off:?}: {report}");
        let checked = report["checked"].as_u64().unwrap();
        assert!(checked >= TARGETS + 1 - off.first().unwrap(), "seed {seed}: {off:?}: {report}");
    }
    stage.close().await;
}

/// Starts four runs, and kills each of them after some pages.
async fn kill_at_pages(stage: &Stage, dice: &mut Dice, seed: u64) {
    let mut last = 0;
    for kill in 0..4 {
        let pages = 2 + dice.below(3) as usize;
        let points = vec!["reconcile:compared"; pages].join(",");
        let mut arguments = vec!["--full", "--force", "--yes"];
        if kill > 0 {
            arguments.push("--resume");
        }
        let mut run = Run::start(&stage.world, &arguments, &[("TALLYD_PAUSE_POINT", &points)]);
        run.paused().await;
        for _ in 1..pages {
            run.next().await;
        }
        run.kill();
        stage.end_lease().await;
        let checkpoint = checkpoint(&stage.world).await;
        assert!(checkpoint >= last, "seed {seed}: the checkpoint fell from {last} to {checkpoint}");
        last = checkpoint;
    }
}

/// Looks at all runs that started after the last finished run. Returns the highest target id in the checkpoints of
/// these runs.
async fn checkpoint(world: &World) -> i64 {
    world
        .count(
            "SELECT COALESCE(MAX(CAST(JSON_VALUE(checkpoint, '$.target_id') AS SIGNED)), 0) FROM job_run \
             WHERE mode = 'full' AND run > (SELECT MAX(run) FROM job_run WHERE outcome = 'done')",
        )
        .await
}
