//! Programs read the report in JSON. So this test fails if a field of the report is removed, is moved, or has another
//! type.

use std::process::Command;

use super::common::{drift, stderr, stdout, target};
use super::settled;

/// Replaces the parts of the report that differ between runs.
fn stable(json: &str) -> String {
    let mut report: serde_json::Map<String, serde_json::Value> = serde_json::from_str(json).unwrap();
    for step in report["steps_ms"].as_object_mut().unwrap().values_mut() {
        assert!(step.is_u64(), "{step}");
        *step = 0.into();
    }
    if let Some(cut) = report.get_mut("cut").filter(|cut| !cut.is_null()) {
        assert!(cut.as_i64().unwrap() > 1_700_000_000_000_000, "{cut}");
        *cut = 0.into();
    }
    serde_json::to_string_pretty(&report).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_for_programs_is_stable() {
    let (world, _daemon, _) = settled("snapshot", 3, "").await;
    drift(&world, target(2), 15).await;
    let output = world.tallyd(&["reconcile", "--format", "json"]);
    let expected = include_str!("snapshot.json");
    assert_eq!(stable(&stdout(&output)), expected.trim_end(), "{}", stdout(&output));
    let people = stdout(&world.tallyd(&["reconcile", "--target", "video:2", "--dry-run"]));
    let lines: Vec<&str> = people.lines().filter(|line| !line.contains("time by step")).collect();
    assert_eq!(
        lines,
        [
            "targets: 1 counters checked, 1 exact, 0 drifted by 0 in all, 0 repaired, 0 transient; a dry run: nothing was \
             changed",
            "  video:2: exact, Redis 2, MySQL 2",
            "    Redis is right; 2 like records; 2 in counter",
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_shows_how_far_a_run_is() {
    let (world, _daemon, _) = settled("bar", 30, "[reconcile]\npage_targets = 10\npause_ms = 500").await;
    let tallyd = format!("{} --config {} reconcile", env!("CARGO_BIN_EXE_tallyd"), world.config_path().display());
    // Runs the command in a terminal.
    let output = Command::new("script")
        .args(["-qec", &format!("stty rows 40 cols 240; {tallyd}"), "/dev/null"])
        .env("TERM", "xterm")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let shown = stdout(&output);
    assert!(shown.contains("10 counters checked (about "), "{shown}");
    assert!(shown.contains("now after video:10"), "{shown}");
    // The command removes the progress bar before it prints the report, so the line of the report has no other text.
    let report = shown.lines().rev().find(|line| line.contains("full: 30 counters checked, 30 exact")).unwrap();
    assert!(report.rsplit('\r').next().unwrap().trim_start_matches("\u{1b}[2K").starts_with("full: "), "{report:?}");
}
