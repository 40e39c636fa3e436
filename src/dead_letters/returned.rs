//! Moves messages from the queue of returned messages into the table `dead_letter`. The queue has messages that were
//! returned to the broker too often, and dead letters over the quota.

use std::fmt;

use anyhow::{Result, ensure};
use lapin::Acker;
use lapin::options::BasicAckOptions;
use serde::Serialize;

use super::preview::judge;
use crate::letter;
use tallyd_base::config::Config;
use tallyd_base::runtime::clock;
use tallyd_base::runtime::progress::counted;
use tallyd_connect::fate::Fate;
use tallyd_core::event::Terms;
use tallyd_mysql::letters::DeadLetter;
use tallyd_mysql::{Store, StoreError};
use tallyd_rabbitmq::{Broker, Link};

const AT_ONCE: usize = 100;

const BYTES_AT_ONCE: usize = 4 << 20;

const TAKEN_MAX: u64 = 10_000;

const REPLY_SUCCESS: u16 = 200;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Returned {
    pub queue: String,
    pub taken_in: u64,
    pub fences: u64,
    pub left: u32,
    /// Whether the quota of dead letters is full. If so, the remaining messages wait in the queue.
    pub full: bool,
    pub problem: Option<String>,
}

/// Moves the waiting messages into the table. A failure is reported in `problem`, and the messages stay in the queue.
pub(crate) async fn take_in(store: &Store, broker: &Broker, dead_letters_max: u64) -> Returned {
    let mut returned = Returned { queue: broker.returned(), ..Returned::default() };
    if let Err(error) = take(store, broker, dead_letters_max, &mut returned).await {
        returned.problem = Some(format!("{error:#}"));
    }
    returned
}

async fn take(store: &Store, broker: &Broker, max: u64, returned: &mut Returned) -> Result<()> {
    // Both checks are made before any message is taken, because a failure returns all taken messages.
    store.may_keep_dead_letters().await?;
    let open = store.open_dead_letters().await?.into_iter().map(|(.., letters)| letters).sum();
    let room = max.saturating_sub(open).min(TAKEN_MAX);
    match take_so_many(store, broker, (AT_ONCE, room), returned).await {
        // One message can be undeliverable, or MySQL can refuse one message. In both cases, all messages of the
        // transaction are in the queue again. The next call takes the messages one by one, so it can store the others.
        Err(error) if error.downcast_ref().is_none_or(is_of_one) => {
            take_so_many(store, broker, (1, room), returned).await
        }
        taken => taken,
    }
}

fn is_of_one(error: &StoreError) -> bool {
    error.fate() == Fate::Item
}

async fn take_so_many(
    store: &Store,
    broker: &Broker,
    (at_once, room): (usize, u64),
    returned: &mut Returned,
) -> Result<()> {
    let link = broker.connect("dead letters").await?;
    // The default configuration is sufficient here, because only fence messages must be recognized.
    let terms = Terms::from(&Config::default());
    let mut refused = None;
    while returned.taken_in + returned.fences < room {
        let at_once = at_once.min(usize::try_from(room - returned.taken_in - returned.fences).unwrap_or(at_once));
        let Some(taken) = gather(&link, (&returned.queue, &broker.map_queues()), at_once, &terms).await? else { break };
        match store.keep_dead_letters(&taken.letters).await {
            // MySQL has refused the message, so the code does not acknowledge the message. The broker delivers the next
            // message, and requeues the refused message when the channel closes.
            Err(error) if at_once == 1 && is_of_one(&error) => {
                refused = Some(error);
                continue;
            }
            kept => kept?,
        }
        let acknowledged = taken.last.ack(BasicAckOptions { multiple: refused.is_none() });
        ensure!(
            link.call("acknowledge", acknowledged).await?,
            "the delivery is stale: the broker has requeued the message"
        );
        returned.taken_in += taken.letters.len() as u64;
        returned.fences += taken.fences;
        returned.left = taken.left;
    }
    if room < TAKEN_MAX && returned.taken_in + returned.fences >= room {
        returned.left = link.count(&returned.queue).await?;
        returned.full = returned.left > 0;
    }
    // The broker's reply shows that the acknowledgements have arrived, too.
    link.call("close the channel", link.channel.close(REPLY_SUCCESS, "done".into())).await?;
    refused.map_or(Ok(()), |error| Err(error.into()))
}

struct Taken {
    letters: Vec<DeadLetter>,
    fences: u64,
    /// Acknowledges the last message and, with `multiple`, all messages before it.
    last: Acker,
    left: u32,
}

async fn gather(link: &Link, from: (&str, &str), at_once: usize, terms: &Terms) -> Result<Option<Taken>> {
    let (mut letters, mut fences, mut bytes) = (Vec::new(), 0, 0);
    let mut last = None;
    while letters.len() + fences < at_once && bytes < BYTES_AT_ONCE {
        let Some(message) = link.get(from.0).await? else { break };
        let (delivery, now) = (message.delivery, clock::now());
        bytes += delivery.data.len();
        if judge(&delivery.data, terms, now).is_fence {
            fences += 1;
        } else {
            letters.push(letter::returned(&delivery.data, &delivery.properties, from, now));
        }
        last = Some((delivery.acker, message.message_count));
    }
    Ok(last.map(|(last, left)| Taken { letters, fences: fences as u64, last, left }))
}

impl fmt::Display for Returned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, taken_in, fences, left, full, problem } = self;
        let mut parts = Vec::new();
        if *taken_in > 0 {
            let moved = counted(*taken_in, "message was moved", "messages were moved");
            parts.push(format!("{moved} from {queue} into dead_letter"));
        }
        if *fences > 0 {
            let removed = counted(*fences, "fence of an ended run was", "fences of ended runs were");
            parts.push(format!("{removed} removed from {queue}"));
        }
        if *full {
            parts.push(format!("{left} more wait in {queue} because the dead-letter quota is full: replay or purge dead letters, then list again"));
        } else if *left > 0 {
            parts.push(format!("{left} more wait in {queue}: list again"));
        }
        if let Some(problem) = problem {
            parts.push(format!("{queue} could not be read: {}", letter::text::printable(problem)));
        }
        f.write_str(&parts.join("\n"))
    }
}
