//! Generates docs/openapi.json, only in tests. The description of the answers comes from the types of the handlers. The
//! bounds of the event fields come from the decoder.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

use super::super::answer::ErrorBody;
use super::super::boards::{BoardPage, RADIUS, RADIUS_MAX, TOP, TOP_MAX};
use super::super::counters::Counters;
use super::super::events::Verdicts;
use super::super::likes::Likes;
use super::super::query::IDS_MAX;
use super::super::ready::{Live, Ready};
use tallyd_core::event::{DELTA_MAX, EVENT_ID_MAX, ID_MAX, LIST_EVENTS_MAX, VALUE_MAX};
use tallyd_core::model::Micros;

pub(super) fn document() -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut types = settings.into_generator();
    let paths = json!({
        "/v1/events": { "post": publish(&mut types) },
        "/v1/counters": { "get": counters(&mut types) },
        "/v1/likes": { "get": likes(&mut types) },
        "/v1/boards/{name}": { "get": board(&mut types) },
        "/livez": { "get": {
            "operationId": "livez", "summary": "Reports whether the process works", "security": [],
            "responses": { "200": answer::<Live>(&mut types, "The process works.") },
        } },
        "/readyz": { "get": {
            "operationId": "readyz", "summary": "Reports whether events can be published", "security": [],
            "responses": {
                "200": answer::<Ready>(&mut types, "RabbitMQ and Redis answer."),
                "503": answer::<Ready>(&mut types, "RabbitMQ or Redis does not answer, or the process is stopping."),
            },
        } },
        "/metrics": { "get": {
            "operationId": "metrics", "summary": "Metrics for Prometheus", "security": [],
            "responses": { "200": {
                "description": "OpenMetrics 1.0 if the client accepts it, otherwise Prometheus' text format.",
                "content": { "text/plain": { "schema": { "type": "string" } } },
            } },
        } },
    });
    let mut schemas = types.take_definitions(true);
    for (name, schema) in events() {
        schemas.insert(name.to_owned(), schema);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "tallyd gateway",
            "description": "Accepts events, and returns counters, likes and boards. See docs/gateway.md.",
            "version": tallyd_base::version::VERSION,
            "license": { "name": "MIT OR Apache-2.0" },
        },
        "servers": [{ "url": "http://127.0.0.1:9191" }],
        "security": [{ "token": [] }, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": { "token": {
                "type": "http", "scheme": "bearer", "description": "The token of [gateway] token_file, if it is set.",
            } },
        },
    })
}

fn publish(types: &mut SchemaGenerator) -> Value {
    let event = json!({ "$ref": "#/components/schemas/Event" });
    let list = json!({ "type": "array", "minItems": 1, "maxItems": LIST_EVENTS_MAX, "items": event });
    let retry_after = json!({ "Retry-After": {
        "description": "Seconds after which the request can be sent again.", "schema": { "type": "integer" },
    } });
    let mut verdicts = |description: &str| answer::<Verdicts>(types, description);
    let (confirmed, mut refused) = (verdicts("Every event is on the broker's disk."), verdicts(""));
    let (mut limited, mut unconfirmed) = (verdicts("A user clicks too often. No event was refused."), verdicts(""));
    let either = |body: &mut Value, description: &str| {
        let verdicts = body["content"]["application/json"]["schema"].take();
        body["content"]["application/json"]["schema"] =
            json!({ "anyOf": [verdicts, { "$ref": "#/components/schemas/ErrorBody" }] });
        body["description"] = description.into();
    };
    either(
        &mut refused,
        "Either an event was refused and the other events were published, or the body is not a valid list of events.",
    );
    either(
        &mut unconfirmed,
        "Either the gateway is busy, or an event was not confirmed: send the request again with the `at` of the answer.",
    );
    limited["headers"] = retry_after.clone();
    unconfirmed["headers"] = retry_after;
    let mut operation = operation(
        types,
        "publish",
        "Publishes an event, or a list of events",
        json!([]),
        [("202", confirmed), ("400", refused), ("429", limited), ("503", unconfirmed)],
    );
    for (status, description) in [
        ("408", "The body took too long."),
        ("411", "Content-Length is missing."),
        ("413", "The body or the list is too large."),
        ("415", "Content-Type is not application/json."),
    ] {
        operation["responses"][status] = answer::<ErrorBody>(types, description);
    }
    operation["requestBody"] = json!({
        "required": true, "content": { "application/json": { "schema": { "anyOf": [event, list] } } },
    });
    operation
}

