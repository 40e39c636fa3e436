//! Uses a fence to wait until every event that was published before now is committed in MySQL.
//!
//! A fence is a message sent directly to each partition's queue. The consumer writes the fence's number to MySQL, in
//! the same transaction as the last events before the fence. A partition is *idle* if its queue has no consumer and no
//! messages except fences that tallyd left there (`tallyd_mysql::fences`). An idle partition has no messages in flight,
//! because the broker requeues a daemon's unacknowledged messages when the daemon stops consuming. A run leaves at most
//! one fence in a queue without a consumer. The next daemon drops these fences.
//!
//! Possible races, each with its outcome:
//!
//! * A: events wait in a queue. B: the queue's leader is busy, is being elected, or can't be reached. C: the broker
//!   tells a run "no messages and no consumers". This proves nothing. The run publishes its fence, which only a leader
//!   with a quorum confirms, and asks again.
//! * A: a run publishes a fence to a queue without a consumer. B: a daemon starts, drops the fence, and stops. C: an
//!   event is published, so the queue has one message again. B has deleted the fence's row, so one message is one too
//!   many.
//! * A: a run reads the rows of the fences. B: a daemon drops a fence, or another run adds one. C: the run reads the
//!   queue's depth. The partition is idle only if the rows are the same when the run reads them again.
//! * A: a consumer receives events and the fence, and dies. B: the next consumer receives some of the events, and dies.
//!   A quorum queue appends returned messages to those that were returned before, so the fence is now before these
//!   events. A daemon ignores a fence that was returned. Each session begins a new epoch, and then the run sends its
//!   fence again.
//! * A: a run has left its fence in a queue. B: the broker's node is cut off together with the queue's leader. C: an
//!   event is published on the other side, where no daemon runs. This run cannot notice C before its end. The next run
//!   publishes a fence first, and gets no confirm.
//!
//! While partitions are added, a daemon that is configured with too few of them sends no fences, because its fences
//! would miss the events in the other partitions' queues.
//!
//! Each job has its own sequence of fence numbers. In a shared sequence, a job would take another job's higher number
//! for a later run of its own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tracing::info;

use super::JobError;
use crate::partitions::InUse;
use crate::runtime::{clock, fault};
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_core::event::encode_fence;
use tallyd_core::fence::{Fence, Look, Next, Passed};
use tallyd_core::partition::Partitions;
use tallyd_mysql::Store;
use tallyd_mysql::fences::Fences as KnownFences;
use tallyd_mysql::jobs::run_of;
use tallyd_mysql::partitions::Noted;
use tallyd_rabbitmq::{Broker, BrokerError, Publisher};

/// # Errors
/// [`JobError::TooFewPartitions`] if more partitions are in use than configured.
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
const LOG_EVERY: Duration = Duration::from_secs(10);

pub struct Fences<'a> {
    pub job: &'static str,
    pub store: &'a Store,
    pub broker: &'a Broker,
    pub publisher: Publisher,
    pub fence_max: Duration,
}

enum FenceState {
    Passed,
    /// The queue has no consumer, and only fences that the read rows name.
    Idle,
    Waiting(String),
}

