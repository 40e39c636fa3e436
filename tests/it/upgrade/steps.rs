//! Checks the rules for the steps that change the schema.

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The steps of released versions, with their SHA-256. These steps must not change. If a step has already run with
/// another text, sqlx rejects it.
const RELEASED: &[(&str, &str)] = &[
    ("0001_likes.sql", "2c6427bce18e7df7e6d897d16232dac604c90b360be1e3b4538635e8c0a7623a"),
    ("0002_consumer.sql", "9b4bdb5ab64c9c9c393e1010619ce16cb18df3395e6abeb82b835ba921dcff1a"),
    ("0003_jobs.sql", "26e445af1c7bd2326e2390620ad4a01ae8c2dcabb4ca94a7bb39e2ca67e6aa48"),
    ("0004_boards.sql", "475a674e967f34ee11428562fc2953913ec621720588fcdcb65504298ef853de"),
];

fn steps() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut steps: Vec<_> =
        files.map(|file| (file.file_name().into_string().unwrap(), fs::read_to_string(file.path()).unwrap())).collect();
    steps.sort();
    steps
}

/// Returns the statements of the step, without comments.
fn statements(step: &str) -> Vec<String> {
    let lines = step.lines().filter(|line| !line.trim_start().starts_with("--"));
    let text = lines.collect::<Vec<_>>().join("\n");
    text.split(";\n").map(|statement| statement.trim().to_owned()).filter(|statement| !statement.is_empty()).collect()
}

#[test]
fn steps_that_are_out_have_not_changed() {
    let steps = steps();
    for (name, digest) in RELEASED {
        let (_, text) = steps.iter().find(|(step, _)| step == name).unwrap_or_else(|| panic!("{name} is gone"));
        let found = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(&found, digest, "{name} has changed: write a new step instead");
    }
}

/// If a step rebuilds a table with hundreds of millions of rows, it blocks the table's writers for hours.
#[test]
fn a_step_makes_tables_or_changes_them_in_place_and_may_run_again() {
    for (name, text) in steps() {
        for statement in statements(&text) {
            let may_run_again = statement.contains("IF NOT EXISTS")
                || statement.contains("IF EXISTS")
                || statement.contains("ON DUPLICATE KEY UPDATE");
            assert!(may_run_again, "{name}: the statement must work if the step was interrupted:\n{statement}");
            let in_place = statement.contains("ALGORITHM = INSTANT")
                || (statement.contains("ALGORITHM = INPLACE") && statement.contains("LOCK = NONE"));
            let is_new = statement.starts_with("CREATE TABLE") || statement.starts_with("INSERT INTO schema_floor");
            assert!(is_new || (statement.starts_with("ALTER TABLE") && in_place), "{name}: not online:\n{statement}");
        }
    }
}
