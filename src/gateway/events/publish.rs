//! Publishes judged events. A: reads the click limits. B: sends all messages, pipelined. C: the broker confirms
//! messages. D: sends confirmed likes to Redis. Only step C decides the verdicts. While Redis is unreachable, A and D
//! are skipped.
//!
//! For metrics with `writer = "api"`, the client counts and publishes the events. The events of one user are processed
//! one after the other. Events of several users are processed at the same time.

use std::borrow::Cow;
use std::collections::BTreeMap;

use futures_util::{StreamExt, stream};
use serde::Deserialize;

use super::super::Gate;
use super::judge::Judged;
use super::verdict::Verdict;
use crate::config::Writes;
use tallyd_client::counts::{Change, Changed, Counting};
use tallyd_client::gateway::Message as Sent;
use tallyd_client::{BrokerError, Clicked, ClientError, CountError, LikeError, TakenBack};
use tallyd_core::event::{CountEvent, LikeEvent, Message, Reason, Refusal, SetEvent};
use tallyd_core::model::{CounterKey, Micros, UserId};
use tallyd_core::writers::Writers;

/// A request can contain events of many users. The gateway counts the events of at most this number of users at the
/// same time.
const USERS_AT_ONCE: usize = 32;

/// An event, and its index in the request.
type Placed<'a> = (usize, Judged<'a>);

/// Publishes the events that were not refused. Returns the verdicts in the order of the request.
pub(super) async fn publish(gate: &Gate, events: Vec<Result<Judged<'_>, Refusal>>) -> Vec<Verdict> {
    let writers = gate.client.writers().await;
    let mut verdicts: Vec<Option<Verdict>> = Vec::with_capacity(events.len());
    let (mut plain, mut counted) = (Vec::new(), Vec::new());
    for (place, event) in events.into_iter().enumerate() {
        verdicts.push(match event {
            Err(refusal) => Some(refusal.into()),
            Ok(judged) if is_counted_here(gate, &writers, &judged) => {
                counted.push((place, judged));
                None
            }
            Ok(judged) => {
                plain.push((place, judged));
                None
            }
        });
    }
    let (plain, counted) = tokio::join!(publish_plain(gate, plain), count_all(gate, counted));
    for (place, verdict) in plain.into_iter().chain(counted) {
        if let Some(slot) = verdicts.get_mut(place) {
            *slot = Some(verdict);
        }
    }
    let lost = || Verdict::unconfirmed(Micros(0), "the gateway lost this event");
    verdicts.into_iter().map(|verdict| verdict.unwrap_or_else(lost)).collect()
}

fn is_counted_here(gate: &Gate, writers: &Writers, judged: &Judged<'_>) -> bool {
    let (kind, metric) = match judged.message {
        Message::Like(like) => (like.target.kind, gate.config.metrics.like()),
        Message::Count(count) => (count.target.kind, count.metric),
        Message::Set(set) => (set.target.kind, set.metric),
        Message::Fence(_) => return false,
    };
    writers.of(kind, metric) == Writes::Api
}

/// Publishes events that the daemon counts.
async fn publish_plain(gate: &Gate, mut events: Vec<Placed<'_>>) -> Vec<(usize, Verdict)> {
    let mut verdicts = limited(gate, &mut events).await;
    if events.is_empty() {
        return verdicts;
    }
    let messages: Vec<Sent> =
        events.iter().map(|(_, event)| (event.routing_key(&gate.terms), event.body.to_vec())).collect();
    let results = gate.client.publish_all(&messages).await;
    let mut confirmed: Vec<LikeEvent> = Vec::new();
    for (number, (place, event)) in events.iter().enumerate() {
        let result = results.as_ref().map(|results| results.get(number));
        verdicts.push((
            *place,
            match result {
                Ok(Some(Ok(()))) => {
                    confirmed.extend(if let Message::Like(like) = event.message { Some(like) } else { None });
                    Verdict::confirmed(event.at())
                }
                Ok(Some(Err(error))) | Err(error) => Verdict::unconfirmed(event.at(), problem(error)),
                Ok(None) => Verdict::unconfirmed(event.at(), "the broker did not answer for this event"),
            },
        ));
    }
    if !confirmed.is_empty() {
        gate.remembered.add(confirmed).await;
    }
    verdicts
}

/// Returns the error's message without the causes, because a cause can contain an address.
fn problem(error: &BrokerError) -> String {
    format!("the broker did not confirm the event: {error}")
}

