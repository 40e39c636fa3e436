//! The fence: waits until every event published before now is committed in MySQL.
//!
//! A fence is a message sent straight to each partition's queue; the consumer notes its number in the transaction that
//! holds all events before it. A partition without a consumer whose queue is empty has nothing in flight and needs none: a daemon's messages
//! return to the queue when it stops to be a consumer.
//!
//! While partitions are added there are daemons that know of fewer. They send no fence: an event in a queue that they don't know would pass it by.
//!
//! Several jobs send fences. Each notes its own, so that no job takes another one's higher fence for a sign that it was overtaken.

use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use crate::broker::{Broker, Depth, Publisher};
use crate::event::encode_fence;
use crate::runtime::fault;
use crate::store::Store;
use crate::store::partitions::Noted;
use crate::telemetry::{WaitsFor, telemetry};

/// A run can't be done now, through no fault of the data: the same call may do later.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotNow(pub String);

/// More partitions are in use than the configuration says: what would be read after a fence might lack events of the others.
#[derive(Debug, thiserror::Error)]
#[error(
    "[amqp] partitions is {known}, and {noted} partitions are in use since {raised_by} came with so many: set it to {noted} here, too, \
     and restart; lower it only as docs/operations.md says"
)]
pub struct TooFew {
    known: u16,
    noted: u16,
    raised_by: String,
}

/// Whether the configuration knows all partitions that are in use.
///
/// # Errors
/// [`TooFew`]; MySQL's.
pub async fn knows_all(store: &Store, broker: &Broker) -> Result<()> {
    let known = broker.partitions();
    match store.noted_partitions().await? {
        Some(Noted { partitions: noted, raised_by }) if noted > known => Err(TooFew { known, noted, raised_by }.into()),
        _ => Ok(()),
    }
}

const LOOK_MIN: Duration = Duration::from_millis(4);
const LOOK_MAX: Duration = Duration::from_millis(200);
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Sends fences. One per run.
pub struct Fences<'a> {
    /// The job whose run sends them.
    pub job: &'static str,
    /// Where they are noted.
    pub store: &'a Store,
    /// Which queues there are.
    pub broker: &'a Broker,
    /// What sends them.
    pub publisher: Publisher,
    /// How long one is waited for.
    pub fence_max: Duration,
}

/// How one partition stands.
enum Standing {
    /// The fence is committed.
    Passed,
    /// No consumer and an empty queue.
    Idle,
    /// The reason it is waited for.
    Waiting(String),
}

/// Whoever looks at the process is told that a run waits for a fence, until this is dropped.
struct Waits(&'static str);

impl Drop for Waits {
    fn drop(&mut self) {
        telemetry().jobs.waits(self.0, None);
    }
}

impl Fences<'_> {
    /// How many messages the partitions hold that nobody has taken.
    ///
    /// # Errors
    /// The broker's.
    pub async fn waiting(&self) -> Result<u64> {
        let mut waiting = 0;
        for partition in 0..self.broker.partitions() {
            waiting += u64::from(self.publisher.depth(&self.broker.queue(partition)).await?.messages);
        }
        Ok(waiting)
    }

    /// Returns once every event that the broker took before this call is committed.
    ///
    /// # Errors
    /// [`NotNow`] with the reason when that takes longer than `fence_max`; [`TooFew`]; the servers'.
    pub async fn pass(&self, number: u64) -> Result<()> {
        let began = Instant::now();
        // A number is noted before its queues are bound: an event that was taken before now is in one of these, or it is seen here.
        knows_all(self.store, self.broker).await?;
        let _waits = Waits(self.job);
        let mut sent = vec![false; usize::from(self.broker.partitions())];
        let mut look = LOOK_MIN;
        let mut said = began;
        loop {
            let waiting = self.look(number, &mut sent).await?;
            let Some(reason) = waiting else { return Ok(()) };
            if began.elapsed() > self.fence_max {
                return Err(NotNow(format!("gave up after {} s of waiting: {reason}", self.fence_max.as_secs())).into());
            }
            if said.elapsed() > SAY_EVERY {
                info!(event = "fence-waiting", reason, "waiting for the events on the way: {reason}");
                said = Instant::now();
            }
            telemetry().jobs.waits(self.job, Some((WaitsFor::Fence, reason)));
            tokio::time::sleep(look).await;
            look = (look * 2).min(LOOK_MAX);
        }
    }

    /// Looks at every partition once; the reason of the first that is waited for, none when all are through.
    async fn look(&self, number: u64, sent: &mut [bool]) -> Result<Option<String>> {
        let fences = self.store.fences(self.job, self.broker.partitions()).await?;
        let mut waiting = None;
        for (partition, (fence, sent)) in (0_u16..).zip(fences.into_iter().zip(sent)) {
            let standing = self.stand(partition, (number, fence), sent).await?;
            if let Standing::Waiting(reason) = standing {
                waiting = waiting.or(Some(reason));
            }
        }
        Ok(waiting)
    }

    async fn stand(&self, partition: u16, (number, fence): (u64, u64), sent: &mut bool) -> Result<Standing> {
        if *sent && fence == number {
            return Ok(Standing::Passed);
        }
        if fence > number {
            // Only a later run's fence is higher: ours can no longer be seen to pass.
            return Err(NotNow("another run has taken over".to_owned()).into());
        }
        let queue = self.broker.queue(partition);
        let Depth { messages, consumers } = self.publisher.depth(&queue).await?;
        if consumers == 0 && messages == 0 && !*sent {
            return Ok(Standing::Idle);
        }
        if consumers == 0 {
            return Ok(Standing::Waiting(format!("{queue} has {messages} messages and no consumer")));
        }
        if !*sent {
            self.publisher.publish_behind(&queue, &encode_fence(number)).await?;
            *sent = true;
            fault::point("fence:sent");
        }
        Ok(Standing::Waiting(format!("{queue} has {messages} messages before the fence")))
    }
}
