//! Checks docs/events.schema.json and docs/asyncapi.yaml against the decoder.

mod producers;
mod shape;

use std::fs;
use std::time::Duration;

use boon::{Compiler, SchemaIndex, Schemas};
use proptest::prelude::*;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};
use tallyd_base::config::Config;
use tallyd_core::event::{BODY_BYTES_MAX, Message, Refusal, Terms, decode_all};
use tallyd_core::model::Micros;

use super::{blocks, read, root};

const SCHEMA: &str = "docs/events.schema.json";

/// Returns a configuration with all names, with settable counters, and without a limit on times.
fn terms() -> Terms {
    let rules = "[kinds]\nvideo = 1\npost = 2\ninbox = 3\n[metrics]\nlike = 1\nview = 2\nunread = 3\n\
                 [[rule]]\nmetric = \"unread\"\nsettable = true\n[[rule]]\nmetric = \"view\"\nsettable = true";
    let config: Config = tallyd_base::config::parse(rules, "schema", []).unwrap();
    Terms { at_min: Micros(1), future_max: Duration::MAX, applied_event_keep: Duration::MAX, ..Terms::from(&config) }
}

/// Decodes a body. Fails if the decoder refuses any event of the body.
fn decoded(body: &str) -> Result<(), Refusal> {
    let mut verdict = Ok(());
    decode_all(body.as_bytes(), &terms(), Micros::MAX, |judged, _| {
        if let Err(refusal) = judged.and_then(Message::of_publisher) {
            verdict = Err(refusal);
        }
    });
    verdict
}

/// A schema as a validator.
pub struct Validator {
    schemas: Schemas,
    schema: SchemaIndex,
}

impl Validator {
    pub fn new(file: &str) -> Self {
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        let at = "https://tallyd.invalid/schema.json";
        compiler.add_resource(at, serde_json::from_str(&read(file)).unwrap()).unwrap();
        let schema = compiler.compile(at, &mut schemas).unwrap();
        Self { schemas, schema }
    }

    pub fn accepts(&self, body: &Value) -> bool {
        self.schemas.validate(body, self.schema).is_ok()
    }

    /// Fails unless the schema accepts exactly what the decoder accepts.
    fn agrees(&self, body: &Value) {
        let decoded = decoded(&body.to_string());
        assert_eq!(self.accepts(body), decoded.is_ok(), "{body}: {decoded:?}");
    }
}

/// Fails unless the file has the schema of the type.
pub fn assert_is_schema_of<T: JsonSchema>(file: &str) {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let made = generator.into_root_schema_for::<T>().to_value();
    let made = format!("{}\n", serde_json::to_string_pretty(&made).unwrap());
    if std::env::var_os("TALLYD_WRITE_SCHEMA").is_some() {
        fs::write(root().join(file), &made).unwrap();
    }
    let current = fs::read_to_string(root().join(file)).unwrap_or_default();
    assert!(current == made, "{file} is old: TALLYD_WRITE_SCHEMA=1 cargo test --test docs the_schema_is_made");
}

#[test]
fn the_schema_is_made_from_the_types() {
    assert_is_schema_of::<shape::Body>(SCHEMA);
}

#[test]
fn the_schema_and_the_decoder_agree_on_examples_and_vectors() {
    let validator = Validator::new(SCHEMA);
    let mut accepted = 0;
    for document in ["docs/events.md", "docs/clients.md", "README.md"] {
        for block in blocks(document, "json") {
            for line in block.lines().filter(|line| line.starts_with("{\"type\"")) {
                let event: Value = serde_json::from_str(line).unwrap();
                assert!(validator.accepts(&event) && decoded(line).is_ok(), "{line}");
                accepted += 1;
            }
        }
    }
    assert!(accepted >= 4, "{accepted} examples");
    for name in ["events", "counts", "sets"] {
        let vectors: Vec<Value> = serde_json::from_str(&read(format!("tests/vectors/{name}.json"))).unwrap();
        for vector in vectors {
            let by_configuration = ["unknown-kind", "not-settable", "unknown-metric", "at-too-early"].map(Value::from);
            if by_configuration.contains(&vector["refused"]) && vector["event"]["metric"] != "like" {
                continue;
            }
            let mut body = vector["event"].clone();
            body["at"] = serde_json::from_str(body["at"].as_str().unwrap()).unwrap();
            if body["at"] == Micros::MAX.0 + 1 {
                // Validators compare doubles, so this value looks equal to the maximum.
                continue;
            }
            if body.get("type").is_none() {
                body["type"] = "count".into();
            }
            validator.agrees(&body);
            assert_eq!(validator.accepts(&body), vector.get("refused").is_none(), "{body}");
            if let Some(body) = vector.get("body") {
                validator.agrees(body);
                validator.agrees(&json!([body, body]));
            }
        }
    }
}

