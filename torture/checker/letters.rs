//! Checks dead letters: every message that can't be applied must be a dead letter, and no other message must be one.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{About, Class, Letter, State, Violation};
use crate::history::{Answer, Call, History, Micros, What, event_id};

/// The body of a message that can't be applied contains this text, followed by the message's number.
const MARK: &str = "letter-";

/// If RabbitMQ 4 returned a message, its dead letter has this reason.
const RETURNED: &str = "returned-by-broker";

/// If an event is ahead of the daemon's clock, its dead letter has this reason.
const AHEAD: &str = "at-in-future";

/// The valid events that wait as dead letters, because a fault had set Redis's clock ahead. If the broker redelivered
/// such an event too often before a daemon checked the event, the dead letter has the broker's reason.
#[derive(Default)]
pub struct Aside(HashSet<String>);

impl Aside {
    /// Finds valid events among the open dead letters.
    pub fn of(history: &History, state: &State) -> Self {
        let ahead = |call: &Call| {
            let (Answer::Done { at } | Answer::NotConfirmed { at }) = call.answer else { return None };
            history.is_ahead(call, at).then(|| of_call(&call.what, at))
        };
        let sent: HashSet<String> = history.calls.iter().filter_map(ahead).collect();
        let open = state.letters.iter().filter(|letter| may_be_ahead(letter) && !letter.is_replayed);
        Self(open.filter_map(|letter| of_body(&letter.body)).filter(|event| sent.contains(event)).collect())
    }

    /// Returns whether these events include the call's event.
    pub fn has(&self, what: &What, at: Micros) -> bool {
        !self.0.is_empty() && self.0.contains(&of_call(what, at))
    }

    fn has_letter(&self, letter: &Letter) -> bool {
        may_be_ahead(letter) && of_body(&letter.body).is_some_and(|event| self.0.contains(&event))
    }
}

fn may_be_ahead(letter: &Letter) -> bool {
    [AHEAD, RETURNED].contains(&letter.reason.as_str())
}

/// Returns a text that identifies the call's event in a dead letter's body.
fn of_call(what: &What, at: Micros) -> String {
    match what {
        What::Like { target, user, liked } => {
            format!("{} {target} {user} {at}", if *liked { "like" } else { "unlike" })
        }
        What::Add { target, event, .. } => format!("count {target} {} {at}", event_id(*event)),
        What::Set { target, value, .. } => format!("{} {target}  {at}", if *value == 0 { "reset" } else { "set" }),
        _ => String::new(),
    }
}

fn of_body(body: &str) -> Option<String> {
    let body: serde_json::Value = serde_json::from_str(body).ok()?;
    let text = |field: &str| body[field].as_str().unwrap_or_default();
    let who = [text("user_id"), text("event_id")].concat();
    Some(format!("{} {} {who} {}", text("type"), text("target_id"), body["at"].as_i64()?))
}

/// Returns the text that the body of this message contains.
pub fn mark(letter: u64) -> String {
    format!("{MARK}{letter}.")
}

/// Returns whether a fault of this run can cause valid events to be dead-lettered for that reason.
fn may_set_aside(history: &History, reason: &str) -> bool {
    let by =
        |names: &[&str]| history.windows.iter().any(|window| names.iter().any(|name| window.fault.starts_with(name)));
    match reason {
        "at-in-future" | "at-too-old" => by(&["clock-stepped"]),
        // Each time a consumer ends, RabbitMQ redelivers the consumer's unacknowledged messages.
        RETURNED => by(&["twenty-five-deaths", "daemon", "rabbitmq", "mysql", "reloads"]),
        _ => false,
    }
}

fn number(body: &str) -> Option<u64> {
    let (_, rest) = body.split_once(MARK)?;
    rest.split_once('.')?.0.parse().ok()
}

pub fn check(history: &History, state: &State, aside: &Aside, found: &mut Vec<Violation>) {
    let mut sent: BTreeMap<u64, (&'static str, bool)> = BTreeMap::new();
    for call in &history.calls {
        let What::Letter { letter, reason } = call.what else { continue };
        let is_certain = matches!(call.answer, Answer::Done { .. }) && !history.may_lose(call);
        if matches!(call.answer, Answer::Done { .. } | Answer::Unknown | Answer::NotConfirmed { .. }) {
            sent.entry(letter).or_insert((reason, false)).1 |= is_certain;
        }
    }
    let mut kept: HashMap<u64, usize> = HashMap::new();
    for letter in &state.letters {
        let number = number(&letter.body);
        let about = About::Letter { letter: number };
        match number.and_then(|number| Some((number, sent.get(&number)?))) {
            Some((number, (reason, _))) => {
                *kept.entry(number).or_default() += 1;
                // The consumers of this message ended too often, so the broker dead-lettered it before a daemon checked
                // it.
                let is_returned = letter.reason == RETURNED && may_set_aside(history, RETURNED);
                if *reason != letter.reason && !is_returned {
                    let says = format!("the dead letter {number} has the reason {}, not {reason}", letter.reason);
                    found.push(Violation::new(Class::Invented, about, says));
                }
            }
            // The event was dead-lettered and then replayed, so it is checked like any other event.
            None if letter.is_replayed && may_set_aside(history, &letter.reason) => {}
            None if aside.has_letter(letter) => {}
            // The dead letter is a fence (a marker) of a job's run that has ended.
            None if letter.reason == RETURNED
                && letter.body.contains(r#""type":"fence""#)
                && may_set_aside(history, RETURNED) => {}
            None => {
                let says = format!("this message should not be a dead letter ({}): {}", letter.reason, letter.body);
                found.push(Violation::new(Class::Invented, about, says));
            }
        }
    }
    for (letter, (reason, is_certain)) in sent {
        let about = About::Letter { letter: Some(letter) };
        match kept.get(&letter).copied().unwrap_or(0) {
            0 if is_certain => {
                let says = format!("the message {letter} ({reason}) is confirmed, but it is not a dead letter");
                found.push(Violation::new(Class::Lost, about, says));
            }
            0 | 1 => {}
            rows => {
                let says = format!("the message {letter} ({reason}) is in {rows} dead letters");
                found.push(Violation::new(Class::Doubled, about, says));
            }
        }
    }
}