/// Removes from `events` the likes of users who click too often, and returns verdicts for these likes.
async fn limited(gate: &Gate, events: &mut Vec<Placed<'_>>) -> Vec<(usize, Verdict)> {
    if gate.config.client.rate_likes_max == 0 {
        return Vec::new();
    }
    let user = |event: &Judged<'_>| if let Message::Like(like) = event.message { Some(like.user) } else { None };
    let users: Vec<UserId> = events.iter().filter_map(|(_, event)| user(event)).collect();
    let waits = gate.hints.ask(gate.client.limits_of(&users)).await.unwrap_or_default();
    let (mut waits, mut verdicts) = (waits.into_iter(), Vec::new());
    events.retain(|(place, event)| {
        let wait = user(event).and_then(|_| waits.next().flatten());
        verdicts.extend(wait.map(|wait| (*place, Verdict::limited(wait))));
        wait.is_none()
    });
    verdicts
}

/// Counts and publishes events that API servers count. Events of the same user are processed one after the other, and
/// so are events of the same counter.
async fn count_all(gate: &Gate, events: Vec<Placed<'_>>) -> Vec<(usize, Verdict)> {
    let mut groups: BTreeMap<String, Vec<Placed<'_>>> = BTreeMap::new();
    for (place, event) in events {
        groups.entry(event.routing_key(&gate.terms)).or_default().push((place, event));
    }
    let groups: Vec<_> = groups.into_values().map(|group| count_group(gate, group)).collect();
    stream::iter(groups).buffer_unordered(USERS_AT_ONCE).concat().await
}

async fn count_group(gate: &Gate, group: Vec<Placed<'_>>) -> Vec<(usize, Verdict)> {
    let mut verdicts = Vec::with_capacity(group.len());
    for (place, event) in &group {
        verdicts.push((*place, count(gate, event).await));
    }
    verdicts
}

async fn count(gate: &Gate, event: &Judged<'_>) -> Verdict {
    match event.message {
        Message::Like(like) => click(gate, like).await,
        Message::Count(CountEvent { target, metric, delta, at, .. }) => match event_id(&event.body) {
            Some(event_id) => change(gate, (target, metric), Change::Add { delta, event_id }, at).await,
            None => Verdict::refused(Reason::EventIdOutOfRange.code(), "event_id can't be read"),
        },
        Message::Set(SetEvent { target, metric, value, at }) => {
            change(gate, (target, metric), Change::Set(value), at).await
        }
        Message::Fence(_) => Verdict::refused(Reason::UnknownType.code(), "only tallyd can send a fence"),
    }
}

/// Counts and publishes a like. Redis sets the like's `at`. A retry gets the same `at`, because Redis remembers the
/// click.
async fn click(gate: &Gate, LikeEvent { target, user, at, liked }: LikeEvent) -> Verdict {
    let clicked = match liked {
        true => gate.client.like(target, user, &[]).await,
        false => gate.client.unlike(target, user, &[]).await,
    };
    match clicked {
        Ok(Clicked::Published(event)) => Verdict::confirmed(event.at),
        Ok(Clicked::Counted(counted)) => Verdict::counted(counted.event.at, true, counted.count),
        Ok(Clicked::Same { count, at }) => Verdict::counted(at, false, count),
        Ok(Clicked::Limited { wait }) => Verdict::limited(wait),
        Err(LikeError::NotCounted(error)) => not_counted(&error, at),
        Err(LikeError::NotConfirmed { event, source }) => Verdict::unconfirmed(event.at, problem(&source)),
        Err(LikeError::NotPublished { counted, source, .. }) => {
            Verdict::unconfirmed(counted.event.at, problem(&source))
        }
    }
}

/// Counts and publishes an event, and keeps the event's `at`. Assumes that Redis has not counted the event, or has
/// undone the count. If the client repeats the event, MySQL applies it once, but Redis counts it again.
async fn change(gate: &Gate, (target, metric): CounterKey, change: Change, at: Micros) -> Verdict {
    let changed = Changed::at(target, metric, change, at);
    match gate.client.republish(&changed, TakenBack::Yes).await {
        Ok(Counting::Counted(changed)) => Verdict::counted(changed.at, changed.added() != 0, changed.count),
        Ok(Counting::BelowZero { count }) => {
            Verdict::refused("below-zero", format!("the counter is {count}, and no [[rule]] sets below_zero"))
        }
        Err(CountError::NotCounted(error)) => not_counted(&error, at),
        Err(CountError::NotPublished { source, .. }) => Verdict::unconfirmed(at, problem(&source)),
    }
}

fn not_counted(error: &ClientError, at: Micros) -> Verdict {
    match error {
        ClientError::Invalid(message) => Verdict::refused(Reason::ValueOutOfRange.code(), message.clone()),
        error => Verdict::unconfirmed(at, format!("the event was not counted: {error}")),
    }
}

fn event_id(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Id<'a> {
        #[serde(borrow)]
        event_id: Cow<'a, str>,
    }
    serde_json::from_slice::<Id<'_>>(body).ok().map(|id| id.event_id.into_owned())
}