fn counters(types: &mut SchemaGenerator) -> Value {
    let metrics = json!({ "name": "metrics", "in": "query", "style": "form", "explode": false,
        "description": "Names of [metrics]. Default: `like`.",
        "schema": { "type": "array", "minItems": 1, "items": { "type": "string" } } });
    let found =
        answer::<Counters>(types, "The counters. A counter that no server knows at the moment is null, never zero.");
    let busy = answer::<ErrorBody>(types, "The gateway is busy.");
    let parameters = json!([kind(), ids(), metrics]);
    operation(types, "counters", "Reads counters of targets", parameters, [("200", found), ("503", busy)])
}

fn likes(types: &mut SchemaGenerator) -> Value {
    let user = json!({ "name": "user", "in": "query", "required": true, "schema": id() });
    let found = answer::<Likes>(types, "The likes of the user.");
    let busy = answer::<ErrorBody>(
        types,
        "MySQL is unavailable, the gateway has no site card yet (`no-site-card`), or the gateway is busy.",
    );
    let parameters = json!([user, kind(), ids()]);
    operation(types, "likes", "Reads which targets a user likes", parameters, [("200", found), ("503", busy)])
}

fn board(types: &mut SchemaGenerator) -> Value {
    let number = |name: &str, default: u64, max: u64, description: &str| {
        let schema = json!({ "type": "integer", "minimum": 1, "maximum": max, "default": default });
        json!({ "name": name, "in": "query", "schema": schema, "description": description })
    };
    let text = |name: &str, description: &str| json!({ "name": name, "in": "query", "schema": { "type": "string" }, "description": description });
    let parameters = json!([
        { "name": "name", "in": "path", "required": true, "schema": { "type": "string" } },
        text("period", "2026-11-21, 2026-W47, 2026-11 or total. Default: the current period."),
        number("top", TOP, TOP_MAX, "Number of members to return from the top."),
        text("around", "A member to return with its neighbours."),
        number("radius", RADIUS, RADIUS_MAX, "Number of neighbours on each side."),
    ]);
    let found = answer::<BoardPage>(types, "The board.");
    let none = answer::<ErrorBody>(types, "The board does not exist, or no longer exists.");
    let busy = answer::<ErrorBody>(types, "A server is unavailable, or the gateway is busy.");
    operation(types, "board", "Reads a board", parameters, [("200", found), ("404", none), ("503", busy)])
}

fn operation<const N: usize>(
    types: &mut SchemaGenerator,
    id: &str,
    summary: &str,
    parameters: Value,
    responses: [(&str, Value); N],
) -> Value {
    let mut all = json!({
        "400": answer::<ErrorBody>(types, "The request is invalid."),
        "401": answer::<ErrorBody>(types, "The token is missing or wrong."),
        "403": answer::<ErrorBody>(types, "Without a token, requests must be sent to localhost or to an IP address."),
    });
    for (status, response) in responses {
        all[status] = response;
    }
    json!({ "operationId": id, "summary": summary, "parameters": parameters, "responses": all })
}

fn answer<T: JsonSchema>(types: &mut SchemaGenerator, description: &str) -> Value {
    let schema = types.subschema_for::<T>();
    json!({ "description": description, "content": { "application/json": { "schema": schema } } })
}

fn id() -> Value {
    json!({ "type": "string", "pattern": "^[1-9][0-9]{0,18}$", "description": format!("1 to {ID_MAX}.") })
}

fn kind() -> Value {
    json!({ "name": "kind", "in": "query", "required": true, "schema": { "type": "string" }, "description": "A name of [kinds]." })
}

fn ids() -> Value {
    let schema = json!({ "type": "array", "minItems": 1, "maxItems": IDS_MAX, "items": id() });
    json!({ "name": "ids", "in": "query", "required": true, "style": "form", "explode": false, "schema": schema })
}

