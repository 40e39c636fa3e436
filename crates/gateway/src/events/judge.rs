//! Splits a request's body into events. The daemon's own decoder judges each event. Pure.

use std::borrow::Cow;

use axum::http::StatusCode;

use super::super::answer::{Answer, Refused};
use tallyd_core::event::{self, LIST_EVENTS_MAX, Message, Reason, Refusal, Terms};
use tallyd_core::model::{Micros, TargetId, UserId};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Judged<'a> {
    pub message: Message,
    /// The bytes of the event. The gateway judges and publishes exactly these bytes.
    pub body: Cow<'a, [u8]>,
}

impl Judged<'_> {
    /// Whether the event had no time of its own, so that it got the time of the gateway's clock.
    pub(super) fn has_gateways_at(&self) -> bool {
        matches!(self.body, Cow::Owned(_))
    }

    /// Returns the event's time. A fence message contains no time, but the gateway never accepts fence messages.
    pub(super) fn at(&self) -> Micros {
        match self.message {
            Message::Like(like) => like.at,
            Message::Count(count) => count.at,
            Message::Set(set) => set.at,
            Message::Fence(_) => Micros(0),
        }
    }

    pub(super) fn routing_key(&self, terms: &Terms) -> String {
        let of = |id: TargetId| id.to_string();
        match self.message {
            Message::Like(like) => terms.partition_by.routing_key(like.target, like.user),
            Message::Count(count) => of(count.target.id),
            Message::Set(set) => of(set.target.id),
            Message::Fence(number) => UserId(number).to_string(),
        }
    }
}

pub(super) fn judge<'a>(body: &'a [u8], terms: &Terms, now: Micros) -> Answer<Vec<Result<Judged<'a>, Refusal>>> {
    if body.trim_ascii_start().first() != Some(&b'[') {
        return Ok(vec![judge_one(body, terms, now)]);
    }
    let events = event::split(body).map_err(|Refusal { reason, error }| match reason {
        Reason::TooLarge => Refused::new(StatusCode::PAYLOAD_TOO_LARGE, reason.code(), error),
        _ => Refused::bad(reason.code(), error),
    })?;
    if events.is_empty() {
        let message = format!("the list is empty: send 1 to {LIST_EVENTS_MAX} events");
        return Err(Refused::bad("no-events", message));
    }
    if events.len() > LIST_EVENTS_MAX {
        let message = format!("the list has {} events, at most {LIST_EVENTS_MAX} are allowed", events.len());
        return Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, Reason::TooLarge.code(), message));
    }
    // A later event of the list has a later time, because of two events with the same time the unlike wins.
    let times = (now.0..).map(Micros);
    Ok(events.into_iter().zip(times).map(|(event, at)| judge_one(event.get().as_bytes(), terms, at)).collect())
}

