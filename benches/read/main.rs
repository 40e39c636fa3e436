//! Measures reads of counters through the client and the gateway, compared with bare pipelined reads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Parser;
use common::cpu::Processes;
use common::http::bare::Reader;
use common::http::load;
use common::http::server::{BareHandler, Kind, Server};
use common::machine::Machine;
use common::preload::rest;
use common::report::{Aim, Results, median, number, print_figures};
use common::world::{Setup, World, stack};
use serde::Serialize;
use tallyd_benches as common;
use tallyd_client::Client;
use tallyd_core::keys::LOADED;
use tallyd_core::model::{Kind as KindCode, Metric, Target, TargetId};
use tallyd_redis::Cache;
use tokio::task::JoinSet;

const AIMS: [(&str, Aim); 2] = [("client_ratio", Aim::AtLeast(0.8)), ("gateway_ratio", Aim::AtLeast(0.8))];

/// The number of targets that have likes.
const TARGETS: u64 = 100_000;

/// The number of targets in a list.
const LIST: u64 = 50;

/// Read lists of 50 counters: with the Rust client and with bare pipelines, then through the gateway and a bare handler.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of lists that each reader reads.
    #[arg(long, default_value_t = 40_000)]
    lists: u64,

    /// Number of lists in flight at the same time, and of connections to the gateway. All readers of a process share one
    /// connection to Redis.
    #[arg(long, default_value_t = 16)]
    at_once: u64,

    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,

    #[command(flatten)]
    bare: BareHandler,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Counters a second.
#[derive(Clone, Copy, Debug, Serialize)]
struct Round {
    client: f64,
    pipeline: f64,
    gateway: f64,
    bare: f64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.bare.has_served().await? { Ok(()) } else { run(&arguments).await }
}

async fn run(arguments: &Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let world = World::new("read", Setup::default()).await?;
    let measured = measure(&world, arguments).await;
    let rounds = world.close(measured).await?;
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
    let figures = BTreeMap::from([
        ("client_per_s".to_owned(), of(|round| round.client)),
        ("pipeline_per_s".to_owned(), of(|round| round.pipeline)),
        ("client_ratio".to_owned(), of(|round| round.client / round.pipeline)),
        ("gateway_per_s".to_owned(), of(|round| round.gateway)),
        ("bare_per_s".to_owned(), of(|round| round.bare)),
        ("gateway_ratio".to_owned(), of(|round| round.gateway / round.bare)),
    ]);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: rounds }.write("read")
}

async fn measure(world: &World, arguments: &Arguments) -> Result<Vec<Round>> {
    fill(world).await?;
    let client = Arc::new(tallyd_testkit::client_of(&world.config));
    let reader = Reader::new(&world.config).await?;
    let [gateway, bare] = [Server::start(world, Kind::Gateway).await?, Server::start(world, Kind::Bare).await?];
    assert_equal(&client, &reader, [&gateway, &bare]).await?;
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    let mut rounds = Vec::new();
    for count in 1..=arguments.rounds {
        rest(servers).await?;
        let round = Round {
            client: by_client(&client, arguments).await?,
            pipeline: by_pipeline(&reader, arguments).await?,
            gateway: over_http(&gateway, arguments).await?,
            bare: over_http(&bare, arguments).await?,
        };
        println!(
            "round {count}, counters a second: client {}, pipeline {}, gateway {}, bare handler {}",
            number(round.client),
            number(round.pipeline),
            number(round.gateway),
            number(round.bare)
        );
        rounds.push(round);
    }
    Ok(rounds)
}

/// Writes a counter for each target, in a loaded bucket.
async fn fill(world: &World) -> Result<()> {
    let cache = Cache::new(&world.config.redis, &world.config.metrics)?;
    let mut redis = world.redis().await?;
    for ids in (1..=TARGETS).collect::<Vec<_>>().chunks(1_000) {
        let mut pipeline = redis::pipe();
        for id in ids {
            let key = cache.keys.counters("video", cache.keys.bucket(target(*id)));
            pipeline.hset(&key, LOADED, "1:1").ignore().hset(&key, *id, likes(*id)).ignore();
        }
        let () = pipeline.query_async(&mut redis).await?;
    }
    Ok(())
}

