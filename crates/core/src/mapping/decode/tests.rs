use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

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

fn verdicts(map: &Map, body: &str) -> Vec<(Result<Message, String>, String)> {
    let mut all = Vec::new();
    decode_all(body.as_bytes(), map, &terms(), NOW, |verdict, range| {
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
        (with("object", json!({ "kind": 1 })), "target_id from /object/id is missing"),
        (with("object", json!({ "kind": 3, "id": 1 })), "kind from /object/kind is 3, which is not in its `values`"),
        (with("object", json!({ "kind": [1], "id": 1 })), "kind from /object/kind is an object or a list"),
        (with("ts", 1.5.into()), "at from /ts is a fraction or too large a number, allowed are milliseconds"),
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
    map.event_type = Source { pointer: Some("/action".to_owned()), ..Source::default() };
    assert_eq!(verdicts(&map, &like("unlike", 7).to_string())[0].0, Ok(is(7, false)));
    let error = verdicts(&map, &like("toggle_like", 7).to_string())[0].0.clone().unwrap_err();
    assert!(error.starts_with("type from /action is \"toggle_like\": a toggle can't be mapped"), "{error}");
    for action in ["fence", "share"] {
        assert!(verdicts(&map, &like(action, 7).to_string())[0].0.is_err(), "{action}");
    }
    let error = verdicts(&map, &like("reset", 7).to_string())[0].0.clone().unwrap_err();
    assert!(error.contains("reset needs times in microseconds"), "{error}");
}

proptest! {
    /// A map with tallyd's own field names must accept and refuse the same events as tallyd.
    #[test]
    fn a_map_of_tallyds_own_fields_decides_as_tallyd_does(
        target in 0..3_u64, user in prop_oneof![0..3_u64, Just(u64::MAX)], at in prop_oneof![0..i64::MAX, 1..NOW.0], liked in any::<bool>()
    ) {
        let own = |name: &str| Source { pointer: Some(format!("/{name}")), ..Source::default() };
        let map = Map {
            event_type: own("type"),
            kind: own("kind"),
            target_id: own("target_id"),
            user_id: Some(own("user_id")),
            at: Time { pointer: "/at".to_owned(), unit: Unit::Us },
            ..site()
        };
        let target = Target { kind: Kind(1), id: TargetId(target) };
        let body = encode_like(&LikeEvent { target, user: UserId(user), at: Micros(at), liked }, "video", None);
        let mut mapped = None;
        decode_all(&body, &map, &terms(), NOW, |verdict, _| mapped = verdict.ok());
        prop_assert_eq!(mapped, crate::event::decode(&body, &terms(), NOW).ok());
    }

    #[test]
    fn any_bytes_get_a_verdict_for_each_part_of_the_body(body in prop::collection::vec(any::<u8>(), 0..200)) {
        decode_all(&body, &site(), &terms(), NOW, |verdict, range| {
            assert!(range.end <= body.len() && verdict.is_err());
        });
    }
}