impl Fences<'_> {
    /// Messages that a consumer has received do not count. `None` if unknown.
    pub async fn waiting(&self) -> Result<Option<u64>> {
        let in_use = InUse::read(self.store, self.broker).await?;
        Ok(self.publisher.waiting(&in_use.partitions).await?)
    }

    /// Waits until the daemons have committed all events that the broker accepted before this call.
    ///
    /// # Errors
    /// [`JobError::NotNow`] after `fence_max`; [`JobError::TooFewPartitions`].
    pub async fn pass(&self, number: u64) -> Result<()> {
        let began = Instant::now();
        // A daemon records a new count of partitions before it binds the new queues. If this check finds a higher count
        // than the configured count, the check fails. Otherwise all events that the broker has accepted are in the
        // queues of `partitions`.
        let partitions = knows_all(self.store, self.broker).await?;
        let mut waiting = telemetry().runs.waiting(self.job, WaitsFor::Fence);
        let mut sent = BTreeMap::new();
        let mut pause = LOOK_MIN;
        let mut logged_at = began;
        loop {
            let Some(reason) = self.waits_for(number, &partitions, &mut sent).await? else { return Ok(()) };
            if began.elapsed() > self.fence_max {
                let seconds = self.fence_max.as_secs();
                return Err(JobError::NotNow(format!("the run gave up after waiting for {seconds} s: {reason}")).into());
            }
            if logged_at.elapsed() > LOG_EVERY {
                info!(event = "fence-waiting", reason, "waiting for events in flight: {reason}");
                logged_at = Instant::now();
            }
            waiting.note(reason);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    /// Returns why the first unfinished partition is not done; `None` when the fence has passed all partitions.
    async fn waits_for(
        &self,
        number: u64,
        partitions: &Partitions,
        sent: &mut BTreeMap<u16, u64>,
    ) -> Result<Option<String>> {
        let known = self.store.fences(self.job).await?;
        let (mut waiting, mut idle) = (None, Vec::new());
        for (partition, queue) in partitions.queues() {
            match self.state((partition, queue), number, &known, sent).await? {
                FenceState::Passed => {}
                FenceState::Idle => idle.push(partition),
                FenceState::Waiting(reason) => waiting = waiting.or(Some(reason)),
            }
        }
        if waiting.is_none() && !idle.is_empty() {
            let now = self.store.fences(self.job).await?;
            let changed = idle.into_iter().find(|partition| !now.left(*partition).eq(known.left(*partition)));
            waiting = changed.map(|partition| format!("the fences in partition {partition} have just changed"));
        }
        Ok(waiting)
    }

    /// `sent` maps each partition to the epoch in which the fence was sent. Returns whether the fence has passed.
    async fn state(
        &self,
        (partition, queue): (u16, &str),
        number: u64,
        known: &KnownFences,
        sent: &mut BTreeMap<u16, u64>,
    ) -> Result<FenceState> {
        let fence = Fence {
            number,
            passed: known.passed(partition),
            epoch: known.epoch(partition),
            sent_in: sent.get(&partition).copied(),
            has_own: known.left(partition).any(|fence| run_of(fence) == run_of(number)),
        };
        match fence.passed() {
            Passed::Yes => return Ok(FenceState::Passed),
            Passed::TakenOver => return Err(JobError::NotNow("another run has taken over".to_owned()).into()),
            Passed::No => {}
        }
        let look = self.look((partition, queue), number, known).await?;
        match fence.next(look) {
            Next::Idle => return Ok(FenceState::Idle),
            Next::Wait => return Ok(FenceState::Waiting(waits_for(look, queue))),
            Next::Send => self.send(queue, number).await?,
            Next::Leave => self.leave((partition, queue), number).await?,
        }
        sent.insert(partition, fence.epoch);
        Ok(FenceState::Waiting(waits_for(look, queue)))
    }

    /// Counts the messages without tallyd's fences, before the queue is deleted. Publishes a fence first, so the answer
    /// is a fact.
    ///
    /// # Errors
    /// [`JobError::NotNow`] if the queue has a consumer, or if the number is still unknown after `fence_max`.
    pub async fn events_in(&self, (partition, queue): (u16, &str)) -> Result<usize> {
        self.ask_events((partition, queue)).await.with_context(|| {
            format!("the queue {queue} stays, because its messages cannot be counted: check that it has a leader, then try again")
        })
    }

    async fn ask_events(&self, (partition, queue): (u16, &str)) -> Result<usize> {
        let began = Instant::now();
        // A command is no run of a job. The time is a number that no run and no other command has.
        let number = clock::now().0.unsigned_abs();
        let mut pause = LOOK_MIN;
        self.leave((partition, queue), number).await?;
        loop {
            let known = self.store.fences(self.job).await?;
            match self.look((partition, queue), number, &known).await? {
                Look::Consumed { .. } => return Err(JobError::NotNow(format!("a daemon consumes {queue}")).into()),
                Look::Unconsumed { events } if known.left(partition).any(|fence| fence == number) => {
                    if self.store.fences(self.job).await? == known {
                        return Ok(events);
                    }
                }
                Look::Unconsumed { .. } | Look::Unknown => {}
            }
            if began.elapsed() > self.fence_max {
                return Err(JobError::NotNow(unknown(queue)).into());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    async fn look(&self, (partition, queue): (u16, &str), number: u64, known: &KnownFences) -> Result<Look> {
        let depth = self.publisher.depth(queue).await?;
        if let Some(look) = Look::of(depth, known.left(partition).count()) {
            return Ok(look);
        }
        self.store.forget_fences(partition, Some(run_of(number))).await?;
        Ok(Look::Unknown)
    }

    async fn leave(&self, (partition, queue): (u16, &str), number: u64) -> Result<()> {
        self.store.note_fence(partition, number).await?;
        self.send(queue, number).await?;
        Ok(self.store.confirm_fence(partition, number).await?)
    }

    async fn send(&self, queue: &str, number: u64) -> Result<()> {
        match self.publisher.publish_behind(queue, &encode_fence(number)).await {
            Err(BrokerError::Nacked) => return Err(JobError::NotNow(format!("{queue} rejects the fence")).into()),
            sent => sent.with_context(|| format!("send a fence to {queue}"))?,
        }
        fault::point("fence:sent");
        Ok(())
    }
}

fn unknown(queue: &str) -> String {
    format!("RabbitMQ does not say how many messages {queue} has")
}

fn waits_for(look: Look, queue: &str) -> String {
    match look {
        Look::Unknown => unknown(queue),
        Look::Consumed { messages } => format!("{queue} has {messages} messages before the fence"),
        Look::Unconsumed { events: 0 } => format!("{queue} has not confirmed the fence"),
        Look::Unconsumed { events } => format!("{queue} has {events} messages and no consumer"),
    }
}