fn events() -> [(&'static str, Value); 6] {
    let reference = |name: &str| json!({ "$ref": format!("#/components/schemas/{name}") });
    let any = ["LikeEvent", "CountEvent", "SetEvent", "ResetEvent"].map(reference);
    let integer = |min: i64, max: u64, description: &str| json!({ "type": "integer", "minimum": min, "maximum": max, "description": description });
    let signed = |max: u64, description: &str| json!({ "type": "integer", "minimum": -i64::try_from(max).unwrap_or(i64::MAX), "maximum": max, "description": description });
    let at = integer(1, Micros::MAX.0.unsigned_abs(), "Microseconds since 1970, the same at each retry.");
    let (metric, event_id) = (
        json!({ "type": "string", "description": "A name of [metrics], but not `like`." }),
        json!({ "type": "string", "minLength": 1, "maxLength": EVENT_ID_MAX, "description": "A unique text for each event." }),
    );
    let kind = json!({ "type": "string", "description": "A name of [kinds]." });
    let event = |words: &[&str], more: Value, optional: &[&str]| {
        let mut properties = json!({ "type": { "enum": words }, "kind": kind, "target_id": reference("Id"), "at": at });
        for (name, schema) in more.as_object().into_iter().flatten() {
            properties[name] = schema.clone();
        }
        let names = properties.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        let required: Vec<&str> = names.filter(|name| !optional.contains(name)).collect();
        json!({ "type": "object", "required": required, "properties": properties })
    };
    [
        (
            "Id",
            json!({ "description": "An integer, preferably as text.",
            "anyOf": [integer(1, ID_MAX, "A number."), id()] }),
        ),
        ("LikeEvent", event(&["like", "unlike"], json!({ "user_id": reference("Id") }), &["at"])),
        (
            "CountEvent",
            event(
                &["count"],
                json!({ "metric": metric, "delta": signed(DELTA_MAX, "The amount to add."), "event_id": event_id }),
                &[],
            ),
        ),
        ("SetEvent", event(&["set"], json!({ "metric": metric, "value": signed(VALUE_MAX, "The new count.") }), &[])),
        ("ResetEvent", event(&["reset"], json!({ "metric": metric }), &[])),
        ("Event", json!({ "anyOf": any })),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use tallyd_base::config::Config;
    use tallyd_core::event::{Terms, decode};

    #[test]
    fn the_document_is_the_one_that_the_gateway_serves() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let generated = serde_json::to_string_pretty(&document()).unwrap() + "\n";
        if std::env::var_os("TALLYD_UPDATE_SNAPSHOT").is_some() {
            std::fs::write(&path, &generated).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(written == generated, "write it again: TALLYD_UPDATE_SNAPSHOT=1 cargo nextest run openapi");
    }

    #[test]
    fn every_type_that_the_document_refers_to_is_there() {
        let (document, mut missing) = (document(), BTreeSet::new());
        let text = document.to_string();
        for name in text.split("\"#/components/schemas/").skip(1).map(|rest| rest.split('"').next().unwrap()) {
            if document["components"]["schemas"][name].is_null() {
                missing.insert(name);
            }
        }
        assert_eq!(missing, BTreeSet::new());
    }

    /// For each type of event, returns an event with the largest allowed value, one with the smallest, and one outside
    /// the bounds.
    #[test]
    fn the_bounds_of_events_are_those_of_the_decoder() {
        let mut config = Config::default();
        config.metrics.0.insert("view".to_owned(), 2);
        config.rules = vec![tallyd_base::config::Rule { settable: true, ..tallyd_base::config::Rule::of("view") }];
        let terms = Terms::from(&config);
        let schemas = &document()["components"]["schemas"];
        for (name, word) in
            [("LikeEvent", "like"), ("CountEvent", "count"), ("SetEvent", "set"), ("ResetEvent", "reset")]
        {
            let properties = schemas[name]["properties"].as_object().unwrap();
            let now = Micros::MAX;
            let good = |field: &str| match field {
                "type" => json!(word),
                "kind" => json!("video"),
                "metric" => json!("view"),
                "event_id" => json!("e".repeat(properties[field]["maxLength"].as_u64().unwrap() as usize)),
                "target_id" | "user_id" => schemas["Id"]["anyOf"][0]["maximum"].clone(),
                field => properties[field]["maximum"].clone(),
            };
            let event: serde_json::Map<String, Value> =
                properties.keys().map(|field| (field.clone(), good(field))).collect();
            let is_taken = |event: &serde_json::Map<String, Value>| {
                decode(json!(event).to_string().as_bytes(), &terms, now).is_ok()
            };
            assert!(is_taken(&event), "{name}: {event:?}");
            for (field, schema) in properties {
                let mut less = event.clone();
                less.remove(field);
                assert!(!is_taken(&less), "{name} without {field}");
                if let Some(max) = schema["maximum"].as_u64() {
                    let mut more = event.clone();
                    more.insert(field.clone(), json!(max + 1));
                    assert!(!is_taken(&more), "{name}: {field} = {}", max + 1);
                }
            }
        }
    }
}
