//! Likes that the daemon counts: a client publishes an event, the daemon commits the event to MySQL and adds the like
//! to Redis.
//!
//! Each measurement has its own world. At the end, rows, counters and Redis are compared with a model of the published
//! events.

mod delay;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use tallyd_client::{Clicked, Client};
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tallyd_testkit::client_of;

use super::{Arguments, cpu_us};
use crate::common::cpu::Processes;
use crate::common::daemon::Daemon;
use crate::common::machine::Machine;
use crate::common::model::Model;
use crate::common::numbers::likes_in_redis;
use crate::common::preload::rest;
use crate::common::report::{Aim, Results, median, number, print_figures};
use crate::common::wait::until;
use crate::common::workload::Workload;
use crate::common::world::{Setup, World, stack};
use delay::Delays;

const AIMS: [(&str, Aim); 5] = [
    ("redis_us_per_like", Aim::AtMost(4.0)),
    ("end_to_end_p99_ms", Aim::AtMost(25.0)),
    ("poll_p99_ms", Aim::AtMost(1.0)),
    ("whole_path_per_s", Aim::AtLeast(60_000.0)),
    ("whole_path_lists_per_s", Aim::AtLeast(60_000.0)),
];

/// The number of events in a body that is a list.
const LIST: usize = 100;

/// The target of a measurement's last like. With one partition, when Redis has counted this last like, Redis has also
/// counted the other likes or is just counting them.
const LAST: Target = Target { kind: Kind(1), id: TargetId(999_999) };

/// Time between two checks for the last like.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How long to wait until the daemon has started, and until the daemon has counted the published likes.
const WAIT_MAX: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug, Serialize)]
struct Round {
    /// No daemon runs. The client waits for the confirm of each like.
    publish_only_per_s: f64,
    /// After the last like, a daemon drains the queue.
    redis_us_per_like: f64,
    drain_per_s: f64,
    /// A daemon runs while the likes are published.
    whole_path_per_s: f64,
    whole_path_lists_per_s: f64,
    end_to_end_ms: Delays,
}

/// The format of the published messages.
#[derive(Clone, Copy)]
enum Bodies {
    /// A client's calls.
    Likes,
    /// Lists of 100 events.
    Lists,
}

pub(super) async fn run(arguments: Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let mut rounds = Vec::new();
    for count in 1..=arguments.rounds {
        let round = measure(arguments, count as u64).await?;
        println!(
            "round {count}: published {}/s, drained {}/s at {} us of Redis, whole path {}/s, in lists {}/s, end to end {} ms (p99 {} ms)",
            number(round.publish_only_per_s),
            number(round.drain_per_s),
            number(round.redis_us_per_like),
            number(round.whole_path_per_s),
            number(round.whole_path_lists_per_s),
            number(round.end_to_end_ms.p50),
            number(round.end_to_end_ms.p99)
        );
        rounds.push(round);
    }
    let figures = figures(&rounds);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: rounds }.write("like")
}

fn figures(rounds: &[Round]) -> BTreeMap<String, f64> {
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
    BTreeMap::from([
        ("publish_only_per_s".to_owned(), of(|round| round.publish_only_per_s)),
        ("redis_us_per_like".to_owned(), of(|round| round.redis_us_per_like)),
        ("drain_per_s".to_owned(), of(|round| round.drain_per_s)),
        ("whole_path_per_s".to_owned(), of(|round| round.whole_path_per_s)),
        ("whole_path_lists_per_s".to_owned(), of(|round| round.whole_path_lists_per_s)),
        ("end_to_end_p50_ms".to_owned(), of(|round| round.end_to_end_ms.p50)),
        ("end_to_end_p99_ms".to_owned(), of(|round| round.end_to_end_ms.p99)),
        ("poll_p99_ms".to_owned(), of(|round| round.end_to_end_ms.poll_p99)),
    ])
}

async fn measure(arguments: Arguments, seed: u64) -> Result<Round> {
    let setup = Setup { partitions: arguments.partitions, ..Setup::default() };
    let (publish_only_per_s, drain_per_s, redis_us_per_like) =
        in_world(setup, async |world| drain(world, arguments, seed).await).await.context("publish, then drain")?;
    let whole_path_per_s = in_world(setup, async |world| whole_path(world, arguments, seed, Bodies::Likes).await);
    let whole_path_per_s = whole_path_per_s.await.context("the whole path")?;
    let whole_path_lists_per_s = in_world(setup, async |world| whole_path(world, arguments, seed, Bodies::Lists).await);
    let whole_path_lists_per_s = whole_path_lists_per_s.await.context("the whole path, with lists of likes")?;
    let end_to_end_ms = in_world(setup, async |world| delay::measure(world, seed).await).await.context("end to end")?;
    Ok(Round {
        publish_only_per_s,
        redis_us_per_like,
        drain_per_s,
        whole_path_per_s,
        whole_path_lists_per_s,
        end_to_end_ms,
    })
}

async fn in_world<T>(setup: Setup, work: impl AsyncFnOnce(&World) -> Result<T>) -> Result<T> {
    let world = World::new("like_published", setup).await?;
    let done = work(&world).await;
    world.close(done).await
}

