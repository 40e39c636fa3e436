//! Lists of events, as a publisher makes them of single bodies.

use std::borrow::Cow;

use super::{BODY_BYTES_MAX, without_mark};
use crate::traceparent;

/// Returns the body of a list. Each body must be one that [`decode`](super::decode_all) accepts: the list then has exactly
/// these bytes, without a byte order mark and without blanks at both ends.
pub fn list_of<'a>(bodies: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut list = vec![b'['];
    for body in bodies {
        if list.len() > 1 {
            list.push(b',');
        }
        list.extend_from_slice(without_mark(body).trim_ascii());
    }
    list.push(b']');
    list
}

/// Writes the trace of an event into its body, as the first field, because a list has only one header. A body that would
/// become too large stays as it is.
pub fn with_traceparent<'a>(body: &'a [u8], traceparent: &str) -> Cow<'a, [u8]> {
    match without_mark(body).trim_ascii_start().strip_prefix(b"{") {
        Some(rest) if BEFORE_TRACE.len() + traceparent.len() + 2 + rest.len() <= BODY_BYTES_MAX => {
            Cow::Owned([BEFORE_TRACE, traceparent.as_bytes(), b"\",", rest].concat())
        }
        _ => Cow::Borrowed(body),
    }
}

const BEFORE_TRACE: &[u8] = b"{\"traceparent\":\"";

/// Reads the field that [`with_traceparent`] writes.
pub fn traceparent_of(body: &[u8]) -> Option<&str> {
    let value = body.strip_prefix(BEFORE_TRACE)?.split(|byte| *byte == b'"').next()?;
    std::str::from_utf8(value).ok().and_then(traceparent::parse)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{NOW, terms};
    use super::super::{Message, decode, decode_all, split};
    use super::*;

    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    /// Blanks, a byte order mark and ignored fields of any depth around a good event.
    fn body() -> impl Strategy<Value = Vec<u8>> {
        let blank = prop::collection::vec(prop::sample::select(vec![' ', '\t', '\n', '\r']), 0..3)
            .prop_map(|blanks| blanks.into_iter().collect::<String>());
        let ignored = prop_oneof![
            Just("1".to_owned()),
            any::<String>().prop_map(|text| serde_json::Value::from(text).to_string()),
            (1_usize..400).prop_map(|depth| "[".repeat(depth) + &"]".repeat(depth)),
            Just(format!("\"{TRACE}\"")),
        ];
        let name = prop::sample::select(vec!["x", "traceparent", "[", "\\u007b"]);
        let fields = (blank.clone(), name, ignored, blank.clone(), any::<bool>(), 1_u64..1_000);
        fields.prop_map(|(before, name, ignored, after, has_mark, user)| {
            let like = format!("\"type\":\"like\",\"kind\":\"video\",\"target_id\":\"1\",\"user_id\":{user}");
            let mark = if has_mark { "\u{feff}" } else { "" };
            format!("{mark}{before}{{{like},\"{name}\":{ignored},\"at\":{NOW}}}{after}").into_bytes()
        })
    }

    proptest! {
        #[test]
        fn a_list_of_good_events_gives_back_each_of_their_bytes(bodies in prop::collection::vec(body(), 1..20)) {
            let terms = terms();
            let alone: Vec<Message> =
                bodies.iter().map(|body| decode(without_mark(body), &terms, NOW).expect("a good event")).collect();
            let list = list_of(bodies.iter().map(Vec::as_slice));
            let parts = split(&list).expect("a list");
            let texts = bodies.iter().map(|body| without_mark(body).trim_ascii());
            prop_assert!(parts.iter().map(|part| part.get().as_bytes()).eq(texts));
            let mut together = Vec::new();
            decode_all(&list, &terms, NOW, |verdict, _| together.push(verdict.expect("a good event")));
            prop_assert_eq!(alone, together);
        }

        #[test]
        fn a_trace_changes_nothing_of_an_event_and_is_read_again(body in body()) {
            let terms = terms();
            let traced = with_traceparent(&body, TRACE);
            prop_assert_eq!(decode(&traced, &terms, NOW), decode(without_mark(&body), &terms, NOW));
            prop_assert_eq!(traceparent_of(&traced), Some(TRACE));
            prop_assert_eq!(traceparent_of(&body), None);
        }
    }

    #[test]
    fn a_body_is_traced_up_to_the_largest_size_of_an_event() {
        for (bytes, is_traced) in [(BODY_BYTES_MAX, true), (BODY_BYTES_MAX + 1, false)] {
            let rest = bytes - BEFORE_TRACE.len() - TRACE.len() - 2;
            let body = format!("{{{}}}", " ".repeat(rest - 1));
            let traced = with_traceparent(body.as_bytes(), TRACE);
            assert_eq!((traceparent_of(&traced).is_some(), traced.len() <= BODY_BYTES_MAX), (is_traced, true));
        }
    }

    #[test]
    fn a_body_that_a_trace_would_make_too_large_has_none() {
        let body = format!("{{\"x\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX - 8));
        assert_eq!(body.len(), BODY_BYTES_MAX);
        assert_eq!(with_traceparent(body.as_bytes(), TRACE), body.as_bytes());
        assert_eq!(traceparent_of(body.as_bytes()), None);
    }
}
