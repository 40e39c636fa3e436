//! Measures the time without a consumer after a daemon stops, crashes, freezes, or loses its network.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde::Serialize;
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tallyd_rabbitmq::Publisher;
use tokio::task::JoinHandle;

use common::daemon::Daemon;
use common::machine::Machine;
use common::preload;
use common::relay::Relay;
use common::report::{Aim, Results, median, print_figures};
use common::wait;
use common::world::{Setup, World};
use tallyd_benches as common;

const PARTITIONS: u16 = 4;

/// Time between two reads of the partitions' owners.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The benchmark waits this long for a daemon to start consuming. A daemon needs about a tenth of a second. The
/// benchmark can't check RabbitMQ's number of consumers instead, because RabbitMQ does not count waiting consumers.
const LISTENS_AFTER: Duration = Duration::from_secs(3);

const LIMIT: Duration = Duration::from_secs(120);

/// Number of events before the fault. From these events, a daemon learns the size of messages.
const FIRST: u64 = 10_000;

/// The limits apply to the medians of all rounds. No limit applies to the time of a handover after SIGTERM.
const AIMS: [(&str, Aim); 3] = [
    ("takeover_kill_ms", Aim::AtMost(5_000.0)),
    ("takeover_stop_ms", Aim::AtMost(30_000.0)),
    ("takeover_cut_ms", Aim::AtMost(30_000.0)),
];

/// Two daemons share four partitions under load. The second daemon takes over the partitions of the first daemon.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,

    /// Events a second.
    #[arg(long, default_value_t = 500)]
    rate: u64,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The way in which the first daemon stops or fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum How {
    /// SIGTERM.
    Handover,
    /// SIGKILL.
    Kill,
    /// SIGSTOP.
    Stop,
    /// No data goes to or from this daemon.
    Cut,
}

impl How {
    const ALL: [Self; 4] = [Self::Handover, Self::Kill, Self::Stop, Self::Cut];

    fn figure(self) -> &'static str {
        match self {
            Self::Handover => "handover_ms",
            Self::Kill => "takeover_kill_ms",
            Self::Stop => "takeover_stop_ms",
            Self::Cut => "takeover_cut_ms",
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let mut took: BTreeMap<How, Vec<f64>> = BTreeMap::new();
    for how in How::ALL {
        for round in 1..=arguments.rounds {
            let ms = measure(how, arguments.rate).await.with_context(|| format!("{how:?}, round {round}"))?;
            println!("{how:?}, round {round}: {ms:.0} ms");
            took.entry(how).or_default().push(ms);
        }
    }
    let figures = took.iter().map(|(how, ms)| (how.figure().to_owned(), median(ms.iter().copied()))).collect();
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: took }.write("takeover")
}

/// Returns the milliseconds until the second daemon has written every partition.
async fn measure(how: How, rate: u64) -> Result<f64> {
    let world = World::new("takeover", Setup { partitions: PARTITIONS, ..Setup::default() }).await?;
    let took = measure_in(&world, how, rate).await;
    world.close(took).await
}

async fn measure_in(world: &World, how: How, rate: u64) -> Result<f64> {
    let publisher = Arc::new(world.broker.connect_publisher("bench").await?);
    let sent = Arc::new(AtomicU64::new(0));
    let mut relays = Vec::new();
    let mut through = async |name: &'static str, url: &str| -> Result<(&'static str, String)> {
        let (relay, url) = Relay::before(url).await?;
        relays.push(relay);
        Ok((name, url))
    };
    let urls = [
        through("TALLYD__AMQP__URL", world.config.amqp.url.expose()).await?,
        through("TALLYD__MYSQL__URL", world.config.mysql.url.expose()).await?,
        through("TALLYD__REDIS__URL", world.config.redis.url.expose()).await?,
    ];
    let environment = urls.each_ref().map(|(name, url)| (*name, url.as_str()));
    let first_events = (1..=FIRST).map(|user| preload::message(&like(user)));
    preload::preload_messages(world, first_events).await?;
    sent.store(FIRST, Ordering::Relaxed);
    let first = Daemon::start(world, &environment)?;
    wait::until("the first daemon has written all events", LIMIT, LOOK_EVERY, async || Ok(rows(world).await? == FIRST))
        .await?;
    let second = Daemon::start(world, &[])?;
    tokio::time::sleep(LISTENS_AFTER).await;
    let load = spawn_load(world, &publisher, &sent, rate);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let began = Instant::now();
    match how {
        How::Handover => first.signal("TERM")?,
        How::Kill => first.signal("KILL")?,
        How::Stop => first.signal("STOP")?,
        How::Cut => relays.iter().for_each(Relay::fall_silent),
    }
    let owner = format!("%:{}", second.pid());
    wait::until("the second daemon has all partitions", LIMIT, LOOK_EVERY, async || {
        ensure!(!load.is_finished(), "nothing is published any more");
        let held: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM partition_owner WHERE owner LIKE ?")
            .bind(&owner)
            .fetch_one(&world.pool)
            .await?;
        Ok(held == i64::from(PARTITIONS))
    })
    .await?;
    let took = began.elapsed();
    load.abort();
    let _ = load.await;
    drop(first);
    // RabbitMQ may have received one more event than `sent` counts.
    wait::until("all is written", LIMIT, LOOK_EVERY, async || Ok(rows(world).await? >= sent.load(Ordering::Relaxed)))
        .await?;
    second.signal("TERM")?;
    drop((second, relays, publisher));
    Ok(took.as_secs_f64() * 1e3)
}

/// Publishes likes until the task is aborted.
fn spawn_load(world: &World, publisher: &Arc<Publisher>, sent: &Arc<AtomicU64>, rate: u64) -> JoinHandle<Result<()>> {
    let (exchange, publisher, sent) = (world.broker.exchange(), Arc::clone(publisher), Arc::clone(sent));
    tokio::spawn(async move {
        let mut tick = tokio::time::interval(Duration::from_secs(1) / u32::try_from(rate)?);
        loop {
            tick.tick().await;
            publish_one(&exchange, &publisher, &sent).await?;
        }
    })
}

/// Each like has a new user, so each like makes a row.
async fn publish_one(exchange: &str, publisher: &Publisher, sent: &AtomicU64) -> Result<()> {
    let event = like(1 + sent.load(Ordering::Relaxed));
    publisher.publish(exchange, &event.user.to_string(), &encode_like(&event, "video", None)).await?;
    sent.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

fn like(user: u64) -> LikeEvent {
    let target = Target { kind: Kind(1), id: TargetId(1 + user % 1_000) };
    LikeEvent { target, user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true }
}

async fn rows(world: &World) -> Result<u64> {
    let rows: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM like_record").fetch_one(&world.pool).await?;
    Ok(rows.unsigned_abs())
}
