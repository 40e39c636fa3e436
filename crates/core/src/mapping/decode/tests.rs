use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

use super::super::place::Places;
use super::*;
use crate::event::{LikeEvent, encode_like};
use crate::kinds::{Kinds, Metrics};
use crate::model::{Kind, Metric, Target, TargetId, UserId};
use crate::partition::PartitionBy;
use crate::rules::Rules;
use crate::unit::Unit;

const NOW: Micros = Micros(1_795_251_385_004_538);

fn terms() -> Terms {
    let codes = |names: &[(&str, u8)]| names.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect();
    let kinds = Kinds(codes(&[("video", 1), ("post", 2)]));
    let metrics = Metrics(codes(&[("like", 1), ("view", 2)]));
    Terms {
        is_checked: true,
        rules: Rules::new(&kinds, &metrics, &[]),
        kinds: kinds.0,
        metrics: metrics.0,
        at_min: Micros(1_262_304_000_000_000),
        future_max: Duration::from_secs(300),
        applied_event_keep: Duration::from_secs(86_400),
        partition_by: PartitionBy::User,
    }
}

fn site() -> Map {
    serde_json::from_value(json!({
        "name": "site", "number": 1, "exchange": "site.likes", "list": "/batch/events",
        "type": { "pointer": "/action", "values": { "LIKE": "like", "UNLIKE": "unlike", "7": "count", "true": "like" } },
        "kind": { "pointer": "/object/kind", "values": { "1": "video", "2": "post" } },
        "target_id": { "pointer": "/object/id" },
        "user_id": { "pointer": "/actor~1id" },
        "at": { "pointer": "/ts", "unit": "ms" },
        "metric": { "constant": "view" },
        "delta": { "pointer": "/by" },
        "event_id": { "pointer": "/uid" },
    }))
    .unwrap()
}

fn place(text: &str) -> Places {
    serde_json::from_value(text.into()).unwrap()
}

fn verdicts(map: &Map, body: &str) -> Vec<(Result<Message, String>, String)> {
    with_headers(map, json!({}), body)
}

fn with_headers(map: &Map, headers: Value, body: &str) -> Vec<(Result<Message, String>, String)> {
    let Value::Object(headers) = headers else { panic!("{headers}") };
    let mut all = Vec::new();
    decode_all(body.as_bytes(), (map, &Envelope(headers)), &terms(), NOW, |verdict, range| {
        all.push((verdict.map_err(|refusal| refusal.error), body[range].to_owned()));
    });
    all
}

fn refusal(body: &Value) -> String {
    let [(verdict, _)] = &verdicts(&site(), &body.to_string())[..] else { panic!("{body}") };
    verdict.clone().unwrap_err()
}

fn like(action: &str, user: u64) -> Value {
    json!({ "action": action, "object": { "kind": 1, "id": "42" }, "actor/id": user, "ts": 1_795_251_385_004_i64 })
}

fn is(user: u64, liked: bool) -> Message {
    let target = Target { kind: Kind(1), id: TargetId(42) };
    Message::Like(LikeEvent { target, user: UserId(user), at: Micros(1_795_251_385_004_000), liked })
}

#[test]
fn fields_are_found_by_pointers_and_values_by_their_tables() {
    for (body, message) in [(like("LIKE", 7), is(7, true)), (like("UNLIKE", 8), is(8, false))] {
        assert_eq!(verdicts(&site(), &body.to_string())[0].0, Ok(message));
    }
    let mut body = like("LIKE", 7);
    body["action"] = true.into();
    assert_eq!(verdicts(&site(), &body.to_string())[0].0, Ok(is(7, true)));
    (body["action"], body["by"], body["uid"]) = (7.into(), "-3".into(), 99.into());
    let [(Ok(Message::Count(count)), _)] = &verdicts(&site(), &body.to_string())[..] else { panic!("{body}") };
    assert_eq!((count.metric, count.delta), (Metric(2), -3));
}

