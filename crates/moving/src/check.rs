//! The questions of `tallyd config check` about move.toml. The daemon does not read it, so its problems are warnings: they
//! must not stop a start or an upgrade.

use std::path::Path;

use crate::config::{examine, path_beside};
use crate::import::{Importer, Pass};
use tallyd_base::cli::check::{Check, MYSQL_AWAY, MYSQL_REFUSED, Status, What};
use tallyd_base::config::{Config, Key};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::Job as _;
use tallyd_base::servers::Servers;

pub fn check_file(path: &Path, config: &Config) -> Vec<Check> {
    if is_of_a_unit() {
        return Vec::new();
    }
    let problems = examine(&path_beside(path), config).err().unwrap_or_default();
    problems.into_iter().map(|problem| warning(Check::problem(problem))).collect()
}

/// A unit can't read the passwords of root's commands, so its check would give wrong advice about them.
fn is_of_a_unit() -> bool {
    std::env::var_os("CREDENTIALS_DIRECTORY").is_some()
}

fn warning(check: Check) -> Check {
    Check { status: Status::Warning, ..check }
}

pub async fn check_queries(path: &Path, config: &Config, servers: &Servers) -> Vec<Check> {
    let mut checks = Vec::new();
    if is_of_a_unit() {
        return checks;
    }
    let Ok(moves) = examine(&path_beside(path), config) else { return checks };
    for (place, import) in moves.imports.iter().enumerate() {
        let importer = match Importer::new(config, import, Pass::Rows, servers) {
            Ok(importer) => importer,
            Err(error) => {
                checks.push(warning(Check::failed(What::MysqlImports, error, MYSQL_AWAY, MYSQL_REFUSED)));
                continue;
            }
        };
        match importer.explain().await {
            Ok(plan) => checks.extend(plan.into_iter().map(|plan| match plan.fault() {
                None => Check::ok(What::MysqlImports, format!("{}: {plan}", import.name)),
                Some(fault) => Check::warning(
                    What::MysqlImports,
                    format!("{}: the query {fault}", import.name),
                    "add an index on target and user to the table, or import from a replica with such an index",
                ),
            })),
            Err(JobError::Refused(text)) => checks.push(Check {
                at: Some(moves.problem(Key::from("import").then(place).then("query"), text.clone())),
                ..Check::warning(
                    What::MysqlImports,
                    text,
                    "correct the query, or GRANT SELECT on its tables to the account",
                )
            }),
            Err(error) => {
                let away = "start the server, or correct its url in move.toml";
                checks.push(warning(Check::failed(What::MysqlImports, error.into_error(), away, MYSQL_REFUSED)));
            }
        }
        importer.close().await;
    }
    checks
}