fn target(id: u64) -> Target {
    Target { kind: KindCode(1), id: TargetId(id) }
}

fn likes(id: u64) -> i64 {
    i64::try_from(id * 7_919 % 10_007).unwrap_or(0)
}

/// Returns the ids of a list: spread over all buckets, others in each list.
fn ids(list: u64) -> impl Iterator<Item = u64> {
    (0..LIST).map(move |place| 1 + (list * LIST + place) * 7_919 % TARGETS)
}

/// Fails unless all readers return the right numbers.
async fn assert_equal(client: &Client, reader: &Reader, servers: [&Server; 2]) -> Result<()> {
    let asked: Vec<u64> = ids(0).collect();
    let right: Vec<Option<i64>> = asked.iter().map(|id| Some(likes(*id))).collect();
    let targets: Vec<Target> = asked.iter().map(|id| target(*id)).collect();
    let read = client.read(&targets).await?;
    let read: Vec<Option<i64>> = read.iter().map(|numbers| Some(numbers.get(Metric(1))?.value)).collect();
    ensure!(read == right, "the client reads {read:?}");
    let read = reader.likes(&asked).await?;
    ensure!(read == right, "the pipeline reads {read:?}");
    let [gateway, bare] = servers.map(|server| &server.address);
    let request = load::counters(asked.into_iter());
    let (gateway, bare) = (load::ask(gateway, &request).await?, load::ask(bare, &request).await?);
    ensure!(gateway == bare, "the gateway answers {gateway}, the bare handler answers {bare}");
    Ok(())
}

async fn by_client(client: &Arc<Client>, arguments: &Arguments) -> Result<f64> {
    let client = Arc::clone(client);
    let read = move |list| {
        let client = Arc::clone(&client);
        async move {
            let targets: Vec<Target> = ids(list).map(target).collect();
            let read = client.read(&targets).await?;
            Ok(read.iter().filter_map(|numbers| Some(numbers.get(Metric(1))?.value)).count())
        }
    };
    per_second(arguments, read).await
}

async fn by_pipeline(reader: &Reader, arguments: &Arguments) -> Result<f64> {
    let reader = reader.clone();
    let read = move |list| {
        let reader = reader.clone();
        async move {
            let asked: Vec<u64> = ids(list).collect();
            Ok(reader.likes(&asked).await?.into_iter().flatten().count())
        }
    };
    per_second(arguments, read).await
}

/// Reads all lists, and returns the number of counters a second. `read` returns how many counters of a list it has read.
async fn per_second<R, F>(arguments: &Arguments, read: R) -> Result<f64>
where
    R: Fn(u64) -> F + Clone + Send + 'static,
    F: Future<Output = Result<usize>> + Send,
{
    let (next, lists, mut all) = (Arc::new(AtomicU64::new(0)), arguments.lists, JoinSet::new());
    let began = Instant::now();
    for _ in 0..arguments.at_once {
        let (next, read) = (Arc::clone(&next), read.clone());
        all.spawn(async move {
            loop {
                let list = next.fetch_add(1, Ordering::Relaxed);
                if list >= lists {
                    return anyhow::Ok(());
                }
                ensure!(read(list).await? == LIST as usize, "a number of list {list} is unknown");
            }
        });
    }
    while let Some(ended) = all.join_next().await {
        ended??;
    }
    Ok((lists * LIST) as f64 / began.elapsed().as_secs_f64())
}

async fn over_http(server: &Server, arguments: &Arguments) -> Result<f64> {
    let began = Instant::now();
    load::send(&server.address, arguments.at_once, arguments.lists, 200, |list| load::counters(ids(list))).await?;
    Ok((arguments.lists * LIST) as f64 / began.elapsed().as_secs_f64())
}