/// Returns three numbers: the rate of publishing likes without a daemon, the rate at which a daemon then drains these
/// likes, and Redis's microseconds for each drained like.
async fn drain(world: &World, arguments: Arguments, seed: u64) -> Result<(f64, f64, f64)> {
    let client = client_of(&world.config);
    let mut redis = world.redis().await?;
    settled().await?;
    let began = Instant::now();
    let mut events = publish(&client, arguments, seed).await?;
    let published_per_s = arguments.likes as f64 / began.elapsed().as_secs_f64();
    events.push(click(&client, LAST, UserId(1), true).await?);
    settled().await?;
    let (began, before) = (Instant::now(), cpu_us(&mut redis).await?);
    let daemon = Daemon::start(world, &[])?;
    last_counted(world).await?;
    // With several partitions, Redis may not have all likes yet. The check that it has them costs it time.
    let used = cpu_us(&mut redis).await? - before;
    let seconds = exact(world, events).await?.duration_since(began).as_secs_f64();
    drop(daemon);
    let likes = arguments.likes as f64;
    Ok((published_per_s, likes / seconds, used / likes))
}

/// Returns the number of likes per second, measured from the first publish until all counters are exact.
async fn whole_path(world: &World, arguments: Arguments, seed: u64, bodies: Bodies) -> Result<f64> {
    let client = client_of(&world.config);
    let daemon = consuming(world).await?;
    settled().await?;
    let began = Instant::now();
    let mut events = match bodies {
        Bodies::Likes => publish(&client, arguments, seed).await?,
        Bodies::Lists => publish_lists(world, arguments, seed).await?,
    };
    events.push(click(&client, LAST, UserId(1), true).await?);
    last_counted(world).await?;
    let seconds = exact(world, events).await?.duration_since(began).as_secs_f64();
    drop(daemon);
    Ok(arguments.likes as f64 / seconds)
}

/// Starts a daemon, and waits until it consumes each partition.
async fn consuming(world: &World) -> Result<Daemon> {
    let daemon = Daemon::start(world, &[])?;
    let link = world.broker.connect("bench").await?;
    for partition in 0..world.config.amqp.partitions {
        let queue = world.broker.queue(partition);
        until(
            "the daemon consumes",
            WAIT_MAX,
            LOOK_EVERY,
            async || Ok(link.depth(&queue).await?.consumers() > Some(0)),
        )
        .await?;
    }
    Ok(daemon)
}

async fn settled() -> Result<()> {
    rest(Processes::of_stack(Path::new(&stack("DIR")?))?).await
}

/// Publishes likes and unlikes through the client, which waits for the confirm of each. Returns the events.
async fn publish(client: &Client, arguments: Arguments, seed: u64) -> Result<Vec<LikeEvent>> {
    stream::iter(Workload::new(seed).take(usize::try_from(arguments.likes)?))
        .map(|wish| click(client, wish.target, wish.user, wish.liked))
        .buffer_unordered(arguments.at_once)
        .try_collect()
        .await
}

pub(super) async fn click(client: &Client, target: Target, user: UserId, liked: bool) -> Result<LikeEvent> {
    let clicked = if liked { client.like(target, user).await } else { client.unlike(target, user).await };
    match clicked? {
        Clicked::Published(event) => Ok(event),
        other => bail!("a like should only be published, but the result is {other:?}"),
    }
}

/// Publishes the same likes in lists, as a service that collects events does.
async fn publish_lists(world: &World, arguments: Arguments, seed: u64) -> Result<Vec<LikeEvent>> {
    let publisher = world.broker.connect_publisher("bench").await?;
    let exchange = world.broker.exchange();
    let mut wishes = Workload::new(seed).take(usize::try_from(arguments.likes)?);
    let lists = std::iter::from_fn(|| {
        let now = tallyd_base::runtime::clock::now();
        let list: Vec<LikeEvent> = wishes.by_ref().take(LIST).map(|wish| LikeEvent { at: now, ..wish }).collect();
        Some(list).filter(|list| !list.is_empty())
    });
    let send = async |list: Vec<LikeEvent>| {
        let bodies: Vec<Vec<u8>> = list.iter().map(|event| encode_like(event, "video", None)).collect();
        let body = [b"[", bodies.join(&b","[..]).as_slice(), b"]"].concat();
        let key = list.first().map(|event| event.user.to_string()).unwrap_or_default();
        publisher.publish(&exchange, &key, &body).await?;
        Ok(list)
    };
    let at_once = arguments.at_once.div_ceil(LIST).max(2);
    stream::iter(lists).map(send).buffer_unordered(at_once).try_concat().await
}

/// Waits until Redis has the last like. With one partition, this like is delivered after all others.
async fn last_counted(world: &World) -> Result<()> {
    let mut counter = delay::Counter::of(world, LAST)?;
    until("the last like is counted", WAIT_MAX, LOOK_EVERY, async || Ok(counter.read()? == 1)).await
}

/// Waits until the likes in Redis match the model, then compares the rows and counters in MySQL. Returns the start of
/// the first check in which Redis matched the model.
async fn exact(world: &World, events: Vec<LikeEvent>) -> Result<Instant> {
    let mut redis = world.redis().await?;
    let mut since = Instant::now();
    let first = likes_in_redis(world, &mut redis).await?;
    // The model is made after the first check, because making the model takes time.
    let model = Model::of(events);
    if !model.has(&first) {
        let look = async || {
            since = Instant::now();
            Ok(model.has(&likes_in_redis(world, &mut redis).await?))
        };
        until("Redis is exact", WAIT_MAX, Duration::ZERO, look).await?;
    }
    world.assert_drained().await?;
    model.assert_rows(&world.pool, u64::MAX).await?;
    model.assert_counters(&world.pool).await?;
    Ok(since)
}
