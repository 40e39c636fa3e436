//! Measures how fast a board is archived (compared with bare inserts), how much memory the archive needs, and how long
//! other Redis clients are delayed.

mod stall;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use common::command::{self, Ended};
use common::machine::Machine;
use common::report::{Aim, Results, median, print_figures};
use common::world::{Setup, World};
use serde::Serialize;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use stall::{Stalls, beside};
use tallyd_benches as common;
use tallyd_core::period::{Calendar, Period, PeriodKind};
use tallyd_redis::Cache;

const AIMS: [(&str, Aim); 2] = [("insert_ratio", Aim::AtLeast(0.85)), ("stall_extra_ms", Aim::AtMost(5.0))];

/// The board that the generated configuration defines.
const BOARD: &str = "bench";

/// The number of rows that one bare INSERT statement adds: as many as an archive page has.
const ROWS: u64 = 1_000;

/// Fill last week's board, then archive it with the real binary.
#[derive(Clone, Copy, Debug, Parser)]
struct Arguments {
    /// Number of members on the board.
    #[arg(long, default_value_t = 1_000_000)]
    members: u64,

    /// Number of members on a small board. Archiving the large board must not need more memory than archiving this
    /// small board.
    #[arg(long, default_value_t = 10_000)]
    small_members: u64,

    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Ran {
    /// The time until the board is copied and verified, in seconds.
    seconds: f64,
    /// Duration in seconds of a later run, which verifies the archive again and unlinks the board.
    end_s: f64,
    peak_rss_mib: f64,
}

/// The durations of two snapshots of one board. The first snapshot saves the whole board. Before the second snapshot,
/// one in a hundred members changes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Saved {
    first_s: f64,
    again_s: f64,
    peak_rss_mib: f64,
}

/// Details that the result file contains in addition to the figures.
#[derive(Default, Serialize)]
struct Seen {
    bare_s: Vec<f64>,
    archives: Vec<Ran>,
    small: Vec<Ran>,
    snapshots: Vec<Saved>,
    /// The longest Redis call of another client, in milliseconds: without other work, during an archive, and while a
    /// board with the same number of members expires.
    quiet_ms: Vec<f64>,
    archive_ms: Vec<f64>,
    snapshot_ms: Vec<f64>,
    expire_ms: Vec<f64>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run(arguments))
}

async fn run(arguments: Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let world = World::new("archive", Setup::default()).await?;
    let mut seen = Seen::default();
    let measured = measure(&world, arguments, &mut seen).await;
    world.close(measured).await?;
    let figures = figures(&seen, arguments.members);
    print_figures(&figures, &AIMS);
    let results = Results {
        figures,
        machine,
        arguments: std::env::args().skip(1).collect(),
        missing: BTreeMap::new(),
        results: seen,
    };
    results.write("archive")
}

async fn measure(world: &World, arguments: Arguments, seen: &mut Seen) -> Result<()> {
    let Arguments { members, small_members, rounds, .. } = arguments;
    for round in 1..=rounds {
        let bare_s = bare_inserts(world, members).await?;
        fill(world, small_members).await?;
        let small = archive(world, small_members).await?;
        fill(world, members).await?;
        let (ran, during) = beside(world, archive(world, members)).await?;
        let quiet = Duration::from_secs_f64(ran.seconds);
        let nothing = async {
            tokio::time::sleep(quiet).await;
            Ok::<(), anyhow::Error>(())
        };
        let (_, without) = beside(world, nothing).await?;
        let (saved, saving) = save(world, members).await?;
        let key = format!("{}:expiring", world.name);
        fill_key(world, &key, members).await?;
        let (_, expiring) = beside(world, expire(world, &key)).await?;
        println!(
            "round {round}: bare {bare_s:.1} s, archive {:.1} s, end {:.1} s, {:.0} MiB ({:.0} MiB for {small_members}); snapshot \
             {:.1} s, second snapshot {:.1} s; longest call {:.1} ms, in a snapshot {:.1} ms, without either {:.1} ms, at an EXPIRE {:.1} ms",
            ran.seconds,
            ran.end_s,
            ran.peak_rss_mib,
            small.peak_rss_mib,
            saved.first_s,
            saved.again_s,
            during.longest_ms,
            saving.longest_ms,
            without.longest_ms,
            expiring.longest_ms
        );
        seen.snapshots.push(saved);
        seen.snapshot_ms.push(saving.longest_ms);
        seen.bare_s.push(bare_s);
        seen.archives.push(ran);
        seen.small.push(small);
        for (kept, Stalls { longest_ms }) in
            [(&mut seen.quiet_ms, without), (&mut seen.archive_ms, during), (&mut seen.expire_ms, expiring)]
        {
            kept.push(longest_ms);
        }
    }
    Ok(())
}

fn figures(seen: &Seen, members: u64) -> BTreeMap<String, f64> {
    let archive_s = median(seen.archives.iter().map(|ran| ran.seconds));
    let quiet_ms = median(seen.quiet_ms.iter().copied());
    BTreeMap::from([
        ("rows_per_second".to_owned(), members as f64 / archive_s),
        ("insert_ratio".to_owned(), median(seen.bare_s.iter().copied()) / archive_s),
        ("stall_extra_ms".to_owned(), median(seen.archive_ms.iter().copied()) - quiet_ms),
        (
            "snapshot_rows_per_second".to_owned(),
            members as f64 / median(seen.snapshots.iter().map(|saved| saved.first_s)),
        ),
        ("snapshot_again_s".to_owned(), median(seen.snapshots.iter().map(|saved| saved.again_s))),
        ("snapshot_extra_ms".to_owned(), median(seen.snapshot_ms.iter().copied()) - quiet_ms),
        ("end_s".to_owned(), median(seen.archives.iter().map(|ran| ran.end_s))),
        ("expire_extra_ms".to_owned(), median(seen.expire_ms.iter().copied()) - quiet_ms),
        ("snapshot_rss_mib".to_owned(), median(seen.snapshots.iter().map(|saved| saved.peak_rss_mib))),
        ("peak_rss_mib".to_owned(), median(seen.archives.iter().map(|ran| ran.peak_rss_mib))),
        ("peak_rss_mib_small".to_owned(), median(seen.small.iter().map(|ran| ran.peak_rss_mib))),
    ])
}

