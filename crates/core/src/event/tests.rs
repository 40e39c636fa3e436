use super::*;
use crate::kinds::{Kinds, Metrics};
use crate::rules::Rule;
use proptest::prelude::*;

pub(super) const NOW: Micros = Micros(1_764_000_000_000_000);

pub(super) fn terms() -> Terms {
    let codes = |names: &[(&str, u8)]| names.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect();
    let (kinds, metrics) =
        (Kinds(codes(&[("video", 1), ("post", 2)])), Metrics(codes(&[("like", 1), ("view", 3), ("unread", 4)])));
    let unread = Rule { kind: Some("video".to_owned()), settable: true, ..Rule::of("unread") };
    Terms {
        is_checked: true,
        rules: Rules::new(&kinds, &metrics, &[unread]),
        kinds: kinds.0,
        metrics: metrics.0,
        at_min: Micros(1),
        future_max: Duration::from_secs(300),
        applied_event_keep: Duration::from_secs(3_600),
        partition_by: PartitionBy::User,
    }
}

fn judge(body: &str) -> Result<Message, Refusal> {
    decode(body.as_bytes(), &terms(), NOW)
}

fn reason(body: &str) -> Reason {
    judge(body).expect_err("the body must be refused").reason
}

#[test]
fn ids_may_be_integers_or_strings() {
    let event = LikeEvent {
        target: Target { kind: Kind(1), id: TargetId(42) },
        user: UserId(9_223_372_036_854_775_807),
        at: NOW,
        liked: true,
    };
    let expected = Message::Like(event);
    for (target, user) in [("42", "9223372036854775807"), ("\"42\"", "\"9223372036854775807\"")] {
        let body = format!(
            r#"{{"type":"like","kind":"video","target_id":{target},"user_id":{user},"at":{NOW},"count":7,"new":[{{}}]}}"#
        );
        assert_eq!(judge(&body), Ok(expected));
    }
}

