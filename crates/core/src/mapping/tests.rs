use serde_json::{Value, json};

use super::*;

fn map() -> Map {
    serde_json::from_value(json!({
        "name": "site", "number": 7, "exchange": "site.likes",
        "type": { "pointer": "property:type", "values": { "1": "like", "0": "unlike" } },
        "kind": { "constant": "video" },
        "target_id": { "pointer": ["/id", "header:target"] },
        "at": { "pointer": "property:timestamp", "unit": "s" },
    }))
    .unwrap()
}

#[test]
fn a_map_has_a_partition_of_its_own_and_takes_every_message() {
    assert_eq!((map().partition(), map().binding_keys), (MAPS_FROM + 7, vec!["#".to_owned()]));
}

#[test]
fn a_map_names_its_places_outside_of_the_body() {
    let map = map();
    let places: Vec<String> = map.places_outside().iter().map(ToString::to_string).collect();
    assert_eq!(places, ["property:type", "header:target", "property:timestamp"]);
}

#[test]
fn the_values_of_a_field_are_known_if_they_are_listed() {
    let Map { event_type, kind, target_id, .. } = map();
    assert_eq!(event_type.possible(), Some(vec!["unlike", "like"]));
    assert_eq!((kind.possible(), target_id.possible()), (Some(vec!["video"]), None));
}

#[test]
fn only_what_looks_like_a_uuid_is_explained_as_one() {
    assert!(no_uuid("0b7c1f4e-8a2d-4c3b-9e5f-001122334455").is_some());
    for text in ["0b7c1f4e-8a2d-4c3b-9e5f-00112233445", "0b7c1f4e-8a2d-4c3b-9e5f-00112233445x", "12345678901234567890"]
    {
        assert_eq!(no_uuid(text), None, "{text}");
    }
    assert_eq!(no_uuid("0b7c1f4e08a2d04c3b09e5f0001122334455"), None, "without hyphens");
}

#[test]
fn messages_are_apart_if_the_map_would_read_them_differently() {
    let envelope = |headers: Value| Envelope(headers.as_object().unwrap().clone());
    let [one, retried, other] = [
        json!({ "target": 7, "x-death": 1, "lang": "de" }),
        json!({ "target": 7, "x-death": 2, "lang": "de" }),
        json!({ "target": 7, "x-death": 1, "lang": "en" }),
    ]
    .map(envelope);
    let map = map();
    let places = map.places_outside();
    for (places, is_apart) in [(Some(places.as_slice()), false), (None, true)] {
        assert_eq!(one.apart(places).len(), 2 * APART_BYTES);
        assert_eq!(one.apart(places), retried.apart(places), "a broker changes headers that begin with x-");
        assert_eq!(one.apart(places) != other.apart(places), is_apart, "{places:?}");
    }
    assert_ne!(one.apart(Some(&places)), envelope(json!({ "target": 8 })).apart(Some(&places)));
}

#[test]
fn a_place_with_null_is_used_only_if_no_later_place_has_a_value() {
    let places: Places = serde_json::from_value(json!(["/a", "/b", "/c"])).unwrap();
    let found = |event: Value| places.find(&event, &Envelope::default()).cloned();
    assert_eq!(found(json!({ "a": null, "b": null, "c": 5 })), Some(json!(5)));
    assert_eq!(found(json!({ "a": null, "b": 4, "c": 5 })), Some(json!(4)));
    assert_eq!([found(json!({ "b": null })), found(json!({}))], [Some(Value::Null), None]);
}

#[test]
fn the_schema_of_a_field_allows_one_place_or_several() {
    let schema = schemars::schema_for!(Places).to_value();
    assert_eq!((&schema["title"], &schema["anyOf"][0]["format"]), (&json!("Places"), &json!(PLACE)));
    assert_eq!(schema["anyOf"][1]["items"], schema["anyOf"][0]);
}