fn judge_one<'a>(body: &'a [u8], terms: &Terms, now: Micros) -> Result<Judged<'a>, Refusal> {
    let decode = |body: &[u8]| event::decode(body, terms, now).and_then(Message::of_publisher);
    match decode(body) {
        Ok(message) => Ok(Judged { message, body: Cow::Borrowed(body) }),
        Err(refusal) if refusal.reason == Reason::AtOutOfRange => {
            let body = event::with_at(body, now).ok_or(refusal)?;
            Ok(Judged { message: decode(&body)?, body: Cow::Owned(body) })
        }
        Err(refusal) => Err(refusal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_base::config::Config;

    const NOW: Micros = Micros(1_795_251_385_004_538);

    fn judged(body: &str) -> Answer<Vec<Result<String, &'static str>>> {
        let (config, mut verdicts) = (Config::default(), Vec::new());
        for event in judge(body.as_bytes(), &Terms::from(&config), NOW)? {
            verdicts.push(match event {
                Ok(judged) => Ok(String::from_utf8(judged.body.into_owned()).unwrap()),
                Err(refusal) => Err(refusal.reason.code()),
            });
        }
        Ok(verdicts)
    }

    #[test]
    fn a_like_without_an_instant_gets_the_gateways_clock() {
        let without = r#" { "type": "like", "kind": "video", "target_id": 42, "user_id": "7"}"#;
        let with = r#"{"at":1795251385004538, "type": "like", "kind": "video", "target_id": 42, "user_id": "7"}"#;
        assert_eq!(judged(without).unwrap(), [Ok(with.to_owned())]);
        assert_eq!(judged(with).unwrap(), [Ok(with.to_owned())], "a like with a time keeps its time");
        let unlike = without.replace("like", "unlike");
        assert!(judged(&unlike).unwrap()[0].is_ok());
        assert_eq!(judged(&with.replace("1795251385004538", "1795251385004")).unwrap(), [Err("at-too-early")]);
        for wrong in ["null", "0", "\"now\"", "1.5"] {
            let body = with.replace("1795251385004538", wrong);
            assert_eq!(judged(&body).unwrap(), [Err("at-out-of-range")], "{body}");
        }
    }

    #[test]
    fn of_a_list_without_instants_the_last_click_of_a_user_wins() {
        let word = |word: &str| format!(r#"{{"type":"{word}","kind":"video","target_id":42,"user_id":7}}"#);
        let verdicts = judged(&format!("[{},{}]", word("unlike"), word("like"))).unwrap();
        let expected = |word: &str, at: i64| {
            Ok(format!(r#"{{"at":{at},"type":"{word}","kind":"video","target_id":42,"user_id":7}}"#))
        };
        assert_eq!(verdicts, [expected("unlike", NOW.0), expected("like", NOW.0 + 1)]);
    }

    #[test]
    fn whatever_is_no_like_must_say_when_it_happened() {
        let set = r#"{"type": "fence", "fence": 1}"#;
        assert_eq!(judged(set).unwrap(), [Err("unknown-type")]);
        let count = r#"{"type": "count", "kind": "video", "target_id": 1, "metric": "x", "delta": 1, "event_id": "e"}"#;
        assert_eq!(judged(count).unwrap(), [Err("unknown-metric")]);
        let mut config = Config::default();
        config.metrics.0.insert("view".to_owned(), 2);
        let body = count.replace("\"x\"", "\"view\"");
        let events = judge(body.as_bytes(), &Terms::from(&config), NOW).unwrap();
        assert_eq!(events[0].as_ref().unwrap_err().reason, Reason::AtOutOfRange);
    }

    #[test]
    fn without_a_card_names_and_rules_are_not_checked() {
        let terms = tallyd_core::site::Site::default().terms;
        for body in [
            r#"{"type":"like","kind":"post","target_id":42,"user_id":7,"at":1795251385004538}"#,
            r#"{"type":"set","kind":"post","target_id":42,"metric":"balance","value":-5,"at":1795251385004538}"#,
        ] {
            assert!(judge(body.as_bytes(), &terms, NOW).unwrap()[0].is_ok(), "{body}");
        }
        let wrong = r#"{"type":"like","kind":"post","target_id":0,"user_id":7,"at":1795251385004538}"#;
        let refusal = judge(wrong.as_bytes(), &terms, NOW).unwrap().remove(0).unwrap_err();
        assert_eq!(refusal.reason, Reason::TargetIdOutOfRange);
    }

    #[test]
    fn an_event_of_a_list_that_is_refused_harms_no_other() {
        let like = r#"{"type":"like","kind":"video","target_id":42,"user_id":7,"at":1795251385004538}"#;
        let verdicts = judged(&format!("[{like}, {{}}, 3, {like}]")).unwrap();
        let (good, refused) = (Ok(like.to_owned()), |reason| Err(reason));
        assert_eq!(verdicts, [good.clone(), refused("no-type"), refused("malformed-json"), good]);
    }

    #[test]
    fn a_list_is_refused_as_a_whole_only_for_its_own_faults() {
        let status = |body: &str| axum::response::Response::from(judged(body).unwrap_err()).status().as_u16();
        assert_eq!(status("[]"), 400);
        assert_eq!(status("[{}"), 400);
        assert_eq!(status(&format!("[{}]", vec!["{}"; 1_001].join(","))), 413);
        assert_eq!(judged(&format!("[{}]", vec!["{}"; 1_000].join(","))).unwrap().len(), 1_000);
        assert_eq!(judged("no json").unwrap(), [Err("malformed-json")]);
    }
}
