//! Measures a daemon whose MySQL stops answering for minutes, while messages continue to arrive.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use serde::Serialize;
use tallyd_core::event::LikeEvent;
use tokio::time::MissedTickBehavior;

use crate::common::cpu::{peak_rss_mib, rss_mib};
use crate::common::daemon::Daemon;
use crate::common::preload::message;
use crate::common::relay::Relay;
use crate::common::wait;
use crate::common::workload::Workload;
use crate::common::world::{Setup, World};
use crate::exact;

/// Pause between two groups of messages.
const TURN: Duration = Duration::from_millis(50);

/// Messages arrive for this time before MySQL becomes unreachable. After MySQL answers again, messages arrive for this
/// time again.
const WELL: Duration = Duration::from_secs(20);

/// Time limit to write the backlog.
const CAUGHT_UP_MAX: Duration = Duration::from_secs(1_200);

/// After the row of the newest event is written, all other rows must be right within this time.
const EXACT_MAX: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, Serialize)]
pub struct Seen {
    pub messages: usize,
    /// The number of messages in the queue when MySQL answered again. Messages that the daemon had already received are
    /// not included.
    pub waited: u64,
    pub before_rss_mib: f64,
    pub peak_rss_mib: f64,
    /// Time from the moment when MySQL answered again until the row of the newest event was written.
    pub caught_up_s: f64,
}

/// Runs a daemon whose MySQL is unreachable for some minutes, while `rate` messages a second arrive.
pub async fn measure(minutes: u64, rate: u64) -> Result<Seen> {
    let world = World::new("resources-away", Setup::default()).await?;
    let seen = run(&world, Duration::from_secs(minutes * 60), rate).await;
    let seen = world.close(seen).await?;
    println!(
        "MySQL unreachable for {minutes} minutes, {rate} messages a second: {:.0} MiB, then {} messages in {:.0} s",
        seen.peak_rss_mib, seen.waited, seen.caught_up_s
    );
    Ok(seen)
}

async fn run(world: &World, away: Duration, rate: u64) -> Result<Seen> {
    let (relay, url) = Relay::before(world.config.mysql.url.expose()).await?;
    let daemon = Daemon::start(world, &[("TALLYD__MYSQL__URL", url.as_str())])?;
    let turns = (WELL + away + WELL).as_millis() / TURN.as_millis();
    let per_turn = usize::try_from(rate)? * usize::try_from(TURN.as_millis())? / 1_000;
    let messages = per_turn * usize::try_from(turns)?;
    let arriving = publish(world, messages, per_turn);
    let falling = async {
        tokio::time::sleep(WELL).await;
        let before_rss_mib = rss_mib(daemon.pid())?;
        relay.fall_silent();
        tokio::time::sleep(away).await;
        let link = world.broker.connect_publisher("bench").await?;
        let waited = link.depth(&world.broker.queue(0)).await?.messages();
        let waited = u64::from(waited.context("RabbitMQ does not say how many messages wait")?);
        relay.speak();
        Ok((before_rss_mib, waited, Instant::now()))
    };
    let ((), (before_rss_mib, waited, back)) = tokio::try_join!(arriving, falling)?;
    let last = Workload::new(1).take(messages).max_by_key(|event| event.at).context("no messages")?;
    wait::until("the backlog is written", CAUGHT_UP_MAX, LOOK_EVERY, async || is_written(world, last).await).await?;
    let caught_up_s = back.elapsed().as_secs_f64();
    let peak_rss_mib = peak_rss_mib(daemon.pid())?;
    // A few duplicates can come after the newest event.
    let all = || Workload::new(1).take(messages);
    wait::until("every row is right", EXACT_MAX, LOOK_EVERY, async || Ok(exact(world, all()).await.is_ok())).await?;
    Ok(Seen { messages, waited, before_rss_mib, peak_rss_mib, caught_up_s })
}

async fn is_written(world: &World, event: LikeEvent) -> Result<bool> {
    let sql = "SELECT COUNT(*) FROM like_record WHERE kind = 1 AND target_id = ? AND user_id = ? \
               AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) >= ?";
    let rows: i64 = sqlx::query_scalar(sql)
        .bind(event.target.id.0)
        .bind(event.user.0)
        .bind(event.at.0)
        .fetch_one(&world.pool)
        .await?;
    Ok(rows > 0)
}

async fn publish(world: &World, messages: usize, per_turn: usize) -> Result<()> {
    let publisher = world.broker.connect_publisher("bench").await?;
    let exchange = world.broker.exchange();
    let mut turn = tokio::time::interval(TURN);
    // If a group is late, the next groups are delayed as well.
    turn.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut events = Workload::new(1).take(messages);
    loop {
        turn.tick().await;
        let some: Vec<LikeEvent> = events.by_ref().take(per_turn).collect();
        if some.is_empty() {
            return Ok(());
        }
        let sent = some.iter().map(|event| {
            let (publisher, exchange) = (&publisher, &exchange);
            async move {
                let (key, body) = message(event);
                publisher.publish(exchange, &key, &body).await
            }
        });
        try_join_all(sent).await.context("publish")?;
    }
}