#[test]
fn what_is_too_large_or_no_event_is_refused() {
    let error = |map: &Map, body: &str| verdicts(map, body).pop().unwrap().0.unwrap_err();
    let body = |bytes: usize| format!("{{\"x\":\"{}\"}}", "x".repeat(bytes - 8));
    assert!(error(&site(), &body(BODY_BYTES_MAX)).contains("/action is missing"));
    assert!(error(&site(), &body(BODY_BYTES_MAX + 1)).starts_with("the event has 65537 bytes"));
    let list = |bytes: usize| format!("[7{}]", " ".repeat(bytes - 3));
    assert!(error(&site(), &list(LIST_BYTES_MAX)).contains("is not a JSON object"));
    assert!(error(&site(), &list(LIST_BYTES_MAX + 1)).starts_with("the body has 1048577 bytes"));
    let single = Map { single: true, ..site() };
    for (map, body) in [(&site(), "[[7]]"), (&single, "7")] {
        assert!(error(map, body).contains("is not a JSON object"), "{body}");
    }
    assert!(error(&single, "[7]").contains("/action is missing"));
}

#[test]
fn lists_are_taken_at_the_top_and_under_a_pointer_and_judged_one_by_one() {
    let (one, other) = (like("LIKE", 7).to_string(), like("SHARE", 8).to_string());
    for body in [format!("[{one}, {other}]"), format!("{{\"batch\": {{\"v\": 2, \"events\": [{one},{other}]}}}}")] {
        let found = verdicts(&site(), &body);
        assert_eq!(found[0], (Ok(is(7, true)), one.clone()));
        assert_eq!(found[1].1, other);
        assert!(found[1].0.as_ref().is_err_and(|error| error.contains("/action is \"SHARE\"")), "{found:?}");
        assert_eq!(found.len(), 2);
    }
    // Each part of a list is an event, so it can be replayed.
    assert_eq!(verdicts(&site(), &one)[0].0, Ok(is(7, true)));
    assert_eq!(verdicts(&site(), "{\"batch\":{\"events\":[]}}"), []);
}

