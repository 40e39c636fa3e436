//! Measures the cost of a like for an API server, compared with a bare INCR, and the time to read a page of counters.

mod filtered;
mod published;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use clap::builder::ArgPredicate;
use common::machine::Machine;
use common::report::{Aim, Results, median, print_figures};
use common::world::{Setup, World};
use futures_util::{StreamExt, TryStreamExt, stream};
use redis::aio::MultiplexedConnection;
use serde::Serialize;
use tallyd_benches as common;
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tallyd_core::rules::Writes;
use tallyd_redis::Cache;
use tallyd_testkit::scripts::ApiServer;

const AIMS: [(&str, Aim); 2] = [("like_server_cpu_us", Aim::AtMost(5.0)), ("likes_per_s", Aim::AtLeast(1_800.0))];

/// A message body that is as long as an event.
const BODY: &[u8] =
    br#"{"type":"like","kind":"video","target_id":"42","user_id":"7","at":1795251385004538,"count":12}"#;

/// Number of calls of the script in one pipeline.
const PIPELINE: usize = 128;

/// Number of targets that users like.
const TARGETS: u64 = 10_000;

/// Send likes through the client, with their events, then read pages of counters.
#[derive(Clone, Copy, Debug, Parser)]
struct Arguments {
    /// Measure likes that the daemon counts: the rate and the delay from the client to Redis.
    #[arg(long)]
    published: bool,

    /// Number of likes of each kind in a round (200000 with --published).
    #[arg(long, default_value_t = 30_000, default_value_if("published", ArgPredicate::IsPresent, "200000"))]
    likes: u64,

    /// Number of likes in flight at the same time (1000 with --published).
    #[arg(long, default_value_t = 64, default_value_if("published", ArgPredicate::IsPresent, "1000"))]
    at_once: usize,

