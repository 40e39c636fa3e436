//! The questions of `tallyd config check` about `[[recount]]`.

use crate::Recounter;
use tallyd_base::cli::check::{Check, MYSQL_AWAY, MYSQL_REFUSED, What};
use tallyd_base::config::{Config, Key, Problem, Recount};
use tallyd_base::jobs::JobError;
use tallyd_base::servers::Servers;
use tallyd_mysql::site_query::Plan;

pub async fn check(config: &Config, servers: &Servers) -> Vec<Check> {
    let mut checks = Vec::new();
    for (place, recount) in config.recounts.iter().enumerate() {
        let key = Key::from("recount").then(place).then("query");
        match explained(config, recount, servers).await {
            Ok(lines) => checks.extend(
                lines.into_iter().map(|line| Check::ok(What::MysqlRecounts, format!("{}: {line}", recount.name()))),
            ),
            Err(JobError::Refused(text)) => checks.push(Check {
                at: Some(Problem { origin: None, key: Some(key), text: text.clone() }),
                ..Check::error(
                    What::MysqlRecounts,
                    text,
                    "correct the query, or GRANT SELECT on its tables to the account",
                )
            }),
            Err(error) => {
                checks.push(Check::failed(What::MysqlRecounts, error.into_error(), MYSQL_AWAY, MYSQL_REFUSED));
            }
        }
    }
    checks
}

async fn explained(config: &Config, recount: &Recount, servers: &Servers) -> Result<Vec<Plan>, JobError> {
    Recounter::new(config, recount)?.explain(&servers.store).await
}
