//! Publishes judged events. A: reads the click limits. B: sends the events in lists. C: the broker confirms
//! the lists. Only step C decides the verdicts. While Redis is unreachable, A is skipped.
//!
//! If API servers count likes in Redis, the gateway only publishes these likes, without A: a script has already counted
//! and remembered the click. Such a like needs the `at` of the script.

use super::super::Gate;
use super::judge::Judged;
use super::verdict::Verdict;
use tallyd_base::config::Writes;
use tallyd_client::BrokerError;
use tallyd_core::event::{LikeEvent, Message, Reason, Refusal};
use tallyd_core::model::Micros;
use tallyd_core::site::Site;

/// The reason for a like without `at` that API servers should have counted.
const COUNTED_BY_API: &str = "counted-by-api";

type Placed<'a> = (usize, Judged<'a>);

pub(super) async fn publish(gate: &Gate, site: &Site, events: Vec<Result<Judged<'_>, Refusal>>) -> Vec<Verdict> {
    let mut verdicts: Vec<Option<Verdict>> = Vec::with_capacity(events.len());
    let mut accepted = Vec::new();
    for (place, event) in events.into_iter().enumerate() {
        verdicts.push(match event {
            Err(refusal) => Some(refusal.into()),
            Ok(judged) if is_uncounted(site, &judged) => Some(not_counted()),
            Ok(judged) => {
                accepted.push((place, judged));
                None
            }
        });
    }
    for (place, verdict) in send(gate, site, accepted).await {
        if let Some(slot) = verdicts.get_mut(place) {
            *slot = Some(verdict);
        }
    }
    let lost = || Verdict::unconfirmed(Micros(0), "the gateway lost this event");
    verdicts.into_iter().map(|verdict| verdict.unwrap_or_else(lost)).collect()
}

/// Whether the event is refused because of the site card.
pub(super) fn rests_on_card(site: &Site, event: &Result<Judged<'_>, Refusal>) -> bool {
    match event {
        Ok(judged) => is_uncounted(site, judged),
        Err(Refusal { reason, .. }) => matches!(
            reason,
            Reason::UnknownKind | Reason::UnknownMetric | Reason::NotSettable | Reason::AtInFuture | Reason::AtTooOld
        ),
    }
}

/// Whether the event is a like that API servers should have counted. Then the script's `at` is missing.
fn is_uncounted(site: &Site, judged: &Judged<'_>) -> bool {
    judged.has_gateways_at() && like_of_daemon(site, judged).is_none()
}

fn not_counted() -> Verdict {
    let message = "API servers count these likes (writer = \"api\"): call lua/like.lua as docs/scripts.md says, and \
                   send the event with the `at` that the script returns";
    Verdict::refused(COUNTED_BY_API, message)
}

fn like_of_daemon(site: &Site, judged: &Judged<'_>) -> Option<LikeEvent> {
    let Message::Like(like) = judged.message else { return None };
    let writer = site.ruled(like.target.kind, site.metrics.like()).writer;
    Some(like).filter(|_| writer == Writes::Daemon)
}

async fn send(gate: &Gate, site: &Site, mut events: Vec<Placed<'_>>) -> Vec<(usize, Verdict)> {
    let mut verdicts = limited(gate, site, &mut events).await;
    if events.is_empty() {
        return verdicts;
    }
    let bodies = events.iter().map(|(_, event)| (event.routing_key(&site.terms), event.body.to_vec()));
    let results = gate.client.publish_all(bodies.collect()).await;
    verdicts.extend(events.iter().zip(results).map(|((place, event), result)| match result {
        Ok(()) => (*place, Verdict::confirmed(event.at())),
        Err(error) => (*place, Verdict::unconfirmed(event.at(), problem(&error))),
    }));
    verdicts
}

/// Returns the error's message without the causes, because a cause can contain an address.
fn problem(error: &BrokerError) -> String {
    format!("the broker did not confirm the event: {error}")
}

async fn limited(gate: &Gate, site: &Site, events: &mut Vec<Placed<'_>>) -> Vec<(usize, Verdict)> {
    if !gate.has_limit {
        return Vec::new();
    }
    let click = |event: &Judged<'_>| like_of_daemon(site, event);
    let clicks: Vec<LikeEvent> = events.iter().filter_map(|(_, event)| click(event)).collect();
    let waits = gate.hints.ask(gate.client.limits_of(&clicks)).await.unwrap_or_default();
    let (mut waits, mut verdicts) = (waits.into_iter(), Vec::new());
    events.retain(|(place, event)| {
        let wait = click(event).and_then(|_| waits.next().flatten());
        verdicts.extend(wait.map(|wait| (*place, Verdict::limited(wait))));
        wait.is_none()
    });
    verdicts
}
