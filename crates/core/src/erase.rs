//! Rules for erasing a user or a target, even from texts that also contain other data. Pure.

use serde_json::Value;
use serde_json::value::RawValue;

use crate::model::{Target, UserId};

const WITHOUT_USER: [&str; 4] = ["count", "set", "reset", "fence"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    User(UserId),
    Target { target: Target, kind: String },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    pub removed: usize,
    pub body: Option<Vec<u8>>,
    /// True if the remaining body contains the subject's id in an unexpected place, so that a person must decide what
    /// it means.
    pub unclear: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    Yes,
    No,
    Unclear,
}

impl Subject {
    /// Returns `user` or `target`. tallyd records nothing else about an erased subject.
    pub fn word(&self) -> &'static str {
        match self {
            Self::User(_) => "user",
            Self::Target { .. } => "target",
        }
    }

    pub fn member(&self) -> String {
        self.id().to_string()
    }

    pub fn clear(&self, body: &[u8]) -> Cleared {
        let untouched = |unclear| Cleared { removed: 0, body: Some(body.to_vec()), unclear };
        if body.trim_ascii_start().first() != Some(&b'[') {
            return match serde_json::from_slice::<Value>(body) {
                Ok(event) if self.named_by(&event) == Names::Yes => Cleared { removed: 1, ..Cleared::default() },
                Ok(event) => untouched(self.named_by(&event) == Names::Unclear),
                Err(_) => untouched(self.is_in_bytes(body)),
            };
        }
        let Ok(events) = serde_json::from_slice::<Vec<&RawValue>>(body) else {
            return untouched(self.is_in_bytes(body));
        };
        let (mut kept, mut unclear) = (Vec::with_capacity(events.len()), false);
        for event in &events {
            let names = match serde_json::from_str::<Value>(event.get()) {
                Ok(event) => self.named_by(&event),
                Err(_) if self.is_in_bytes(event.get().as_bytes()) => Names::Unclear,
                Err(_) => Names::No,
            };
            unclear |= names == Names::Unclear;
            if names != Names::Yes {
                kept.push(event.get());
            }
        }
        match events.len() - kept.len() {
            0 => untouched(unclear),
            removed if kept.is_empty() => Cleared { removed, ..Cleared::default() },
            removed => Cleared { removed, body: Some(format!("[{}]", kept.join(",")).into_bytes()), unclear },
        }
    }

    pub fn clear_outbox(&self, body: &str) -> String {
        let names = |item: &&str| {
            let parts: Vec<&str> = item.split(':').collect();
            match self {
                Self::User(user) => parts.len() == 3 && parts.last() == Some(&user.to_string().as_str()),
                Self::Target { target, .. } => {
                    parts.first() == Some(&target.kind.to_string().as_str())
                        && parts.get(1) == Some(&target.id.to_string().as_str())
                }
            }
        };
        body.split(' ').filter(|item| !names(item)).collect::<Vec<_>>().join(" ")
    }

    /// Moves an import's position, `"after":[target,user]` in its checkpoint, to before the subject. Returns `None` if
    /// the position is not at the subject.
    pub fn clear_position(&self, checkpoint: &str) -> Option<String> {
        let (before, rest) = checkpoint.split_once("\"after\":[")?;
        let (position, after) = rest.split_once(']')?;
        let (target, user) = position.split_once(',')?;
        let (target, user): (u64, u64) = (target.parse().ok()?, user.parse().ok()?);
        let (target, user) = match self {
            Self::User(erased) if erased.0 == user => (target, user.saturating_sub(1)),
            Self::Target { target: erased, .. } if erased.id.0 == target => (target.saturating_sub(1), 0),
            _ => return None,
        };
        Some(format!("{before}\"after\":[{target},{user}]{after}"))
    }

    /// Whether a message's headers have the subject's id, also as a part of a text such as `user.7`. An event's routing
    /// key is the user's id, and a message that RabbitMQ dead-lettered has its routing keys in its headers.
    pub fn is_in_headers(&self, headers: &str) -> bool {
        fn has(value: &Value, id: &str) -> bool {
            match value {
                Value::Array(values) => values.iter().any(|value| has(value, id)),
                Value::Object(fields) => fields.values().any(|value| has(value, id)),
                Value::String(text) => text.split(|it: char| !it.is_ascii_digit()).any(|number| number == id),
                _ => false,
            }
        }
        // Brokers add headers with counts.
        let is_number = |(name, value): (&String, &Value)| {
            !name.starts_with("x-") && value.as_u64().is_some_and(|number| number == self.id())
        };
        let headers: Value = serde_json::from_str(headers).unwrap_or_default();
        has(&headers, &self.member()) || headers.as_object().is_some_and(|fields| fields.iter().any(is_number))
    }

    fn id(&self) -> u64 {
        match self {
            Self::User(user) => user.0,
            Self::Target { target, .. } => target.id.0,
        }
    }

    fn named_by(&self, event: &Value) -> Names {
        let (id, kind) = match self {
            Self::User(_) => (event.get("user_id"), None),
            Self::Target { kind, .. } => (event.get("target_id"), Some(kind.as_str())),
        };
        match id {
            Some(id) if self.is_id(id) => match (kind, event.get("kind").and_then(Value::as_str)) {
                (Some(kind), Some(named)) if kind != named => Names::No,
                (Some(_), None) => Names::Unclear,
                _ => Names::Yes,
            },
            Some(_) => Names::No,
            None if kind.is_none()
                && event.get("type").and_then(Value::as_str).is_some_and(|of| WITHOUT_USER.contains(&of)) =>
            {
                Names::No
            }
            // The event is JSON in a site's own format.
            None if self.is_in(event) => Names::Unclear,
            None => Names::No,
        }
    }

    fn is_id(&self, value: &Value) -> bool {
        match value {
            Value::Number(number) => number.as_u64() == Some(self.id()),
            Value::String(text) => text.trim().parse() == Ok(self.id()),
            _ => false,
        }
    }

    fn is_in(&self, value: &Value) -> bool {
        match value {
            Value::Array(values) => values.iter().any(|value| self.is_in(value)),
            Value::Object(fields) => fields.values().any(|value| self.is_in(value)),
            value => self.is_id(value),
        }
    }

    /// Whether the bytes contain the id's digits without another digit directly before or after them.
    fn is_in_bytes(&self, bytes: &[u8]) -> bool {
        let id = self.member();
        bytes.split(|byte| !byte.is_ascii_digit()).any(|digits| digits == id.as_bytes())
    }
}

