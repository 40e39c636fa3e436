//! Measures the servers' own limits, each in a separate process: acknowledgements without writes, and writes without a
//! broker.

use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use sqlx::{Connection, MySqlConnection};
use tallyd_base::config::Config;
use tallyd_core::coalesce::{Before, LikeState, Pair, before, coalesce, differences};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::Metric;
use tallyd_mysql::{Store, StoreError, Text, likes};
use tallyd_rabbitmq::Broker;

/// Number of messages that one acknowledgement covers.
const ACK_EVERY: u64 = 1_000;

/// If no message arrives for this time, the consumer acknowledges all messages that it has not acknowledged yet.
const IDLE: Duration = Duration::from_millis(20);

/// Consumes and only acknowledges messages. The rate shows the broker's limit.
pub async fn noop(config: &Config) -> Result<()> {
    let broker = Broker::new(&config.amqp)?;
    let link = broker.connect("noop").await?;
    link.channel.basic_qos(config.amqp.prefetch, BasicQosOptions { global: false }).await?;
    let queue = broker.queue(0);
    say_consuming();
    let consume = link.channel.basic_consume(
        queue.as_str().into(),
        "noop".into(),
        BasicConsumeOptions::default(),
        FieldTable::default(),
    );
    let mut deliveries = consume.await?;
    let mut open = 0;
    let mut last: Option<Delivery> = None;
    loop {
        // Sets a timer only if no message is ready, because a timer for each message is slow.
        let next = match deliveries.next().now_or_never() {
            Some(next) => Some(next),
            None => tokio::time::timeout(IDLE, deliveries.next()).await.ok(),
        };
        if let Some(delivery) = next {
            last = Some(delivery.context("the broker cancelled the consumer")??);
            open += 1;
            if open < ACK_EVERY {
                continue;
            }
        }
        if let Some(last) = last.take() {
            last.acker.ack(BasicAckOptions { multiple: true }).await?;
            say_committed(open);
            open = 0;
        }
    }
}

/// Writes batches as tallyd does, but without a broker. The rate shows the database's limit. With `reads_first`, old rows are
/// read before they are written, as most programs with exact counters do.
pub async fn floor(config: &Config, reads_first: bool, events: impl Iterator<Item = LikeEvent>) -> Result<()> {
    let events: Vec<LikeEvent> = events.collect();
    let store = Store::new(&config.mysql, 1)?;
    let mut lent = store.acquire().await?;
    say_consuming();
    for batch in events.chunks(config.consumer.batch_events_max) {
        lent.limit("write a batch", |connection| write_batch(connection, reads_first, batch)).await?;
        say_committed(batch.len() as u64);
    }
    // Waits until the benchmark has read the CPU time of this process.
    std::future::pending().await
}

/// Runs tallyd's transaction with counters. The transaction here omits the parts that protect against other daemons and
/// bad messages: the owner's row, fences (markers of jobs) and dead letters.
async fn write_batch(
    connection: &mut MySqlConnection,
    reads_first: bool,
    events: &[LikeEvent],
) -> Result<(), StoreError> {
    let mut tx = connection.begin().await.map_err(StoreError::sql("begin a batch"))?;
    let winners = coalesce(events);
    let before = if reads_first {
        read_and_write(&mut tx, &winners).await?
    } else {
        likes::upsert(&mut tx, &winners).await?.ok_or(StoreError::Unsupported("user variables"))?
    };
    let mut text = Text::default();
    likes::add_differences(&mut text, 0, &differences(Metric(1), &winners, &before));
    text.run(&mut tx, "add to counters").await?;
    tx.commit().await.map_err(StoreError::sql("commit a batch"))
}

async fn read_and_write(
    connection: &mut MySqlConnection,
    winners: &[(Pair, LikeState)],
) -> Result<Vec<Before>, StoreError> {
    let pairs: Vec<Pair> = winners.iter().map(|(pair, _)| *pair).collect();
    let before = before(winners, &likes::old_states(connection, &pairs).await?);
    likes::write_winners(connection, winners, &before).await?;
    Ok(before)
}

fn say_consuming() {
    eprintln!(r#"{{"event":"consuming"}}"#);
}

fn say_committed(events: u64) {
    eprintln!(r#"{{"event":"batch-committed","events":{events}}}"#);
}
