//! The fence: waits until every event published before now is committed in MySQL.
//!
//! A fence is a message sent straight to each partition's queue; the consumer notes its number in the transaction that
//! holds all events before it. A partition without a consumer whose queue is empty has nothing in flight and needs none: a daemon's messages
//! return to the queue when it stops to be a consumer.
//!
//! While partitions are added there are daemons that know of fewer. They send no fence: an event in a queue that they don't know would pass it by.
//!
//! Several jobs send fences. Each notes its own, so that no job takes another one's higher fence for a sign that it was overtaken.

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

/// All partitions that are in use, each of which the configuration knows.
///
/// # Errors
/// [`JobError::TooFewPartitions`]; MySQL fails.
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
    /// Its name in `job_lock`.
    pub job: &'static str,
    pub store: &'a Store,
    pub broker: &'a Broker,
    pub publisher: Publisher,
    /// How long one is waited for.
    pub fence_max: Duration,
}

/// How far the fence is in one partition.
enum FenceState {
    Passed,
    /// There is no consumer, and the queue is empty.
    Idle,
    /// It is waited for, for this reason.
    Waiting(String),
}

impl Fences<'_> {
    /// How many messages the partitions hold that no consumer has taken.
    pub async fn waiting(&self) -> Result<u64> {
        let in_use = InUse::read(self.store, self.broker).await?;
        Ok(self.publisher.waiting(&in_use.partitions).await?)
    }

    /// Returns once every event that the broker took before this call is committed.
    ///
    /// # Errors
    /// [`JobError::NotNow`] with the reason when that takes longer than `fence_max`; [`JobError::TooFewPartitions`]; a server fails.
    pub async fn pass(&self, number: u64) -> Result<()> {
        let began = Instant::now();
        // A number is noted before its queues are bound: an event that was taken before now is in one of these, or it is seen here.
        let partitions = knows_all(self.store, self.broker).await?;
        let _shown = ShownWait(self.job);
        let mut sent = BTreeSet::new();
        let mut pause = LOOK_MIN;
        let mut said = began;
        loop {
            let Some(reason) = self.waits_for(number, &partitions, &mut sent).await? else { return Ok(()) };
            if began.elapsed() > self.fence_max {
                let seconds = self.fence_max.as_secs();
                return Err(JobError::NotNow(format!("gave up after {seconds} s of waiting: {reason}")).into());
            }
            if said.elapsed() > SAY_EVERY {
                info!(event = "fence-waiting", reason, "waiting for the events on the way: {reason}");
                said = Instant::now();
            }
            telemetry().jobs.waits(self.job, Some((WaitsFor::Fence, reason)));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    /// Looks at every partition once: the reason of the first one that is waited for; `None` when all are through.
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

    /// Sends the fence where that is needed. `noted` is the newest one that was committed there. Returns whether it was sent, now or before, too.
    async fn state(&self, queue: &str, number: u64, noted: u64, sent: bool) -> Result<(FenceState, bool)> {
        if sent && noted == number {
            return Ok((FenceState::Passed, sent));
        }
        if noted > number {
            // Only a later run's fence is higher: ours can no longer be seen to pass.
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

/// The status says that a run waits for a fence, until this is dropped.
struct ShownWait(&'static str);

impl Drop for ShownWait {
    fn drop(&mut self) {
        telemetry().jobs.waits(self.0, None);
    }
}