/// Returns the name that replaces an erased member in an archive: `0`, then `0:1`, `0:2`. `taken` contains the
/// archive's members. The returned name is not in `taken`, because two members cannot have the same name.
pub fn placeholder(taken: &[Vec<u8>]) -> Vec<u8> {
    let names = std::iter::once("0".to_owned()).chain((1..).map(|number| format!("0:{number}")));
    // The search always finds a name, because the list of names is endless and `taken` is not.
    names.map(String::into_bytes).find(|name| !taken.contains(name)).unwrap_or_default()
}

pub fn replaced(text: &str, name: &str, by: &str) -> Option<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    let (mut new, mut from) = (String::new(), 0);
    for (place, _) in text.match_indices(name) {
        let (before, after) = (text.get(..place)?, text.get(place + name.len()..)?);
        let is_whole = !before.ends_with(is_part) && !after.starts_with(|letter: char| letter.is_ascii_digit());
        if is_whole {
            new.push_str(text.get(from..place)?);
            new.push_str(by);
            from = place + name.len();
        }
    }
    if from == 0 {
        return None;
    }
    new.push_str(text.get(from..)?);
    Some(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Kind, TargetId};
    use proptest::prelude::*;

    const USER: Subject = Subject::User(UserId(7));

    fn video() -> Subject {
        Subject::Target { target: Target { kind: Kind(1), id: TargetId(42) }, kind: "video".to_owned() }
    }

    fn cleared(subject: &Subject, body: &str) -> (usize, Option<String>, bool) {
        let Cleared { removed, body, unclear } = subject.clear(body.as_bytes());
        (removed, body.map(|body| String::from_utf8(body).unwrap()), unclear)
    }

    #[test]
    fn an_event_is_taken_out_where_it_names_the_subject() {
        for (body, of_user, of_target) in [
            (r#"{"type":"like","kind":"video","target_id":"42","user_id":7}"#, true, true),
            (r#"{"type":"like","kind":"film","target_id":42,"user_id":"7"}"#, true, false),
            (r#"{"type":"count","kind":"video","target_id":42,"delta":7}"#, false, true),
            (r#"{"type":"count","kind":"video","target_id":7,"delta":42}"#, false, false),
            (r#"{"type":"like","kind":"video","target_id":7,"user_id":42}"#, false, false),
        ] {
            for (subject, names) in [(&USER, of_user), (&video(), of_target)] {
                let expected = if names { (1, None, false) } else { (0, Some(body.to_owned()), false) };
                assert_eq!(cleared(subject, body), expected, "{body} {subject:?}");
            }
        }
    }

    #[test]
    fn of_a_list_the_events_of_others_stay_as_they_are() {
        let (mine, other) = (r#"{"user_id":7}"#, r#"{ "user_id": 8, "extra":[7] }"#);
        assert_eq!(cleared(&USER, &format!("[{mine}, {other},{mine}]")), (2, Some(format!("[{other}]")), false));
        assert_eq!(cleared(&USER, &format!("[{mine},{mine}]")), (2, None, false));
        let untouched = format!("[{other} , 17]");
        assert_eq!(cleared(&USER, &untouched), (0, Some(untouched.clone()), false));
    }

    #[test]
    fn what_may_name_the_subject_in_another_way_is_reported() {
        for body in [
            r#"{"actor":{"id":7}}"#,
            r#"{"user_id":7"#,
            "user 7 likes",
            r#"[{"uid":"7"}]"#,
            "[7",
            r#"[{"user_id":7,"x":1e999}]"#,
        ] {
            assert_eq!(cleared(&USER, body), (0, Some(body.to_owned()), true), "{body}");
        }
        let numbers = r#"[{"user_id":8,"x":1e999}]"#;
        for body in [r#"{"actor":{"id":77}}"#, "user 17", "", "[]", r#"{"type":"set","value":7}"#, numbers] {
            assert_eq!(cleared(&USER, body), (0, Some(body.to_owned()), false), "{body}");
        }
        let without_kind = r#"{"type":"like","target_id":42,"user_id":1}"#;
        assert_eq!(cleared(&video(), without_kind), (0, Some(without_kind.to_owned()), true));
    }

    #[test]
    fn items_of_the_outbox_are_taken_out_by_their_places() {
        let body = "1:42:1:7 1:7:1:42 2:42:1:1 1:42:7 1:7:42 1:42:77";
        assert_eq!(USER.clear_outbox(body), "1:42:1:7 1:7:1:42 2:42:1:1 1:7:42 1:42:77");
        assert_eq!(video().clear_outbox(body), "1:7:1:42 2:42:1:1 1:7:42");
        assert_eq!(USER.clear_outbox("1:42:7"), "");
        assert_eq!([&USER, &video()].map(Subject::word), ["user", "target"]);
    }

    #[test]
    fn each_erased_member_of_an_archive_has_a_name_of_its_own() {
        let mut taken = Vec::new();
        for expected in ["0", "0:1", "0:2"] {
            let name = placeholder(&taken);
            assert_eq!(name, expected.as_bytes());
            taken.push(name);
        }
    }

    #[test]
    fn a_position_at_the_subject_moves_before_it() {
        let at = |target, user| format!(r#"{{"start":7,"after":[{target},{user}]}}"#);
        assert_eq!(USER.clear_position(&at(42, 7)), Some(at(42, 6)));
        assert_eq!(video().clear_position(&at(42, 7)), Some(at(41, 0)));
        assert_eq!((USER.clear_position(&at(7, 42)), video().clear_position(&at(7, 42))), (None, None));
        assert_eq!((USER.clear_position("{}"), USER.clear_position(r#"{"after":[7"#)), (None, None));
    }

    #[test]
    fn headers_name_the_subject_in_texts_and_numbers() {
        for headers in [r#"{"user":7}"#, r#"{"property:routing_key":"user.7.like"}"#] {
            assert!(USER.is_in_headers(headers) && !Subject::User(UserId(70)).is_in_headers(headers));
        }
        let headers = r#"{"x-death":[{"count":8,"routing-keys":["7"]}]}"#;
        assert!(USER.is_in_headers(headers) && !Subject::User(UserId(8)).is_in_headers(headers));
        assert!(!USER.is_in_headers(""));
    }

    #[test]
    fn only_a_whole_name_is_replaced() {
        let text = r#"video:42 and "video:42", not video:421, avideo:42 or my-video:42"#;
        let expected = r#"video:? and "video:?", not video:421, avideo:42 or my-video:42"#;
        assert_eq!(replaced(text, "video:42", "video:?").as_deref(), Some(expected));
        assert_eq!(replaced("video:421", "video:42", "x"), None);
    }

    proptest! {
        #[test]
        fn whatever_is_cleared_names_the_subject_no_more(users in prop::collection::vec(1_u64..9, 1..20)) {
            let events: Vec<String> = users.iter().map(|user| format!(r#"{{"type":"like","user_id":{user}}}"#)).collect();
            let Cleared { removed, body, unclear } = USER.clear(format!("[{}]", events.join(",")).as_bytes());
            prop_assert_eq!(removed, users.iter().filter(|user| **user == 7).count());
            prop_assert!(!unclear);
            let left = body.map(|body| serde_json::from_slice::<Vec<Value>>(&body).unwrap()).unwrap_or_default();
            let left: Vec<u64> = left.iter().map(|event| event["user_id"].as_u64().unwrap()).collect();
            prop_assert_eq!(left, users.into_iter().filter(|user| *user != 7).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_cleared_or_left(body: Vec<u8>, text in ".*") {
            let cleared = USER.clear(&body);
            prop_assert!(cleared.removed > 0 || cleared.body.as_deref() == Some(body.as_slice()));
            let _ = (replaced(&text, "video:4", "x"), USER.clear_outbox(&text));
        }
    }
}
