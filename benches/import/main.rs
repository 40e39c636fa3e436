//! Measures the import and the verification of an old table, and how long they delay the old worker.

mod old;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use common::command::{self, Ended};
use common::machine::Machine;
use common::report::{Aim, Results, print_figures};
use common::world::{Setup, World};
use old::{Old, Shape, Tables, Waits};
use serde::Serialize;
use tallyd_benches as common;

/// The benchmark first measures the old worker for this time, while no import and no scan runs.
const QUIET: Duration = Duration::from_secs(30);

/// The number of rows in the large table, divided by the number of rows in each smaller table. The comparison with
/// smaller tables shows whether the import needs the same memory for any number of rows.
const PARTS: u64 = 4;

const AIMS: [(&str, Aim); 4] = [
    ("insert_ratio", Aim::AtLeast(0.35)),
    ("stall_extra_ms", Aim::AtMost(20.0)),
    ("peak_rss_mib", Aim::AtMost(64.0)),
    ("verify_ratio", Aim::AtMost(1.5)),
];

/// Fill a like table with another schema, and import it with the real binary while an old worker writes to it.
#[derive(Clone, Copy, Debug, Parser)]
struct Arguments {
    /// Number of rows in the old table. The benchmark also imports two smaller tables, and each smaller table has a
    /// quarter of these rows. The first smaller table has many targets. The second smaller table has one target.
    #[arg(long, default_value_t = 20_000_000, value_parser = clap::value_parser!(u64).range(100_000..=200_000_000))]
    rows: u64,

    /// The number of likes that the old worker writes each second.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    rate: u32,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The result of one step, measured while the old worker runs.
#[derive(Clone, Debug, Serialize)]
struct Step {
    seconds: f64,
    /// The peak memory in MiB. The value is 0 if the step is not a command of tallyd.
    peak_rss_mib: f64,
    waits: Waits,
}

#[derive(Serialize)]
struct Seen {
    rows: u64,
    quiet: Waits,
    bare: Step,
    import: Step,
    scans: Step,
    verify: Step,
    small_import: Step,
    one_target_import: Step,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let Arguments { rows, rate, .. } = arguments;
    println!("{rows} rows, {rate} likes a second: about {} minutes", (rows / 2_000_000).max(1));
    let machine = Machine::look().await?;
    let small_import = import_only("small", Shape::Spread, rows / PARTS, rate).await?;
    let one_target_import = import_only("one", Shape::OneTarget, rows / PARTS, rate).await?;
    let seen = whole(rows, rate, small_import, one_target_import).await?;
    let figures = figures(&seen);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: seen }.write("import")
}

async fn import_only(name: &str, shape: Shape, rows: u64, rate: u32) -> Result<Step> {
    let (world, old) = open(name, shape, rows).await?;
    let step = import(&world, &old, rate).await.with_context(|| format!("import of the table {name}"));
    close(world, old, step).await
}

async fn whole(rows: u64, rate: u32, small_import: Step, one_target_import: Step) -> Result<Seen> {
    let (world, old) = open("whole", Shape::Spread, rows).await?;
    let measured = async {
        let ((), quiet) = old
            .beside(rate, Tables::Old, async {
                tokio::time::sleep(QUIET).await;
                Ok(())
            })
            .await?;
        let bare = timed("bare INSERT ... SELECT", &old, rate, old.copy_bare(&world)).await?;
        old.drop_bare(&world).await?;
        let import = import(&world, &old, rate).await?;
        let scans = timed("both scans", &old, rate, old.scan_both(&world)).await?;
        old.catch_up(&world).await?;
        // If the command finds a difference, it exits with 2. In that case this benchmark fails.
        let verify = run(&world, &old, (rate, Tables::Both), &["import", "old", "--verify"]).await?;
        Ok(Seen { rows, quiet, bare, import, scans, verify, small_import, one_target_import })
    };
    let measured = measured.await;
    close(world, old, measured).await
}

async fn open(name: &str, shape: Shape, rows: u64) -> Result<(World, Old)> {
    let world = World::new(&format!("import_{name}"), Setup::default()).await?;
    let old = Old::fill(&world, shape, rows).await.context("fill the old table")?;
    let config = std::fs::read_to_string(world.config_path())?;
    std::fs::write(world.config_path(), config + &old.block())?;
    Ok((world, old))
}

async fn close<T>(world: World, old: Old, measured: Result<T>) -> Result<T> {
    let dropped = old.drop().await;
    world.close(measured.and_then(|measured| dropped.map(|()| measured))).await
}

/// Imports the whole table, and checks that all rows are imported.
async fn import(world: &World, old: &Old, rate: u32) -> Result<Step> {
    let step = run(world, old, (rate, Tables::Old), &["import", "old"]).await?;
    let written: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM like_record").fetch_one(&world.pool).await?;
    ensure!(written.cast_unsigned() >= old.rows, "{written} rows instead of {} were imported", old.rows);
    Ok(step)
}

/// Runs a command of the real binary while the old worker runs.
async fn run(world: &World, old: &Old, (rate, tables): (u32, Tables), arguments: &[&str]) -> Result<Step> {
    let (Ended { seconds, peak_rss_mib, .. }, waits) =
        old.beside(rate, tables, command::tallyd(world, arguments)).await?;
    let step = Step { seconds, peak_rss_mib, waits };
    println!("tallyd {}: {step:?}", arguments.join(" "));
    Ok(step)
}

/// Measures `work` while the old worker runs.
async fn timed(what: &str, old: &Old, rate: u32, work: impl Future<Output = Result<()>>) -> Result<Step> {
    let began = Instant::now();
    let ((), waits) = old.beside(rate, Tables::Old, work).await?;
    let step = Step { seconds: began.elapsed().as_secs_f64(), peak_rss_mib: 0.0, waits };
    println!("{what}: {step:?}");
    Ok(step)
}

fn figures(seen: &Seen) -> BTreeMap<String, f64> {
    let Seen { rows, quiet, bare, import, scans, verify, small_import, one_target_import } = seen;
    let rss = |steps: &[&Step]| steps.iter().map(|step| step.peak_rss_mib).fold(0.0, f64::max);
    let figures = [
        ("insert_ratio", bare.seconds / import.seconds),
        ("rows_per_s", *rows as f64 / import.seconds),
        ("bare_rows_per_s", *rows as f64 / bare.seconds),
        ("stall_extra_ms", (import.waits.longest_ms - quiet.longest_ms).max(0.0)),
        ("bare_stall_extra_ms", (bare.waits.longest_ms - quiet.longest_ms).max(0.0)),
        ("peak_rss_mib", rss(&[import, verify, small_import, one_target_import])),
        ("small_peak_rss_mib", small_import.peak_rss_mib),
        ("one_target_peak_rss_mib", one_target_import.peak_rss_mib),
        ("verify_ratio", verify.seconds / scans.seconds),
    ];
    figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