    /// Number of partitions (only with --published).
    #[arg(long, default_value_t = 1)]
    partitions: u16,

    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The rate of an operation, and its CPU time in Redis.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Rate {
    per_s: f64,
    redis_cpu_us: f64,
}

/// The times to read a page of targets, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Page {
    targets: usize,
    /// The time to read the counters of the targets.
    counters_ms: f64,
    /// The time to find the targets that a user likes. In this measurement, the likes are in Redis. For `rows_ms`, the
    /// likes are only in MySQL.
    recent_ms: f64,
    rows_ms: f64,
    /// The time to find the targets that a user likes, if filters show that the user likes none of them.
    filtered_ms: f64,
    /// The time to send one GET for each target, one after the other.
    gets_ms: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Round {
    /// One INCR and one confirmed publish for each like.
    bare: Rate,
    /// The client counts the like without a check for duplicates, and publishes it.
    blind: Rate,
    /// The user's first click on the target. The click needs a query to MySQL.
    first: Rate,
    /// The user's first click on the target, which has a Bloom filter. Almost no such click needs a query to MySQL.
    filtered: Rate,
    /// A later click of the user on the target. Redis still has the previous click.
    again: Rate,
    /// Calls only the script, 128 times in a pipeline: first without a check of recent clicks, then with this check.
    script_blind: Rate,
    script: Rate,
    pages: Vec<Page>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if arguments.published { runtime.block_on(published::run(arguments)) } else { runtime.block_on(run(arguments)) }
}

async fn run(arguments: Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let mut rounds = Vec::new();
    for number in 1..=arguments.rounds {
        let world = World::new("like", Setup { likes_by: Writes::Api, ..Setup::default() }).await?;
        let measured = measure(&world, arguments, number as u64).await;
        let round = world.close(measured).await?;
        println!(
            "round {number}: bare {:.0}/s, blind {:.0}/s, first {:.0}/s, with a filter {:.0}/s, again {:.0}/s; microseconds of Redis: script {:.1}, blind {:.1}, \
             like with its connection {:.1}, INCR with its connection {:.1}",
            round.bare.per_s,
            round.blind.per_s,
            round.first.per_s,
            round.filtered.per_s,
            round.again.per_s,
            round.script.redis_cpu_us,
            round.script_blind.redis_cpu_us,
            round.again.redis_cpu_us,
            round.bare.redis_cpu_us
        );
        for page in &round.pages {
            println!(
                "  page of {}: counters {:.2} ms, a user's likes {:.2} ms (from MySQL {:.2} ms, with filters {:.2} ms), single GETs {:.2} ms",
                page.targets, page.counters_ms, page.recent_ms, page.rows_ms, page.filtered_ms, page.gets_ms
            );
        }
        rounds.push(round);
    }
    let figures = figures(&rounds);
    print_figures(&figures, &AIMS);
    let results = Results {
        figures,
        machine,
        arguments: std::env::args().skip(1).collect(),
        missing: BTreeMap::new(),
        results: rounds,
    };
    results.write("like")
}

fn figures(rounds: &[Round]) -> BTreeMap<String, f64> {
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
    let page = |round: &Round, targets: usize, value: fn(&Page) -> f64| {
        round.pages.iter().find(|page| page.targets == targets).map_or(f64::NAN, value)
    };
    let pages = |targets, value| median(rounds.iter().map(|round| page(round, targets, value)));
    BTreeMap::from([
        ("likes_per_s".to_owned(), of(|round| round.first.per_s)),
        ("filtered_likes_per_s".to_owned(), of(|round| round.filtered.per_s)),
        ("filtered_first_ratio".to_owned(), of(|round| round.filtered.per_s / round.first.per_s)),
        ("again_per_s".to_owned(), of(|round| round.again.per_s)),
        ("bare_ratio".to_owned(), of(|round| round.first.per_s / round.bare.per_s)),
        ("again_bare_ratio".to_owned(), of(|round| round.again.per_s / round.bare.per_s)),
        ("like_server_cpu_us".to_owned(), of(|round| round.script.redis_cpu_us)),
        ("blind_server_cpu_us".to_owned(), of(|round| round.script_blind.redis_cpu_us)),
        ("page_20_ms".to_owned(), pages(20, |page| page.counters_ms)),
        ("page_20_ratio".to_owned(), pages(20, |page| page.counters_ms / page.gets_ms)),
        ("page_100_ratio".to_owned(), pages(100, |page| page.counters_ms / page.gets_ms)),
        ("status_20_ms".to_owned(), pages(20, |page| page.recent_ms)),
        ("status_20_rows_ms".to_owned(), pages(20, |page| page.rows_ms)),
        ("status_20_filtered_ms".to_owned(), pages(20, |page| page.filtered_ms)),
        ("status_100_rows_ms".to_owned(), pages(100, |page| page.rows_ms)),
    ])
}

fn target(number: u64) -> Target {
    Target { kind: Kind(1), id: TargetId(1 + number % TARGETS) }
}

/// Returns the user of a like. No two likes of a target are from the same user.
fn user(number: u64) -> UserId {
    UserId(1 + number / TARGETS)
}

async fn measure(world: &World, arguments: Arguments, round: u64) -> Result<Round> {
    // Redis remembers the users of the previous round.
    let user = |number: u64| UserId(round * (1 << 32) + user(number).0);
    let client = ApiServer::new(&world.config);
    let by_filter = ApiServer::new(&filtered::prepare(world).await?);
    let publisher = world.broker.connect_publisher("bench").await?;
    let mut redis = world.redis().await?;
    let shared = redis.clone();
    let bare = rate(&mut redis, arguments, async |number| {
        let key = format!("{}:bare:{}", world.name, target(number).id);
        let () = redis::cmd("INCR").arg(key).query_async(&mut shared.clone()).await?;
        Ok(publisher.publish(&world.broker.exchange(), &user(number).to_string(), BODY).await?)
    });
    let bare = bare.await?;
    let blind = rate(&mut redis, arguments, async |number| {
        let counted = client.count(target(number), user(number), true, &[]).await?;
        Ok(client.publish_counted(&counted).await?)
    });
    let blind = blind.await?;
    let first = rate(&mut redis, arguments, async |number| {
        let clicked = client.like(target(number), user(number), &[]).await?;
        ensure!(clicked.counted().is_some(), "a first like did not count");
        Ok(())
    });
    let first = first.await?;
    // These users have not clicked before. After a target's first like, the client knows the size of the target's
    // filter.
    let filtered = rate(&mut redis, arguments, async |number| {
        let clicked = by_filter.like(target(number), UserId(user(number).0 + (1 << 31)), &[]).await?;
        ensure!(clicked.counted().is_some(), "a first like did not count");
        Ok(())
    });
    let filtered = filtered.await?;
    let again = rate(&mut redis, arguments, async |number| {
        let clicked = client.unlike(target(number), user(number), &[]).await?;
        ensure!(clicked.counted().is_some(), "an unlike did not count");
        Ok(())
    });
    let again = again.await?;
    let script_blind = script(&mut redis, world, arguments, None).await?;
    let script = script(&mut redis, world, arguments, Some(round)).await?;
    let mut pages = Vec::new();
    for targets in [20, 100] {
        pages.push(page([&client, &by_filter], &mut redis, world, targets).await?);
    }
    Ok(Round { bare, blind, first, filtered, again, script_blind, script, pages })
}

/// Calls lua/like.lua in pipelines, either for users whose clicks Redis remembers, or without a check of recent clicks.
async fn script(
    redis: &mut MultiplexedConnection,
    world: &World,
    arguments: Arguments,
    round: Option<u64>,
) -> Result<Rate> {
    let keys = Cache::new(&world.config.redis, &world.config.metrics)?.keys;
    let text = include_str!("../../lua/like.lua");
    let hash: String = redis::cmd("SCRIPT").arg("LOAD").arg(text).query_async(redis).await?;
    let mut pipelines = Vec::new();
    for from in (0..arguments.likes).step_by(PIPELINE) {
        let mut pipeline = redis::pipe();
        for number in from..arguments.likes.min(from + PIPELINE as u64) {
            let target = target(number);
            let bucket = keys.bucket(target);
            let call = pipeline.cmd("EVALSHA").arg(&hash).arg(if round.is_some() { 3 } else { 1 });
            call.arg(keys.counters("video", bucket));
            if round.is_some() {
                call.arg(&keys.recent("video", bucket));
            }
            call.arg(target.id.0).arg(1).arg("like");
            if let Some(round) = round {
                call.arg(round * (1 << 32) + user(number).0).arg(120).arg("");
            }
            call.ignore();
        }
        pipelines.push(pipeline);
    }
    let before = cpu_us(redis).await?;
    let began = Instant::now();
    for pipeline in &pipelines {
        let () = pipeline.query_async(redis).await?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let used = cpu_us(redis).await? - before;
    Ok(Rate { per_s: arguments.likes as f64 / seconds, redis_cpu_us: used / arguments.likes as f64 })
}

/// Runs the operation once for each number in the range, with a fixed number of operations in flight.
async fn rate(
    redis: &mut MultiplexedConnection,
    arguments: Arguments,
    work: impl AsyncFn(u64) -> Result<()>,
) -> Result<Rate> {
    let before = cpu_us(redis).await?;
    let began = Instant::now();
    stream::iter(0..arguments.likes)
        .map(|number| work(number))
        .buffer_unordered(arguments.at_once)
        .try_collect::<()>()
        .await?;
    let seconds = began.elapsed().as_secs_f64();
    let used = cpu_us(redis).await? - before;
    Ok(Rate { per_s: arguments.likes as f64 / seconds, redis_cpu_us: used / arguments.likes as f64 })
}

/// Returns the CPU time of Redis since its start.
async fn cpu_us(redis: &mut MultiplexedConnection) -> Result<f64> {
    let info: String = redis::cmd("INFO").arg("cpu").query_async(redis).await?;
    let value = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|seconds| seconds.trim().parse::<f64>().ok()).with_context(|| format!("INFO has no {name}"))
    };
    Ok((value("used_cpu_user:")? + value("used_cpu_sys:")?) * 1e6)
}