fn last_week() -> Result<String> {
    let now = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC);
    Ok(now.previous().context("there is no week before this one")?.to_string())
}

/// Inserts as many rows as the archive has, with INSERT statements on one connection. Each statement inserts one page
/// of rows, and is a separate transaction.
async fn bare_inserts(world: &World, members: u64) -> Result<f64> {
    let mut connection = MySqlConnection::connect(world.config.mysql.url.expose()).await?;
    sqlx::raw_sql("CREATE TABLE bare LIKE leaderboard_archive").execute(&mut connection).await?;
    let began = Instant::now();
    let mut place = 0;
    while place < members {
        let until = members.min(place + ROWS);
        let rows: Vec<String> =
            (place + 1..=until).map(|place| format!("('bench','2026-W01',{place},'member-{place}',{place})")).collect();
        let sql = format!("INSERT INTO bare (board, period, place, member, score) VALUES {}", rows.join(","));
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
        place = until;
    }
    let seconds = began.elapsed().as_secs_f64();
    sqlx::raw_sql("DROP TABLE bare").execute(&mut connection).await?;
    Ok(seconds)
}

/// Fills last week's board, and empties its archive in MySQL.
async fn fill(world: &World, members: u64) -> Result<()> {
    sqlx::raw_sql("TRUNCATE leaderboard_archive; TRUNCATE leaderboard_period").execute(&world.pool).await?;
    fill_key(world, &Cache::new(&world.config.redis, &world.config.metrics)?.keys.board(BOARD, &last_week()?), members)
        .await
}

async fn fill_key(world: &World, key: &str, members: u64) -> Result<()> {
    let mut redis = world.redis().await?;
    let all: Vec<u64> = (1..=members).collect();
    for some in all.chunks(5_000) {
        let mut add = redis::cmd("ZADD");
        add.arg(key);
        for member in some {
            // The order of the scores must differ from the order of the members.
            add.arg(member.wrapping_mul(2_654_435_761) % 1_000_003).arg(format!("member-{member}"));
        }
        let () = add.query_async(&mut redis).await.context("fill the board")?;
    }
    Ok(())
}

/// Removes a board with EXPIRE, without archiving it.
async fn expire(world: &World, key: &str) -> Result<()> {
    let mut redis = world.redis().await?;
    let () = redis::cmd("PEXPIRE").arg(key).arg(1).query_async(&mut redis).await.context("expire the board")?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}

/// Runs `tallyd archive`. Runs the archive again when the board is due to be unlinked.
async fn archive(world: &World, members: u64) -> Result<Ran> {
    let Ended { seconds, peak_rss_mib, .. } = command::tallyd(world, &["archive"]).await?;
    sqlx::raw_sql("UPDATE leaderboard_period SET done_at = done_at - INTERVAL 1 YEAR").execute(&world.pool).await?;
    let ended = command::tallyd(world, &["archive"]).await?;
    let end_s = ended.seconds;
    let left: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM leaderboard_period WHERE state <> 'ended'")
        .fetch_one(&world.pool)
        .await?;
    ensure!(left == 0, "the board's state is not `ended`");
    let rows: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM leaderboard_archive").fetch_one(&world.pool).await?;
    ensure!(rows.unsigned_abs() == members, "{rows} rows instead of {members} members");
    Ok(Ran { seconds, end_s, peak_rss_mib: peak_rss_mib.max(ended.peak_rss_mib) })
}

/// Saves this week's board twice. Returns the longest time that another client waited during the first save.
async fn save(world: &World, members: u64) -> Result<(Saved, Stalls)> {
    let now = Period::containing(PeriodKind::Week, tallyd_base::runtime::clock::now(), &Calendar::UTC).to_string();
    let keys = Cache::new(&world.config.redis, &world.config.metrics)?.keys;
    let key = keys.board(BOARD, &now);
    fill_key(world, &key, members).await?;
    let (first, saving) = beside(world, command::tallyd(world, &["board", "snapshot"])).await?;
    let mut redis = world.redis().await?;
    for member in (1..=members).step_by(100) {
        let () = redis::cmd("ZINCRBY").arg(&key).arg(1).arg(format!("member-{member}")).query_async(&mut redis).await?;
    }
    let again = command::tallyd(world, &["board", "snapshot"]).await?;
    let rows: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM leaderboard_snapshot").fetch_one(&world.pool).await?;
    ensure!(rows.unsigned_abs() == members, "{rows} rows instead of {members} members");
    let () = redis::cmd("UNLINK")
        .arg(&key)
        .arg(keys.board_mark(BOARD, &now))
        .query_async(&mut redis)
        .await
        .context("unlink the board")?;
    sqlx::raw_sql("TRUNCATE leaderboard_snapshot; TRUNCATE leaderboard_snapshot_period").execute(&world.pool).await?;
    let peak_rss_mib = first.peak_rss_mib.max(again.peak_rss_mib);
    Ok((Saved { first_s: first.seconds, again_s: again.seconds, peak_rss_mib }, saving))
}