#[test]
fn the_schema_accepts_what_only_the_text_or_the_size_makes_wrong() {
    let validator = Validator::new(SCHEMA);
    let event = |target: &str, more: &str| {
        format!(
            "{{\"type\":\"like\",\"kind\":\"video\",\"target_id\":{target},\"user_id\":7,\"at\":1795251385004538{more}}}"
        )
    };
    let long = format!(",\"more\":\"{}\"", "x".repeat(BODY_BYTES_MAX));
    for body in [event("42", ",\"at\":1"), event("42", &long)] {
        assert!(validator.accepts(&serde_json::from_str(&body).unwrap()), "{body:.99}");
        assert!(decoded(&body).is_err(), "{body:.99}");
    }
    let list = |length: usize| Value::from(vec![serde_json::from_str::<Value>(&event("42", "")).unwrap(); length]);
    for exact in ["42.0", "4.2e1", "\"42\""] {
        validator.agrees(&serde_json::from_str(&event(exact, "")).unwrap());
    }
    for length in [0, 1, 1_001] {
        validator.agrees(&list(length));
    }
}

/// Some of these values are valid in at least one field, and the others are valid in no field.
fn values() -> impl Strategy<Value = Value> {
    let words = ["like", "unlike", "count", "set", "reset", "fence", "video", "view", "unread", "", "42", "042", "-1"];
    let edges = ["9223372036854775807", "9223372036854775808", "9223372036854775799", "10000000000000000000", "42\n"];
    let numbers = [0_i64, 1, -1, 42, 1 << 31, -(1 << 31), (1 << 31) + 1, 1 << 53, -(1 << 53)];
    prop_oneof![
        prop::sample::select([&words[..], &edges[..]].concat()).prop_map(Value::from),
        prop::sample::select(numbers.to_vec()).prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        any::<u64>().prop_map(|id| id.to_string().into()),
        "\\PC{60,68}".prop_map(Value::from),
        prop::sample::select(vec![
            json!(null),
            json!(true),
            json!(0.5),
            json!([]),
            json!({}),
            json!([1]),
            json!(1e300)
        ]),
    ]
}

/// An event whose fields are mostly valid.
fn events() -> impl Strategy<Value = Value> {
    let fields =
        ["type", "kind", "target_id", "user_id", "metric", "delta", "value", "event_id", "at", "count", "more"];
    let changes = prop::collection::vec((prop::sample::select(fields.to_vec()), prop::option::of(values())), 0..3);
    (prop::sample::select(vec!["like", "unlike", "count", "set", "reset"]), changes).prop_map(
        |(event_type, changes)| {
            let mut event = json!({
                "type": event_type, "kind": "video", "target_id": "42", "user_id": 7, "metric": "view", "delta": -3,
                "value": 5, "event_id": "one", "at": 1_795_251_385_004_538_u64,
            });
            for (field, value) in changes {
                match value {
                    Some(value) => event[field] = value,
                    None => drop(event.as_object_mut().unwrap().remove(field)),
                }
            }
            event
        },
    )
}

/// Tells whether the event has a kind or a metric that is not in the configuration.
fn is_by_configuration(event: &Value) -> bool {
    let unknown = |field: &str, known: &[&str]| event[field].as_str().is_some_and(|name| !known.contains(&name));
    unknown("kind", &["video"]) || unknown("metric", &["view", "unread", "like"])
}

proptest! {
    #[test]
    fn the_schema_and_the_decoder_agree_on_any_event(event in events(), other in events()) {
        prop_assume!(!is_by_configuration(&event) && !is_by_configuration(&other));
        let validator = Validator::new(SCHEMA);
        validator.agrees(&event);
        validator.agrees(&json!([event, other]));
    }
}

#[test]
fn the_asyncapi_document_names_what_the_daemon_declares() {
    let document: Value = serde_saphyr::from_str(&read("docs/asyncapi.yaml")).unwrap();
    assert_eq!(document["asyncapi"], "3.0.0");
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let prefix = Config::default().amqp.prefix;
    let exchange = &document["channels"]["events"]["bindings"]["amqp"]["exchange"];
    assert_eq!(exchange["name"], format!("{prefix}.events"));
    assert_eq!((&exchange["type"], &exchange["durable"]), (&json!("topic"), &json!(true)));
    let published = &document["operations"]["publish"]["bindings"]["amqp"];
    assert_eq!((&published["deliveryMode"], &published["mandatory"]), (&json!(2), &json!(true)));

    let message = &document["components"]["messages"]["events"];
    assert_eq!(message["contentType"], "application/json");
    let schema = message["payload"]["schema"]["$ref"].as_str().unwrap();
    assert_eq!(root().join("docs").join(schema), root().join("docs/.").join("./events.schema.json"));
    let validator = Validator::new(SCHEMA);
    let examples = message["examples"].as_array().unwrap();
    for example in examples {
        assert!(validator.accepts(&example["payload"]), "{example}");
        decoded(&example["payload"].to_string()).unwrap();
    }
    let types: Vec<&str> = examples.iter().filter_map(|example| example["payload"]["type"].as_str()).collect();
    assert_eq!(types, ["like", "unlike", "count", "set", "reset"]);
}
