//! Measures the times at which samples become visible to another connection. The poller reads samples by primary key,
//! as often as possible without disturbing the machine. If a poll finds a new sample, MySQL committed the sample
//! between the start of the previous poll and the end of the current poll. The measured time is the end of the poll
//! that found the sample.

use std::time::Duration;

use anyhow::{Result, ensure};
use sqlx::{Connection, MySqlConnection};
use tallyd_core::model::Micros;
use tokio::time::Instant;

use super::publisher::{SAMPLED, sample_of};
use crate::common::workload::USERS;
use crate::common::world::World;

/// Between two polls. The thread sleeps, because the runtime's timer rounds up to milliseconds.
const PAUSE: Duration = Duration::from_micros(400);

/// How long the poller waits for the last samples after publishing has ended.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// The result of the polls.
pub struct Seen {
    /// Maps a sample's number to the time when the sample was first visible.
    pub samples: Vec<Option<Micros>>,
    /// Time from the start of the previous poll to the end of this poll, in ms. A measured latency can be too high by
    /// up to this duration.
    pub gaps_ms: Vec<f64>,
}

/// Polls until all `count` samples are visible, or until no new sample appears for ten seconds.
pub async fn poll(world: &World, count: usize) -> Result<Seen> {
    let mut connection = MySqlConnection::connect(world.config.mysql.url.expose()).await?;
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(poll_on(&mut connection, count))).await?
}

async fn poll_on(connection: &mut MySqlConnection, count: usize) -> Result<Seen> {
    let mut seen = Seen { samples: vec![None; count], gaps_ms: Vec::new() };
    // Samples can arrive in any order. A poll begins at the first sample that is still missing.
    let mut missing = 0;
    let (mut before, mut progress) = (Instant::now(), Instant::now());
    while missing < count && progress.elapsed() < SILENCE_MAX {
        std::thread::sleep(PAUSE);
        let start = Instant::now();
        let users: Vec<u64> = sqlx::query_scalar(
            "SELECT user_id FROM like_record WHERE kind = 1 AND target_id = ? AND user_id > ? ORDER BY user_id",
        )
        .bind(SAMPLED.id.0)
        .bind(USERS + missing as u64)
        .fetch_all(&mut *connection)
        .await?;
        let now = tallyd::runtime::clock::now();
        seen.gaps_ms.push(before.elapsed().as_secs_f64() * 1e3);
        before = start;
        for number in users.into_iter().filter_map(sample_of) {
            if let Some(sample @ None) = seen.samples.get_mut(number) {
                *sample = Some(now);
                progress = Instant::now();
            }
        }
        while seen.samples.get(missing).is_some_and(Option::is_some) {
            missing += 1;
        }
    }
    ensure!(missing > 0, "no sample was ever committed");
    Ok(seen)
}
