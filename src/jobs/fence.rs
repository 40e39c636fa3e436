//! Uses a fence to wait until every event that was published before now is committed in MySQL.
//!
//! A fence is a message sent directly to each partition's queue. The consumer writes the fence's number to MySQL, in
//! the same transaction as the last events before the fence. A partition with no consumer and an empty queue needs no
//! fence. Such a partition has no messages in flight, because the broker requeues a daemon's unacknowledged messages
//! when the daemon stops consuming.
//!
//! While partitions are added, some daemons are configured with fewer partitions than other daemons. A daemon that is
//! configured with too few partitions sends no fences, because its fences would miss the events in the other
//! partitions' queues.
//!
//! Several jobs send fences. Each job has its own sequence of fence numbers. If all jobs shared one sequence, a job
//! could read the higher number of another job. The job would then wrongly conclude that a later run of the same job
//! had started.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use super::JobError;
use crate::partitions::InUse;
use crate::runtime::fault;
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_core::event::encode_fence;
use tallyd_core::partition::Partitions;
use tallyd_mysql::Store;
use tallyd_mysql::partitions::Noted;
use tallyd_rabbitmq::{Broker, Depth, Publisher};

/// Returns all partitions in use. The configuration must include all these partitions.
///
/// # Errors
/// Fails with [`JobError::TooFewPartitions`] if more partitions are in use. Also fails if MySQL fails.
pub async fn knows_all(store: &Store, broker: &Broker) -> Result<Partitions> {
    let InUse { partitions, noted, .. } = InUse::read(store, broker).await?;
    let known = broker.partitions();
    match noted {
        Some(Noted { partitions: noted, raised_by }) if noted > known => {
            Err(JobError::TooFewPartitions { known, noted, raised_by }.into())
        }
        _ => Ok(partitions),
    }
}

const LOOK_MIN: Duration = Duration::from_millis(4);
const LOOK_MAX: Duration = Duration::from_millis(200);
const SAY_EVERY: Duration = Duration::from_secs(10);

pub struct Fences<'a> {
    /// The job's name in `job_lock`.
    pub job: &'static str,
    pub store: &'a Store,
    pub broker: &'a Broker,
    pub publisher: Publisher,
    /// The maximum time to wait for one fence.
    pub fence_max: Duration,
}

/// The progress of the fence in one partition.
enum FenceState {
    Passed,
    /// The partition has no consumer, and its queue is empty.
    Idle,
    /// The run waits for the partition. The text is the reason.
    Waiting(String),
}

impl Fences<'_> {
    /// Returns the number of messages that wait in the queues of all partitions. Messages that a consumer has received
    /// do not count.
    pub async fn waiting(&self) -> Result<u64> {
        let in_use = InUse::read(self.store, self.broker).await?;
        Ok(self.publisher.waiting(&in_use.partitions).await?)
    }

    /// Waits until the daemons have committed all events that the broker accepted before this call.
    ///
    /// # Errors
    /// Fails with [`JobError::NotNow`] and the reason if this takes longer than `fence_max`. Fails with
    /// [`JobError::TooFewPartitions`] if more partitions are in use. Also fails if a server fails.
    pub async fn pass(&self, number: u64) -> Result<()> {
        let began = Instant::now();
        // A daemon records a new count of partitions before it binds the new queues. If this check finds a higher count
        // than the configured count, the check fails. Otherwise all events that the broker has accepted are in the
        // queues of `partitions`.
        let partitions = knows_all(self.store, self.broker).await?;
        let _shown = ShownWait(self.job);
        let mut sent = BTreeSet::new();
        let mut pause = LOOK_MIN;
        let mut said = began;
        loop {
            let Some(reason) = self.waits_for(number, &partitions, &mut sent).await? else { return Ok(()) };
            if began.elapsed() > self.fence_max {
                let seconds = self.fence_max.as_secs();
                return Err(JobError::NotNow(format!("the run gave up after waiting for {seconds} s: {reason}")).into());
            }
            if said.elapsed() > SAY_EVERY {
                info!(event = "fence-waiting", reason, "waiting for events in flight: {reason}");
                said = Instant::now();
            }
            telemetry().jobs.waits(self.job, Some((WaitsFor::Fence, reason)));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    /// Checks every partition once. Returns the reason why the first unfinished partition is not done. Returns `None`
    /// when the fence has passed all partitions.
    async fn waits_for(
        &self,
        number: u64,
        partitions: &Partitions,
        sent: &mut BTreeSet<u16>,
    ) -> Result<Option<String>> {
        let noted = self.store.fences(self.job).await?;
        let mut waiting = None;
        for (partition, queue) in partitions.queues() {
            let noted = noted.get(&partition).copied().unwrap_or(0);
            let (state, is_sent) = self.state(queue, number, noted, sent.contains(&partition)).await?;
            if is_sent {
                sent.insert(partition);
            }
            if let FenceState::Waiting(reason) = state {
                waiting = waiting.or(Some(reason));
            }
        }
        Ok(waiting)
    }

    /// Sends the fence to one partition's queue, if it was not sent before. Returns whether the fence has passed this
    /// queue. `noted` is the newest fence that is committed in the partition. Also returns whether the fence has been
    /// sent, by this call or an earlier one.
    async fn state(&self, queue: &str, number: u64, noted: u64, sent: bool) -> Result<(FenceState, bool)> {
        if sent && noted == number {
            return Ok((FenceState::Passed, sent));
        }
        if noted > number {
            // Only a later run's fence has a higher number. MySQL keeps only the highest number, so it does not show
            // whether this run's fence has passed.
            return Err(JobError::NotNow("another run has taken over".to_owned()).into());
        }
        let Depth { messages, consumers } = self.publisher.depth(queue).await?;
        if consumers == 0 && messages == 0 && !sent {
            return Ok((FenceState::Idle, sent));
        }
        if consumers == 0 {
            return Ok((FenceState::Waiting(format!("{queue} has {messages} messages and no consumer")), sent));
        }
        if !sent {
            self.publisher.publish_behind(queue, &encode_fence(number)).await?;
            fault::point("fence:sent");
        }
        Ok((FenceState::Waiting(format!("{queue} has {messages} messages before the fence")), true))
    }
}

/// When this value is dropped, it clears the job's status "waits for a fence".
struct ShownWait(&'static str);

impl Drop for ShownWait {
    fn drop(&mut self) {
        telemetry().jobs.waits(self.0, None);
    }
}