#[test]
fn a_text_with_escapes_is_read_and_a_value_of_no_use_is_named() {
    let body = format!(r#"{{"type":"l\u0069ke","kind":"v\u0069deo","target_id":1,"user_id":2,"at":{NOW}}}"#);
    assert!(matches!(judge(&body), Ok(Message::Like(_))));
    for (value, name) in
        [("true", "a boolean"), ("null", "null"), ("[7]", "a list"), ("{}", "an object"), ("1.5", "1.5")]
    {
        let refusal = judge(&format!(r#"{{"type":{value}}}"#)).unwrap_err();
        assert!(refusal.error.starts_with(&format!("type is {name}, ")), "{}", refusal.error);
    }
}

#[test]
fn a_number_beside_the_event_is_ignored_whatever_it_is() {
    for count in ["7", "-9223372036854775808", "null", "\"7\"", "7.5", "[7]"] {
        let body = format!(r#"{{"type":"like","kind":"video","target_id":1,"user_id":2,"at":3,"count":{count}}}"#);
        assert!(matches!(judge(&body), Ok(Message::Like(_))), "{count}");
    }
}

#[test]
fn a_count_is_judged_field_by_field() {
    let counted = |field: &str, value: &str| {
        let mut fields = BTreeMap::from([
            ("type", "\"count\""),
            ("kind", "\"video\""),
            ("target_id", "\"42\""),
            ("metric", "\"view\""),
            ("delta", "-2"),
            ("event_id", "\"e-1\""),
            ("at", "1764000000000000"),
        ]);
        fields.insert(field, value);
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    let target = Target { kind: Kind(1), id: TargetId(42) };
    let id = EventId::of(target, Metric(3), "e-1");
    // printf 1:42:3:e-1 | sha256sum | cut -c1-32
    assert_eq!(id.0, 0xd834_aced_6102_bbdb_286f_8914_1419_beb9_u128.to_be_bytes());
    let expected = CountEvent { target, metric: Metric(3), delta: -2, at: NOW, id };
    for count in [None, Some(7)] {
        let body = encode_count(TargetId(42), ("video", "view"), -2, NOW, "e-1", count);
        assert_eq!(decode(&body, &terms(), NOW), Ok(Message::Count(expected)));
    }
    let (longest, longer) = (format!("\"{}\"", "\u{e9}".repeat(64)), format!("\"{}\"", "x".repeat(65)));
    for (field, value) in
        [("delta", "2147483648"), ("delta", "-2147483648"), ("event_id", longest.as_str()), ("at", "1763996400000000")]
    {
        assert!(judge(&counted(field, value)).is_ok(), "{field} = {value}");
    }
    for (field, value, expected) in [
        ("kind", "\"film\"", Reason::UnknownKind),
        ("target_id", "0", Reason::TargetIdOutOfRange),
        ("metric", "\"share\"", Reason::UnknownMetric),
        ("metric", "\"like\"", Reason::UnknownMetric),
        ("metric", "3", Reason::UnknownMetric),
        ("delta", "2147483649", Reason::DeltaOutOfRange),
        ("delta", "-2147483649", Reason::DeltaOutOfRange),
        ("delta", "9223372036854775808", Reason::DeltaOutOfRange),
        ("delta", "1.5", Reason::DeltaOutOfRange),
        ("delta", "\"1\"", Reason::DeltaOutOfRange),
        ("event_id", "7", Reason::EventIdOutOfRange),
        ("event_id", "\"\"", Reason::EventIdOutOfRange),
        ("event_id", longer.as_str(), Reason::EventIdOutOfRange),
        ("at", "0", Reason::AtOutOfRange),
        ("at", "1764000300000001", Reason::AtInFuture),
        ("at", "1763996399999999", Reason::AtTooOld),
    ] {
        assert_eq!(reason(&counted(field, value)), expected, "{field} = {value}");
    }
    let refusal = judge(&counted("metric", "\"like\"")).unwrap_err();
    assert!(refusal.error.contains("of the types like and unlike"), "{}", refusal.error);
}

#[test]
fn what_sets_a_number_is_judged_field_by_field() {
    let set = |field: &str, value: &str| {
        let mut fields = BTreeMap::from([
            ("type", "\"set\""),
            ("kind", "\"video\""),
            ("target_id", "\"42\""),
            ("metric", "\"unread\""),
            ("value", "-2"),
            ("at", "1764000000000000"),
        ]);
        fields.insert(field, value);
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    let target = Target { kind: Kind(1), id: TargetId(42) };
    let expected = |value| SetEvent { target, metric: Metric(4), value, at: NOW };
    assert_eq!(judge(&set("event_id", "7")), Ok(Message::Set(expected(-2))));
    assert_eq!(judge(&set("count", "7")), Ok(Message::Set(expected(-2))));
    assert_eq!(judge(&set("type", "\"reset\"")), Ok(Message::Set(expected(0))), "a reset has no value");
    let names = ("video", "unread");
    let body = encode_set(TargetId(42), names, -2, NOW);
    assert_eq!(decode(&body, &terms(), NOW), Ok(Message::Set(expected(-2))));
    let body = encode_reset(TargetId(42), names, NOW);
    assert_eq!(decode(&body, &terms(), NOW), Ok(Message::Set(expected(0))));
    for value in ["9007199254740992", "-9007199254740992", "0"] {
        assert!(judge(&set("value", value)).is_ok(), "{value}");
    }
    for (field, value, expected) in [
        ("kind", "\"film\"", Reason::UnknownKind),
        ("kind", "\"post\"", Reason::NotSettable),
        ("target_id", "0", Reason::TargetIdOutOfRange),
        ("metric", "\"share\"", Reason::UnknownMetric),
        ("metric", "\"like\"", Reason::UnknownMetric),
        ("metric", "\"view\"", Reason::NotSettable),
        ("value", "9007199254740993", Reason::ValueOutOfRange),
        ("value", "-9007199254740993", Reason::ValueOutOfRange),
        ("value", "18446744073709551615", Reason::ValueOutOfRange),
        ("value", "1.5", Reason::ValueOutOfRange),
        ("value", "\"1\"", Reason::ValueOutOfRange),
        ("value", "null", Reason::ValueOutOfRange),
        ("at", "0", Reason::AtOutOfRange),
        ("at", "1764000300000001", Reason::AtInFuture),
        ("at", "1763996399999999", Reason::AtTooOld),
    ] {
        assert_eq!(reason(&set(field, value)), expected, "{field} = {value}");
    }
}

#[test]
fn each_fault_has_its_reason() {
    let good = |field: &str, value: &str| {
        let mut fields = BTreeMap::from([
            ("type", "\"like\""),
            ("kind", "\"video\""),
            ("target_id", "1"),
            ("user_id", "2"),
            ("at", "3"),
        ]);
        fields.insert(field, value);
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    assert!(judge(&good("at", "3")).is_ok());
    for (field, value, expected) in [
        ("type", "\"share\"", Reason::UnknownType),
        ("type", "null", Reason::NoType),
        ("type", "7", Reason::NoType),
        ("kind", "\"film\"", Reason::UnknownKind),
        ("kind", "1", Reason::UnknownKind),
        ("target_id", "0", Reason::TargetIdOutOfRange),
        ("target_id", "-1", Reason::TargetIdOutOfRange),
        ("target_id", "1.5", Reason::TargetIdOutOfRange),
        ("target_id", "1e17", Reason::TargetIdOutOfRange),
        ("target_id", "9223372036854775808", Reason::TargetIdOutOfRange),
        ("target_id", "\"007\"", Reason::TargetIdOutOfRange),
        ("target_id", "\" 7\"", Reason::TargetIdOutOfRange),
        ("target_id", "[1]", Reason::TargetIdOutOfRange),
        ("user_id", "\"\"", Reason::UserIdOutOfRange),
        ("user_id", "{\"a\":1}", Reason::UserIdOutOfRange),
        ("at", "0", Reason::AtOutOfRange),
        ("at", "\"03\"", Reason::AtOutOfRange),
        ("at", "3.5", Reason::AtOutOfRange),
        ("at", "253402300800000000", Reason::AtOutOfRange),
        ("at", "1764000300000001", Reason::AtInFuture),
    ] {
        assert_eq!(reason(&good(field, value)), expected, "{field} = {value}");
    }
    for (field, value) in [("at", "\"3\""), ("at", "1.7e15"), ("target_id", "42.0"), ("user_id", "4.2e1")] {
        assert!(judge(&good(field, value)).is_ok(), "{field} = {value}");
    }
    assert!(judge(&good("at", "1764000300000000")).is_ok(), "exactly future_max ahead is accepted");
}

#[test]
fn what_is_no_object_is_malformed() {
    for body in ["", "nonsense", "[]", "7", "{\"type\":\"like\"", "{\"type\":\"like\",\"type\":\"like\"}", "{} {}"] {
        assert_eq!(reason(body), Reason::MalformedJson, "{body}");
    }
    let refused = |body: &[u8]| decode(body, &terms(), NOW).expect_err("refused").reason;
    assert_eq!(refused(b"{\"type\":\"\xff\"}"), Reason::MalformedJson);
    let ignored =
        [br#"{"type":"like","kind":"video","target_id":1,"user_id":2,"at":3,"x":""#.as_slice(), b"\xff\"}"].concat();
    assert_eq!(refused(&ignored), Reason::MalformedJson, "in a field that is ignored");
    assert_eq!(refused(&[b"[".as_slice(), &ignored, b"]"].concat()), Reason::MalformedJson);
    assert_eq!(refused(&vec![b'['; 60_000]), Reason::MalformedJson);
    assert_eq!(refused(&vec![b' '; BODY_BYTES_MAX + 1]), Reason::TooLarge);
    assert_eq!(refused(&vec![b' '; BODY_BYTES_MAX]), Reason::MalformedJson, "it is not too large");
}

#[test]
fn a_fence_is_recognised_without_the_terms_of_a_site() {
    assert_eq!(fence_of(br#"{"type":"fence","fence":17}"#), Some(17));
    for body in [r#"{"type":"fence"}"#, r#"{"type":"fence","fence":"17"}"#, r#"{"type":"like","fence":17}"#, "17"] {
        assert_eq!(fence_of(body.as_bytes()), None, "{body}");
    }
    let padded = |bytes: usize| format!(r#"{{"type":"fence","fence":17}}{:bytes$}"#, "", bytes = bytes - 27);
    let [longest, longer] = [BODY_BYTES_MAX, BODY_BYTES_MAX + 1].map(padded);
    assert_eq!(
        (longest.len(), fence_of(longest.as_bytes()), fence_of(longer.as_bytes())),
        (BODY_BYTES_MAX, Some(17), None)
    );
}

fn judge_all(body: &str) -> Vec<(Result<Message, Reason>, &str)> {
    let mut verdicts = Vec::new();
    decode_all(body.as_bytes(), &terms(), NOW, |verdict, range| {
        verdicts.push((verdict.map_err(|refusal| refusal.reason), &body[range]));
    });
    verdicts
}

#[test]
fn each_event_of_a_list_is_judged_by_itself() {
    let event = |user: u64| LikeEvent {
        target: Target { kind: Kind(1), id: TargetId(7) },
        user: UserId(user),
        at: Micros(user as i64),
        liked: true,
    };
    let json = |user| String::from_utf8(encode_like(&event(user), "video", Some(1))).expect("JSON is UTF-8");
    let (first, second) = (json(1), json(2));
    let body = format!(" [{first},\n {{\"type\":\"like\"}}, 5, {second}, {{\"type\":\"fence\",\"fence\":3}}]");
    let expected = [
        (Ok(Message::Like(event(1))), first.as_str()),
        (Err(Reason::UnknownKind), "{\"type\":\"like\"}"),
        (Err(Reason::MalformedJson), "5"),
        (Ok(Message::Like(event(2))), second.as_str()),
        (Err(Reason::UnknownType), "{\"type\":\"fence\",\"fence\":3}"),
    ];
    assert_eq!(judge_all(&body), expected);
    assert_eq!(judge_all(&first), [(Ok(Message::Like(event(1))), first.as_str())]);
}

#[test]
fn a_list_that_is_broken_or_too_large_is_refused_whole() {
    assert_eq!(judge_all("[]"), []);
    let long = format!("[{}1]", "1,".repeat(LIST_EVENTS_MAX));
    assert_eq!(judge_all(&long).len(), LIST_EVENTS_MAX + 1);
    let largest = format!("[{}]", " ".repeat(LIST_BYTES_MAX - 2));
    assert_eq!(judge_all(&largest), []);
    let large = format!("[\"{}\"]", "x".repeat(LIST_BYTES_MAX));
    for (body, reason) in [
        ("[{\"type\":\"like\"", Reason::MalformedJson),
        ("[1] [2]", Reason::MalformedJson),
        (large.as_str(), Reason::TooLarge),
    ] {
        assert_eq!(judge_all(body), [(Err(reason), body)]);
    }
}

#[test]
fn a_time_before_the_earliest_day_is_refused_and_its_unit_is_named() {
    let terms = Terms { at_min: Micros(1_262_304_000_000_000), ..terms() };
    let judge = |at: &str| {
        let body = format!(r#"{{"type":"like","kind":"video","target_id":1,"user_id":2,"at":{at}}}"#);
        decode(body.as_bytes(), &terms, NOW).map_err(|refusal| (refusal.reason, refusal.error))
    };
    assert!(judge("1262304000000000").is_ok());
    assert_eq!(judge("1262303999999999").unwrap_err().0, Reason::AtTooEarly);
    let late = Terms { at_min: Micros(NOW.0 - 1), ..terms.clone() };
    let body = format!(r#"{{"type":"like","kind":"video","target_id":1,"user_id":2,"at":{}}}"#, NOW.0 - 2);
    let error = decode(body.as_bytes(), &late, NOW).unwrap_err().error;
    assert!(error.ends_with("([consumer] at_min)"), "the unit is right: {error}");
    for (at, unit) in [("1763251385004", "milliseconds"), ("\"1763251385\"", "seconds")] {
        let (reason, error) = judge(at).unwrap_err();
        assert_eq!(reason, Reason::AtTooEarly);
        assert!(error.ends_with(&format!(": the number looks like {unit}, but it is read as microseconds")), "{error}");
    }
}

#[test]
fn codes_are_unique() {
    let codes: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.code()).collect();
    assert_eq!(codes.len(), Reason::ALL.len());
}

proptest! {
    #[test]
    fn any_bytes_get_a_verdict(body in proptest::collection::vec(any::<u8>(), 0..300)) {
        decode_all(&body, &terms(), NOW, |_, range| assert!(range.end <= body.len()));
    }

    #[test]
    fn what_the_client_encodes_is_decoded(target in 1..=ID_MAX, user in 1..=ID_MAX, at in 1..=NOW.0, liked: bool, count: Option<i64>) {
        let event = LikeEvent { target: Target { kind: Kind(1), id: TargetId(target) }, user: UserId(user), at: Micros(at), liked };
        let body = encode_like(&event, "video", count);
        prop_assert_eq!(judge(std::str::from_utf8(&body).expect("JSON is UTF-8")), Ok(Message::Like(event)));
    }

    #[test]
    fn a_fence_keeps_its_number(number: u64) {
        let body = encode_fence(number);
        prop_assert_eq!(judge(std::str::from_utf8(&body).expect("JSON is UTF-8")), Ok(Message::Fence(number)));
    }
}

#[test]
fn only_a_like_that_lacks_its_instant_is_given_one() {
    let given = |body: &str| with_at(body.as_bytes(), Micros(5)).map(|body| String::from_utf8(body).unwrap());
    assert_eq!(given(r#" {"type":"unlike"}"#).unwrap(), r#"{"at":5,"type":"unlike"}"#);
    for other in [r#"{"type":"like","at":null}"#, r#"{"type":"count"}"#, "{}", "[]", "no json"] {
        assert_eq!(given(other), None, "{other}");
    }
}
