//! Sends the events that concurrent calls publish as one list, with one confirm: a message and a confirm of its own would
//! cost the broker more than all other work on an event (docs/performance.md).
//!
//! A call goes at once if the last list went more than `group` ago. Otherwise it goes when that time is over, or when the
//! list is full. A list is sent by a task of its own, so that a call that is cancelled takes no other event with it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tallyd_connect::fate::Fate;
use tallyd_core::event::{list_of, with_traceparent};
use tallyd_rabbitmq::{Broker, BrokerError, Publisher};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::traced;

const EVENTS_MAX: usize = 100;
const BYTES_MAX: usize = 256 << 10;

type Confirmed = Result<(), BrokerError>;

/// An event's body with its address.
pub(crate) struct Message {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) body: Vec<u8>,
    /// The event must go to the partition of its own routing key.
    pub(crate) is_alone: bool,
}

struct Waiting {
    message: Message,
    traceparent: Option<String>,
    /// The call has ended then.
    until: Instant,
    confirmed: oneshot::Sender<Confirmed>,
}

/// The list that takes events.
#[derive(Default)]
struct Open {
    /// The number of lists that went before.
    number: u64,
    waiting: Vec<Waiting>,
    bytes: usize,
    /// When the last list went.
    went: Option<Instant>,
}

impl Open {
    /// Adds an event. Returns a list that must go before it, or that it has filled.
    fn add(&mut self, item: Waiting, now: Instant) -> Option<Vec<Waiting>> {
        let bytes = item.message.body.len();
        let fits = self.bytes + bytes <= BYTES_MAX
            && self.waiting.first().is_none_or(|first| first.message.exchange == item.message.exchange);
        let before = (!fits && !self.waiting.is_empty()).then(|| self.take(now));
        self.bytes += bytes;
        self.waiting.push(item);
        before.or_else(|| (self.waiting.len() == EVENTS_MAX).then(|| self.take(now)))
    }

    fn take(&mut self, now: Instant) -> Vec<Waiting> {
        (self.number, self.bytes, self.went) = (self.number + 1, 0, Some(now));
        std::mem::take(&mut self.waiting)
    }
}

/// If the broker rejects an event, a connection is kept at least this long: a full queue rejects each list.
const REJECTED_AFTER: Duration = Duration::from_secs(1);

struct Connected {
    publisher: Arc<Publisher>,
    since: Instant,
}

#[derive(Clone)]
pub(crate) struct Groups(Arc<Shared>);

struct Shared {
    broker: Broker,
    connected: tokio::sync::Mutex<Option<Connected>>,
    open: Mutex<Open>,
    group: Duration,
    confirm_max: Duration,
}

impl Groups {
    /// Each call ends within `confirm_max`, so a list waits for at most half of it.
    pub(crate) fn new(broker: Broker, group: Duration, confirm_max: Duration) -> Self {
        Self(Arc::new(Shared {
            broker,
            connected: tokio::sync::Mutex::default(),
            open: Mutex::default(),
            group: group.min(confirm_max / 2),
            confirm_max,
        }))
    }

    pub(crate) async fn publish(&self, message: Message) -> Confirmed {
        self.publish_all(vec![message]).await.pop().unwrap_or_else(|| Err(self.0.no_answer()))
    }

    /// Returns the result of each message, in the order of `messages`. A message that is not confirmed may have arrived.
    pub(crate) async fn publish_all(&self, messages: Vec<Message>) -> Vec<Confirmed> {
        let until = Instant::now() + self.0.confirm_max;
        let mut results = Vec::with_capacity(messages.len());
        for confirmed in self.add(messages, until) {
            // Only a runtime that ends drops a list.
            let confirmed = timeout_at(until, confirmed).await;
            results.push(confirmed.ok().and_then(Result::ok).unwrap_or_else(|| Err(self.0.no_answer())));
        }
        results
    }

    fn add(&self, messages: Vec<Message>, until: Instant) -> Vec<oneshot::Receiver<Confirmed>> {
        let traceparent = traced::current();
        let mut receivers = Vec::with_capacity(messages.len());
        let mut open = self.0.open();
        let now = Instant::now();
        let number = open.number;
        let was_empty = open.waiting.is_empty();
        for message in messages {
            let (confirmed, receiver) = oneshot::channel();
            receivers.push(receiver);
            let item = Waiting { message, traceparent: traceparent.clone(), until, confirmed };
            if item.message.is_alone {
                self.send(vec![item]);
            } else if let Some(list) = open.add(item, now) {
                self.send(list);
            }
        }
        let is_new = was_empty || open.number != number;
        match open.went.map(|went| went + self.0.group) {
            _ if open.waiting.is_empty() => {}
            Some(due) if due > now => {
                if is_new {
                    self.send_at(due, open.number);
                }
            }
            _ => self.send(open.take(now)),
        }
        receivers
    }

