//! Measures the cost of an event for several sizes of batches, with a hot target, and for several sizes of the table.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use sqlx::AssertSqlSafe;

use crate::Arguments;
use crate::common::contender::Contender;
use crate::common::machine::Machine;
use crate::common::model::Model;
use crate::common::report::{Results, number, print_table};
use crate::common::workload::USERS;
use crate::common::world::{Setup, World};
use crate::contenders::TALLYD;
use crate::drain::{self, Drained, Load};
use crate::rounds::{CELLS, Standing, cells, medians};

const BATCHES: [usize; 4] = [100, 1_000, 5_000, 20_000];

/// The number of targets in the rows of [`fill_table`]: all targets of the workload.
const TARGETS: u64 = 100_000;

/// One point of the curve.
struct Point {
    name: String,
    setup: Setup,
    hot: bool,
    rows_before: u64,
}

pub async fn run(arguments: &Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let models = [false, true].map(|hot| Model::of(crate::events(arguments.events, hot)));
    let points = points(arguments.preloaded_rows);
    let mut runs: BTreeMap<&str, Vec<Drained>> = BTreeMap::new();
    for _ in 0..arguments.rounds {
        for point in &points {
            let [plain, hot] = &models;
            let model = if point.hot { hot } else { plain };
            let load = Load { events: arguments.events, hot: point.hot, rows_before: point.rows_before, model };
            let drained = drain::run(&Contender::tallyd(TALLYD, 1), point.setup, load).await?;
            println!("{}: {} events/s", point.name, number(drained.events_per_second));
            runs.entry(&point.name).or_default().push(drained);
        }
    }
    let standings: BTreeMap<&str, Standing> = runs
        .into_iter()
        .map(|(name, runs)| (name, Standing { counters: true, median: medians(&runs), runs }))
        .collect();
    let in_order = points.iter().filter_map(|point| Some((&point.name, standings.get(point.name.as_str())?)));
    let rows: Vec<Vec<String>> =
        in_order.map(|(name, standing)| [vec![name.clone()], cells(&standing.median)].concat()).collect();
    println!("\ntallyd, one partition. Medians. Values in microseconds are CPU time per event.");
    print_table(&[["point"].as_slice(), &CELLS].concat(), &rows);
    let figures = standings.iter().map(|(name, standing)| (figure(name), standing.median.events_per_second)).collect();
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: standings }.write("ingest-curve")
}

fn points(rows_before: u64) -> Vec<Point> {
    let plain = |name: String| Point { name, setup: Setup::default(), hot: false, rows_before: 0 };
    let batches = BATCHES.map(|batch_events_max| Point {
        setup: Setup { batch_events_max, ..Setup::default() },
        ..plain(format!("batch {batch_events_max}"))
    });
    let mut points = Vec::from(batches);
    points.push(Point { hot: true, ..plain("hot target".to_owned()) });
    if rows_before > 0 {
        let [.., batch_events_max] = BATCHES;
        let setup = Setup { batch_events_max, ..Setup::default() };
        points.push(Point { rows_before, ..plain(format!("{rows_before} rows before")) });
        points.push(Point {
            rows_before,
            setup,
            ..plain(format!("{rows_before} rows before, batch {batch_events_max}"))
        });
    }
    points
}

fn figure(point: &str) -> String {
    format!("events_per_second_{}", point.replace(", ", "_").replace(' ', "_"))
}

/// Fills the table with rows of users that are not in the workload. The rows are spread evenly over the workload's
/// targets. Therefore, every event changes a random page of a large table.
pub async fn fill_table(world: &World, rows: u64) -> Result<()> {
    const ROWS_PER_STATEMENT: u64 = 10_000;
    let per_target = rows.div_ceil(TARGETS);
    let users = (1..=per_target).map(|user| USERS + user).collect::<Vec<_>>();
    let targets_per_statement = (ROWS_PER_STATEMENT / per_target).max(1);
    for from in (1..=TARGETS).step_by(usize::try_from(targets_per_statement)?) {
        let targets = from..(from + targets_per_statement).min(TARGETS + 1);
        let values: Vec<String> = targets
            .flat_map(|target| users.iter().map(move |user| format!("(1,{target},{user},0,'2026-01-01')")))
            .collect();
        let sql = format!(
            "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {}",
            values.join(",")
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.context("fill the table")?;
    }
    Ok(())
}
