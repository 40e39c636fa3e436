//! Measures the gateway's speed and memory, compared with a bare HTTP handler that publishes the same messages.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use common::cpu::{Processes, peak_rss_mib};
use common::daemon::Daemon;
use common::http::load;
use common::http::server::{BareHandler, Kind, Server};
use common::machine::Machine;
use common::preload::rest;
use common::report::{Aim, Results, median, number, print_figures};
use common::wait::until;
use common::world::{Setup, World, stack};
use serde::Serialize;
use tallyd_benches as common;
use tokio::time::Instant;

const AIMS: [(&str, Aim); 2] = [("gateway_ratio", Aim::AtLeast(1.4)), ("gateway_lists_ratio", Aim::AtLeast(0.8))];

/// The number of events in a request with a list.
const LIST: u64 = 100;

/// Send likes to the gateway and to a bare handler in turn: first one like per request, then lists of 100 likes. At the
/// end, a daemon must have written all likes.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of events that each run sends with one event per request.
    #[arg(long, default_value_t = 100_000)]
    events: u64,

    /// Number of events that each run sends in lists.
    #[arg(long, default_value_t = 200_000)]
    list_events: u64,

    /// Connections. Number of connections. Each connection sends its next request after the answer to the previous
    /// request.
    #[arg(long, default_value_t = 256)]
    connections: u64,

    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    #[command(flatten)]
    bare: BareHandler,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Ran {
    events_per_s: f64,
    /// CPU time of the server and of RabbitMQ, in microseconds for each event.
    server_us: f64,
    rabbitmq_us: f64,
    /// CPU time of everything else: the load generator, Redis, and the kernel.
    others_us: f64,
    peak_rss_mib: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Round {
    gateway: Ran,
    bare: Ran,
    gateway_lists: Ran,
    bare_lists: Ran,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.bare.has_served().await? { Ok(()) } else { run(&arguments).await }
}

async fn run(arguments: &Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let mut rounds = Vec::new();
    for count in 1..=arguments.rounds {
        let round = Round {
            gateway: measure(Kind::Gateway, arguments, 1).await?,
            bare: measure(Kind::Bare, arguments, 1).await?,
            gateway_lists: measure(Kind::Gateway, arguments, LIST).await?,
            bare_lists: measure(Kind::Bare, arguments, LIST).await?,
        };
        println!("round {count}, in microseconds for each event:");
        say("gateway", &round.gateway);
        say("bare", &round.bare);
        say("gateway, lists", &round.gateway_lists);
        say("bare, lists", &round.bare_lists);
        rounds.push(round);
    }
    let figures = figures(&rounds);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: rounds }.write("gateway")
}

fn say(name: &str, ran: &Ran) {
    println!(
        "  {name}: {}/s, server {}, RabbitMQ {}, everything else {}, {} MiB",
        number(ran.events_per_s),
        number(ran.server_us),
        number(ran.rabbitmq_us),
        number(ran.others_us),
        number(ran.peak_rss_mib)
    );
}

fn figures(rounds: &[Round]) -> BTreeMap<String, f64> {
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
    let most = |value: fn(&Round) -> f64| rounds.iter().map(value).fold(0.0, f64::max);
    BTreeMap::from([
        ("gateway_per_s".to_owned(), of(|round| round.gateway.events_per_s)),
        ("bare_per_s".to_owned(), of(|round| round.bare.events_per_s)),
        ("gateway_ratio".to_owned(), of(|round| round.gateway.events_per_s / round.bare.events_per_s)),
        ("gateway_lists_per_s".to_owned(), of(|round| round.gateway_lists.events_per_s)),
        ("bare_lists_per_s".to_owned(), of(|round| round.bare_lists.events_per_s)),
        (
            "gateway_lists_ratio".to_owned(),
            of(|round| round.gateway_lists.events_per_s / round.bare_lists.events_per_s),
        ),
        ("gateway_rss_mib".to_owned(), most(|round| round.gateway.peak_rss_mib.max(round.gateway_lists.peak_rss_mib))),
    ])
}

async fn measure(kind: Kind, arguments: &Arguments, list: u64) -> Result<Ran> {
    let world = World::new("gateway", Setup::default()).await?;
    let ran = measure_in(&world, kind, arguments, list).await.with_context(|| format!("{kind:?}, lists of {list}"));
    world.close(ran).await
}

async fn measure_in(world: &World, kind: Kind, arguments: &Arguments, list: u64) -> Result<Ran> {
    let requests = if list == 1 { arguments.events } else { arguments.list_events / list };
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    let server = Server::start(world, kind).await?;
    // The first request makes the server open its connections.
    load::send(&server.address, 1, 1, 202, move |number| load::likes(number, list)).await?;
    rest(servers).await?;
    let (began, before) = (Instant::now(), servers.used(Some(server.pid()?))?);
    load::send(&server.address, arguments.connections, requests, 202, move |number| load::likes(number, list)).await?;
    let seconds = began.elapsed().as_secs_f64();
    let used = servers.used(Some(server.pid()?))?.since(before);
    let daemon = Daemon::start(world, &[])?;
    let rows = "SELECT COUNT(*) FROM like_record";
    let all = async || Ok(sqlx::query_scalar::<_, i64>(rows).fetch_one(&world.pool).await? as u64 == requests * list);
    until("MySQL has all likes", Duration::from_secs(60), Duration::from_millis(100), all).await?;
    drop(daemon);
    let events = (requests * list) as f64;
    Ok(Ran {
        events_per_s: events / seconds,
        server_us: used.consumer as f64 / events,
        rabbitmq_us: used.rabbitmq as f64 / events,
        others_us: used.machine.saturating_sub(used.consumer + used.rabbitmq) as f64 / events,
        peak_rss_mib: peak_rss_mib(server.pid()?)?,
    })
}