    fn send_at(&self, due: Instant, number: u64) {
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            sleep_until(due).await;
            let list = {
                let mut open = shared.open();
                // A full list does not wait until it is due.
                if open.number == number { open.take(Instant::now()) } else { Vec::new() }
            };
            if !list.is_empty() {
                shared.send(list).await;
            }
        });
    }

    fn send(&self, list: Vec<Waiting>) {
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move { shared.send(list).await });
    }

    pub(crate) async fn answers(&self) -> Confirmed {
        let publisher = self.0.publisher().await?;
        let answered = publisher.answers().await;
        if answered.is_err() {
            self.0.drop_publisher(&publisher, Duration::ZERO).await;
        }
        answered
    }
}

impl Shared {
    fn open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn no_answer(&self) -> BrokerError {
        BrokerError::NoAnswer { action: "publish", limit: self.confirm_max }
    }

    async fn send(&self, list: Vec<Waiting>) {
        let message = joined(&list);
        let until = list.iter().map(|waiting| waiting.until).max().unwrap_or_else(Instant::now);
        let published = timeout_at(until, self.publish_twice(&message)).await;
        let confirmed = published.unwrap_or_else(|_| Err(self.no_answer()));
        for waiting in list {
            let _ = waiting.confirmed.send(confirmed.clone());
        }
    }

    /// Publishes, and once more after a failure, because perhaps only the connection had broken, or only its node of the
    /// broker is cut off and rejects everything. A repeated event changes nothing.
    async fn publish_twice(&self, message: &Joined<'_>) -> Confirmed {
        let first = self.publish_once(message).await;
        if first.is_err() { self.publish_once(message).await } else { first }
    }

    async fn publish_once(&self, message: &Joined<'_>) -> Confirmed {
        let publisher = self.publisher().await?;
        let Joined { exchange, routing_key, body, traceparent } = message;
        let published = publisher.publish_traced(exchange, routing_key, body, *traceparent).await;
        if let Err(error) = &published {
            let kept = if error.fate() == Fate::Item { REJECTED_AFTER } else { Duration::ZERO };
            self.drop_publisher(&publisher, kept).await;
        }
        published
    }

    /// Drops the publisher if it was made longer ago than `kept`. Another list may already have made a new one.
    async fn drop_publisher(&self, publisher: &Arc<Publisher>, kept: Duration) {
        let mut connected = self.connected.lock().await;
        connected.take_if(|known| Arc::ptr_eq(&known.publisher, publisher) && known.since.elapsed() >= kept);
    }

    async fn publisher(&self) -> Result<Arc<Publisher>, BrokerError> {
        let mut connected = self.connected.lock().await;
        if let Some(known) = connected.as_ref() {
            return Ok(Arc::clone(&known.publisher));
        }
        let publisher = Arc::new(self.broker.connect_publisher("client").await?);
        *connected = Some(Connected { publisher: Arc::clone(&publisher), since: Instant::now() });
        Ok(publisher)
    }
}

/// The message of a list.
struct Joined<'a> {
    exchange: &'a str,
    routing_key: &'a str,
    body: Vec<u8>,
    traceparent: Option<&'a str>,
}

/// A list of one event is this event. The first event's routing key is that of the list: tallyd takes each event from any
/// partition.
fn joined(list: &[Waiting]) -> Joined<'_> {
    let Some(first) = list.first() else {
        return Joined { exchange: "", routing_key: "", body: Vec::new(), traceparent: None };
    };
    let Message { exchange, routing_key, body, .. } = &first.message;
    if list.len() == 1 {
        return Joined { exchange, routing_key, body: body.clone(), traceparent: first.traceparent.as_deref() };
    }
    let bodies: Vec<_> = list
        .iter()
        .map(|Waiting { message, traceparent, .. }| match traceparent {
            Some(traceparent) => with_traceparent(&message.body, traceparent),
            None => message.body.as_slice().into(),
        })
        .collect();
    Joined { exchange, routing_key, body: list_of(bodies.iter().map(AsRef::as_ref)), traceparent: None }
}