/// Returns the median duration of some calls, in milliseconds.
async fn timed(work: impl AsyncFn() -> Result<()>) -> Result<f64> {
    let mut took = Vec::new();
    for _ in 0..50 {
        let began = Instant::now();
        work().await?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(took))
}

async fn page(
    [client, by_filter]: [&ApiServer; 2],
    redis: &mut MultiplexedConnection,
    world: &World,
    count: usize,
) -> Result<Page> {
    let targets: Vec<Target> = (0..count as u64).map(target).collect();
    let shared = redis.clone();
    // Marks the buckets as loaded, as a daemon does. Without this mark, clients would read everything from MySQL.
    let keys = Cache::new(&world.config.redis, &world.config.metrics)?.keys;
    for bucket in 0..keys.buckets() {
        let () = redis::cmd("HSET").arg(keys.counters("video", bucket)).arg("_").arg("1:1").query_async(redis).await?;
    }
    let counters_ms = timed(async || Ok(client.read(&targets).await.map(drop)?)).await?;
    let recent_ms = timed(async || Ok(client.liked(user(0), &targets).await.map(drop)?)).await?;
    // This user has not clicked on any target.
    let rows_ms = timed(async || Ok(client.liked(UserId(1 << 40), &targets).await.map(drop)?)).await?;
    let filtered_ms = timed(async || Ok(by_filter.liked(UserId(1 << 41), &targets).await.map(drop)?)).await?;
    let gets_ms = timed(async || {
        for target in &targets {
            let key = format!("{}:bare:{}", world.name, target.id);
            let _: Option<String> = redis::cmd("GET").arg(key).query_async(&mut shared.clone()).await?;
        }
        Ok(())
    });
    Ok(Page { targets: count, counters_ms, recent_ms, rows_ms, filtered_ms, gets_ms: gets_ms.await? })
}