#[test]
fn refusals_name_the_pointer_and_what_can_not_be_mapped() {
    let with = |field: &str, value: Value| {
        let mut body = like("LIKE", 7);
        body[field] = value;
        refusal(&body)
    };
    let uuid = "018f2c5e-7c3a-7b1e-9d4f-0123456789ab";
    for (error, expected) in [
        (with("actor/id", "abc".into()), "user_id from /actor~1id is \"abc\", allowed is an integer"),
        (with("actor/id", uuid.into()), "a UUID can't be mapped: ids are numbers of 63 bits"),
        (with("object", json!({ "kind": 1, "id": uuid })), "a UUID can't be mapped: ids are numbers of 63 bits"),
        (with("object", json!({ "kind": 1 })), "target_id from /object/id is missing"),
        (with("object", json!({ "kind": 3, "id": 1 })), "kind from /object/kind is 3, which is not in its `values`"),
        (with("object", json!({ "kind": [1], "id": 1 })), "kind from /object/kind is an object or a list"),
        (with("ts", (-1.5).into()), "at from /ts is -1.5, allowed are milliseconds"),
        (with("ts", 1_795_252_385_004_i64.into()), "at from /ts is 1000.0 s ahead of this daemon's clock"),
        (with("action", 7.into()), "delta from /by is missing"),
        (with("action", Value::Null), "type from /action is null, which is not in its `values`"),
        (refusal(&json!(7)), "the event is not a JSON object"),
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn types_without_a_table_are_tallyds_own_and_a_toggle_is_none() {
    let mut map = site();
    map.event_type = Source { pointer: Some(place("/action")), ..Source::default() };
    assert_eq!(verdicts(&map, &like("unlike", 7).to_string())[0].0, Ok(is(7, false)));
    let error = verdicts(&map, &like("toggle_like", 7).to_string())[0].0.clone().unwrap_err();
    assert!(error.starts_with("type from /action is \"toggle_like\": a toggle can't be mapped"), "{error}");
    for action in ["fence", "share"] {
        assert!(verdicts(&map, &like(action, 7).to_string())[0].0.is_err(), "{action}");
    }
    let error = verdicts(&map, &like("reset", 7).to_string())[0].0.clone().unwrap_err();
    assert!(error.contains("reset needs times in microseconds"), "{error}");
}

#[test]
fn times_are_taken_as_texts_and_a_wrong_unit_is_named() {
    let with_unit = |unit: &str, ts: Value| {
        let mut map = site();
        map.at.unit = serde_json::from_value(unit.into()).unwrap();
        let mut body = like("LIKE", 7);
        body["ts"] = ts;
        verdicts(&map, &body.to_string()).remove(0).0
    };
    let at = |verdict: Result<Message, String>| match verdict {
        Ok(Message::Like(event)) => event.at.0,
        other => panic!("{other:?}"),
    };
    assert_eq!(at(with_unit("s", "2025-11-28T11:00:00.5+01:00".into())), 1_764_324_000_000_000);
    assert_eq!(at(with_unit("ms", 1_764_324_000_123.75.into())), 1_764_324_000_123_000);
    assert_eq!(at(with_unit("us", "2025-11-28T11:00:00.5+01:00".into())), 1_764_324_000_500_000);
    for (unit, ts, expected) in [
        (
            "us",
            1_764_324_000_123_i64,
            "at from /ts is 1970-01-21T10:05:24.000123Z, which is before 2010-01-01T00:00:00Z ([consumer] at_min): \
            the number looks like milliseconds, but it is read as microseconds",
        ),
        ("us", 1_764_324_000, "looks like seconds, but it is read as microseconds"),
        ("ms", 1_764_324_000, "looks like seconds, but it is read as milliseconds"),
        ("ns", 1_764_324_000_123_456, "looks like microseconds, but it is read as nanoseconds"),
        ("s", 1_764_324_000_123, "looks like milliseconds, but it is read as seconds"),
        ("ms", 1_764_324_000_123_456, "looks like microseconds, but it is read as milliseconds"),
        ("us", 1_764_324_000_123_456_789, "looks like nanoseconds, but it is read as microseconds"),
    ] {
        let error = with_unit(unit, ts.into()).unwrap_err();
        assert!(error.contains(expected), "{unit}: {error}");
    }
    let error = with_unit("s", "1764324000123".into()).unwrap_err();
    assert!(error.contains("looks like milliseconds, but it is read as seconds"), "{error}");
    let error = with_unit("ms", "soon".into()).unwrap_err();
    assert!(error.ends_with("such as 2026-01-31T10:00:00Z"), "{error}");
    let error = with_unit("ms", "2025-11-28 10:00:00".into()).unwrap_err();
    assert!(error.ends_with("(add `zone` to the map if your times have no offset)"), "{error}");
}

#[test]
fn numbers_of_64_bits_are_read_exactly() {
    assert!(matches!(scalar(&json!(i64::MIN)), Scalar::Negative(i64::MIN)));
    assert!(matches!(scalar(&json!(u64::MAX)), Scalar::Unsigned(u64::MAX)));
}

#[test]
fn a_field_is_taken_from_the_first_place_that_is_there() {
    let mut map = site();
    map.event_type.pointer =
        Some(serde_json::from_value(json!(["header:op", "property:type", "routing_key"])).unwrap());
    map.target_id.pointer = Some(serde_json::from_value(json!(["/after/id", "/before/id"])).unwrap());
    let taken = |headers: Value, body: Value| {
        with_headers(&map, headers, &body.to_string()).remove(0).0.map(|message| match message {
            Message::Like(event) => (event.target.id.0, event.liked),
            other => panic!("{other:?}"),
        })
    };
    let mut body = like("", 7);
    (body["after"], body["before"]) = (Value::Null, json!({ "id": 5 }));
    assert_eq!(taken(json!({ "op": "LIKE", "property:type": "UNLIKE" }), body.clone()), Ok((5, true)));
    assert_eq!(taken(json!({ "property:type": "UNLIKE", "property:routing_key": "x" }), body.clone()), Ok((5, false)));
    body["after"] = json!({ "id": 6 });
    assert_eq!(taken(json!({ "property:routing_key": "LIKE" }), body.clone()), Ok((6, true)));
    let error = taken(json!({}), body).unwrap_err();
    assert!(error.starts_with("type from header:op or property:type or routing_key is missing"), "{error}");
}

#[test]
fn a_map_can_take_a_list_as_one_event_and_ignore_other_types() {
    let mut map = site();
    (map.single, map.list) = (true, None);
    for (source, at) in [(&mut map.target_id, "/1/post"), (map.user_id.as_mut().unwrap(), "/1/user")] {
        source.pointer = Some(place(at));
    }
    (map.event_type.pointer, map.at.pointer) = (Some(place("header:task")), place("/1/ts"));
    map.kind = Source { constant: Some("video".to_owned()), ..Source::default() };
    let task = json!([[], { "post": 42, "user": 7, "ts": 1_795_251_385_004_i64 }, { "chain": null }]).to_string();
    assert_eq!(with_headers(&map, json!({ "task": "LIKE" }), &task)[0].0, Ok(is(7, true)));
    assert!(with_headers(&map, json!({ "task": "mail" }), &task)[0].0.is_err());
    map.ignore_other_types = true;
    assert_eq!(with_headers(&map, json!({ "task": "mail" }), &task), []);
    for headers in [json!({}), json!({ "task": null })] {
        assert!(with_headers(&map, headers, &task)[0].0.is_err(), "it has no type");
    }
}

#[test]
fn ids_with_zeros_and_blanks_are_taken_only_by_a_lenient_map() {
    let mut map = site();
    let mut body = like("LIKE", 7);
    body["object"]["id"] = " 0042".into();
    assert!(verdicts(&map, &body.to_string())[0].0.is_err());
    map.lenient = true;
    assert_eq!(verdicts(&map, &body.to_string())[0].0, Ok(is(7, true)));
    body["object"]["id"] = "00".into();
    assert!(verdicts(&map, &body.to_string())[0].0.is_err());
}

#[test]
fn a_byte_order_mark_and_whole_floats_change_no_event() {
    let body = like("LIKE", 7).to_string().replace("\"42\"", "42.0").replace("1795251385004", "1.795251385004E12");
    let marked = format!("\u{feff}{body}");
    assert_eq!(verdicts(&site(), &marked)[0], (Ok(is(7, true)), body.clone()));
    let list = format!("\u{feff}[{body}]");
    assert_eq!(verdicts(&site(), &list)[0], (Ok(is(7, true)), body));
}

proptest! {
    /// A map with tallyd's own field names must accept and refuse the same events as tallyd.
    #[test]
    fn a_map_of_tallyds_own_fields_decides_as_tallyd_does(
        target in 0..3_u64, user in prop_oneof![0..3_u64, Just(u64::MAX)], at in prop_oneof![0..i64::MAX, 1..NOW.0], liked in any::<bool>()
    ) {
        let own = |name: &str| Source { pointer: Some(place(&format!("/{name}"))), ..Source::default() };
        let map = Map {
            event_type: own("type"),
            kind: own("kind"),
            target_id: own("target_id"),
            user_id: Some(own("user_id")),
            at: Time { pointer: place("/at"), unit: Unit::Us, zone: None },
            ..site()
        };
        let target = Target { kind: Kind(1), id: TargetId(target) };
        let body = encode_like(&LikeEvent { target, user: UserId(user), at: Micros(at), liked }, "video", None);
        let mut mapped = None;
        decode_all(&body, (&map, &Envelope::default()), &terms(), NOW, |verdict, _| mapped = verdict.ok());
        prop_assert_eq!(mapped, crate::event::decode(&body, &terms(), NOW).ok());
    }

    #[test]
    fn any_bytes_get_a_verdict_for_each_part_of_the_body(body in prop::collection::vec(any::<u8>(), 0..200)) {
        decode_all(&body, (&site(), &Envelope::default()), &terms(), NOW, |verdict, range| {
            assert!(range.end <= body.len() && verdict.is_err());
        });
    }
}
