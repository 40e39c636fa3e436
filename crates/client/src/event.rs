//! The events that a client publishes.

use super::error::require;
use super::groups::Message;
use super::site::Known;
use super::{Client, Result};
use tallyd_core::event::{
    DELTA_MAX, EVENT_ID_MAX, ID_MAX, LikeEvent, encode_count, encode_like, encode_reset, encode_set,
};
use tallyd_core::kinds::LIKE;
use tallyd_core::model::{Metric, Micros, Target};
use tallyd_core::partition::PartitionBy;
use tallyd_core::rules::Ruled;

/// The largest number that is counted exactly: 2^53-1. The smallest number is -2^53+1.
pub const NUMBER_MAX: i64 = (1 << 53) - 1;

/// An event that a client publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A user likes a target, or no longer likes it.
    Like(LikeEvent),
    /// Another number changes.
    Change(Changed),
}

/// How a number changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// `delta` is added to the number, once for each `event_id`.
    Add {
        /// The difference, from -2^31 to 2^31.
        delta: i64,
        /// An id of 1 to 64 characters. Each event of this number needs a different id.
        event_id: String,
    },
    /// The number is set to this value, from -[`NUMBER_MAX`] to [`NUMBER_MAX`].
    Set(i64),
    /// The number is set to zero.
    Reset,
}

/// A change of a number other than likes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The target that the number belongs to.
    pub target: Target,
    /// The metric that changes.
    pub metric: Metric,
    /// How it changes.
    pub change: Change,
    /// The time of the change. A repeated event must have the same time.
    pub at: Micros,
}

impl Client {
    /// Publishes an event as it is, and waits until the broker has it on disk. Use it to repeat an event that was not
    /// confirmed: an event that arrives twice changes nothing. Also use it if lua/like.lua or lua/count.lua has counted
    /// the event, with the script's `at` and with the script's number as `count`. Without a script, `count` is `None`.
    ///
    /// # Errors
    ///
    /// The daemon would reject the event, or [`ClientError::Broker`](super::ClientError::Broker): the broker is
    /// unreachable, refused the event, or did not confirm it in time. In this case, the broker may have the event
    /// nevertheless.
    pub async fn publish(&self, event: &Event, count: Option<i64>) -> Result<()> {
        let message = self.checked(event, count, false).await?;
        Ok(self.groups.publish(message).await?)
    }

    /// Fails if the daemon would reject the event.
    ///
    /// # Errors
    /// [`ClientError::Invalid`](super::ClientError::Invalid); [`ClientError::NoKind`](super::ClientError::NoKind);
    /// [`ClientError::NoMetric`](super::ClientError::NoMetric).
    pub async fn check(&self, event: &Event) -> Result<()> {
        self.checked(event, None, false).await.map(drop)
    }

    /// Checks an event, and returns its message. If `must_be_daemons`, fails if API servers count the number.
    ///
    /// A newer card can allow what the last one forbids, so the client reads the card again before it refuses an event.
    pub(super) async fn checked(&self, event: &Event, count: Option<i64>, must_be_daemons: bool) -> Result<Message> {
        let check = |known: &Known| {
            let message = self.message(known, event, count)?;
            if must_be_daemons {
                self.is_by_daemon(known, event)?;
            }
            Ok(message)
        };
        match check(&*self.sites.current().await) {
            Err(_) => check(&*self.sites.refreshed().await),
            message => message,
        }
    }

    fn message(&self, known: &Known, event: &Event, count: Option<i64>) -> Result<Message> {
        let target = match event {
            Event::Like(like) => like.target,
            Event::Change(changed) => changed.target,
        };
        let is_id = |id: u64| (1..=ID_MAX).contains(&id);
        require(is_id(target.id.0), || format!("the target's id is {}, allowed are 1 to {ID_MAX}", target.id))?;
        let kind = self.kind_name(known, target.kind)?;
        let (routing_key, body) = match event {
            Event::Like(like) => {
                require(is_id(like.user.0), || format!("the user's id is {}, allowed are 1 to {ID_MAX}", like.user))?;
                let routing_key = known.site.terms.partition_by.routing_key(target, like.user);
                (routing_key, encode_like(like, &kind, count))
            }
            // The routing key of a like is the user's id, because this spreads the likes of a popular target over all
            // partitions. For counts, one partition per target is enough, because a batch adds up all its changes.
            Event::Change(changed) => (target.id.to_string(), self.change_body(known, changed, &kind, count)?),
        };
        Ok(Message {
            exchange: known.site.exchange.clone(),
            routing_key,
            body,
            is_alone: known.site.terms.partition_by == PartitionBy::Target,
        })
    }

    fn change_body(&self, known: &Known, changed: &Changed, kind: &str, count: Option<i64>) -> Result<Vec<u8>> {
        let Changed { target, metric, change, at } = changed;
        let name = self.metric_name(known, *metric)?;
        require(name != LIKE, || "likes are counted only by `like` and `unlike`".to_owned())?;
        check_change(change, &name, known.ruled(kind, &name))?;
        let names = (kind, name.as_str());
        Ok(match change {
            Change::Add { delta, event_id } => encode_count(target.id, names, *delta, *at, event_id, count),
            Change::Set(value) => encode_set(target.id, names, *value, *at),
            Change::Reset => encode_reset(target.id, names, *at),
        })
    }
}

fn check_change(change: &Change, name: &str, ruled: Option<Ruled>) -> Result<()> {
    match change {
        Change::Add { delta, event_id } => {
            let in_range = delta.unsigned_abs() <= DELTA_MAX;
            require(in_range, || format!("delta is {delta}, allowed are -{DELTA_MAX} to {DELTA_MAX}"))?;
            let length = event_id.chars().count();
            let in_range = (1..=EVENT_ID_MAX).contains(&length);
            require(in_range, || format!("event_id has {length} characters, allowed are 1 to {EVENT_ID_MAX}"))
        }
        Change::Set(_) | Change::Reset => {
            let is_settable = ruled.is_none_or(|ruled| ruled.settable);
            require(is_settable, || format!("no [[rule]] says that {name} is settable"))?;
            let Change::Set(value) = *change else { return Ok(()) };
            let in_range = value.unsigned_abs() <= NUMBER_MAX.unsigned_abs();
            require(in_range, || format!("the number is {value}, and must be below 2^53"))?;
            let in_range = value >= 0 || ruled.is_none_or(|ruled| ruled.below_zero);
            require(in_range, || format!("{name} can't be set to {value}: no [[rule]] says below_zero"))
        }
    }
}
