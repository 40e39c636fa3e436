//! Checks the rules for the steps that change the schema.

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The steps of released versions, with their SHA-256. These steps must not change. If a step has already run with
/// another text, sqlx rejects it.
const RELEASED: &[(&str, &str)] = &[
    ("0001_likes.sql", "be1a2ed64f3f7b5022610731984bba133709e963f8668ad385f9b7a0ec899112"),
    ("0002_consumer.sql", "d75c37ca9bd26471e30fd14971f90a2a040b9b07314d1d3daea31b0a73c19466"),
    ("0003_jobs.sql", "4585b0ea0fdc5271adf5104e018ab52d20826d558705eb6b3a78cff9dc5baaeb"),
    ("0004_boards.sql", "dc57dc2d2a343311f3290ef09e58cdd219e534f5fe647331451b15797b972c03"),
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
