//! The vectors under tests/vectors: tallyd and each client must compute the same results. The test
//! tests/it/boards/score.rs checks the vectors for scores.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Deserialize;
use serde_json::Value;
use tallyd_base::config::{Config, Kinds};
use tallyd_core::event::{
    CountEvent, EventId, LikeEvent, Message, SetEvent, Terms, decode, encode_count, encode_like, encode_reset,
    encode_set,
};
use tallyd_core::model::{Kind, Metric, Micros, Target, TargetId, UserId};
use tallyd_core::period::{Calendar, Period, PeriodKind, WeekStart};
use tallyd_redis::keys::{Keys, KindNames};
use tallyd_redis::layout::{Form, Layout};
use tallyd_redis::read::Found;

use super::common::{World, stderr, stdout, target};
use super::example::Example;

/// The kinds that the vectors use, in the form of a configuration.
fn kinds() -> BTreeMap<String, u8> {
    BTreeMap::from([("video".to_owned(), 1), ("post".to_owned(), 2)])
}

/// Decodes an event of a vector. The events in the vectors are old, so this decoder accepts events of any age.
fn judge(body: &Value) -> Result<Message, &'static str> {
    let rules = "[kinds]\nvideo = 1\npost = 2\n[metrics]\nlike = 1\nview = 2\nunread = 3\n\
                 [[rule]]\nmetric = \"unread\"\nkind = \"video\"\nsettable = true";
    let config = tallyd_base::config::parse(rules, "vectors", []).unwrap();
    let terms = Terms { future_max: Duration::ZERO, applied_event_keep: Duration::MAX, ..Terms::from(&config) };
    decode(body.to_string().as_bytes(), &terms, Micros::MAX).map_err(|refusal| refusal.reason.code())
}

fn vectors<T: for<'de> Deserialize<'de>>(name: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Bucket {
    kind: String,
    id: String,
    bucket_bits: u8,
    key: String,
    recent: [String; 2],
    missing: String,
}

#[test]
fn tallyd_names_the_keys_of_the_vectors() {
    for Bucket { kind, id, bucket_bits, key, recent, missing } in vectors("buckets.json") {
        let Config { redis, metrics, .. } = Config::default();
        let keys = Keys::new(&redis.key_prefix, &metrics, Layout::new(Form::Packed, bucket_bits, "").unwrap());
        let bucket = keys.bucket(target(id.parse().unwrap()));
        assert_eq!(keys.counters(&kind, bucket), key, "{id}");
        assert_eq!(keys.recent(&kind, bucket), recent, "{id}");
        assert_eq!(keys.bucket_name(&kind, bucket), missing, "{id}");
    }
}

#[derive(Deserialize)]
struct Field {
    loaded: Option<String>,
    value: Option<String>,
    place: u8,
    number: Option<String>,
    note_missing: bool,
}

#[tokio::test]
async fn tallyd_reads_the_values_of_the_vectors() {
    let world = World::new("value_vectors", "").await;
    let mut redis = world.redis().await;
    let names = KindNames::new(&Kinds(kinds()));
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    for Field { loaded, value, place, number, note_missing } in vectors("values.json") {
        let () = redis::cmd("UNLINK").arg(&key).query_async(&mut redis).await.unwrap();
        for (field, text) in [("_", &loaded), ("42", &value)] {
            if let Some(text) = text {
                let () = redis::cmd("HSET").arg(&key).arg(field).arg(text).query_async(&mut redis).await.unwrap();
            }
        }
        let found = world.cache.read(&names, &[Metric(place)], &[target(42)]).await.unwrap().remove(0);
        assert_eq!(found == Found::Missing, note_missing, "{loaded:?}, {value:?}");
        let known = if let Found::Known(numbers) = found { Some(numbers[0].to_string()) } else { None };
        assert_eq!(known, number, "{loaded:?}, {value:?}, {place}");
    }
}

#[derive(Deserialize)]
struct Event {
    event: Given,
    body: Option<Value>,
    refused: Option<String>,
}

/// The values from which a client builds the event of a like or an unlike. Ids and time are text.
#[derive(Deserialize)]
struct Given {
    #[serde(rename = "type")]
    event_type: String,
    kind: String,
    target_id: String,
    user_id: String,
    at: String,
    count: Option<i64>,
}

impl Given {
    /// Makes the event that a client would publish if it did not check the inputs.
    fn unchecked(&self) -> Value {
        let mut body = serde_json::json!({
            "type": self.event_type, "kind": self.kind, "target_id": self.target_id, "user_id": self.user_id,
        });
        body["at"] = serde_json::from_str(&self.at).unwrap();
        body
    }

    /// Makes the event that tallyd decodes from the vector's inputs.
    fn event(&self) -> LikeEvent {
        let kind = Kind(kinds()[&self.kind]);
        LikeEvent {
            target: Target { kind, id: TargetId(self.target_id.parse().unwrap()) },
            user: UserId(self.user_id.parse().unwrap()),
            at: Micros(self.at.parse().unwrap()),
            liked: self.event_type == "like",
        }
    }
}

#[test]
fn tallyd_makes_takes_and_refuses_the_events_of_the_vectors() {
    for Event { event: given, body, refused } in vectors("events.json") {
        let Some(body) = body else {
            assert_eq!(judge(&given.unchecked()).unwrap_err(), refused.unwrap(), "{}", given.unchecked());
            continue;
        };
        let event = given.event();
        assert_eq!(judge(&body), Ok(Message::Like(event)), "{body}");
        let encoded: Value = serde_json::from_slice(&encode_like(&event, &given.kind, given.count)).unwrap();
        assert_eq!(encoded, body);
    }
}

#[derive(Deserialize)]
struct Count {
    event: Change,
    body: Option<Value>,
    refused: Option<String>,
}

/// The inputs of a client for a `count` event. Some rejected inputs have a wrong type.
#[derive(Deserialize, serde::Serialize)]
struct Change {
    kind: String,
    target_id: String,
    metric: String,
    delta: Value,
    event_id: Value,
    at: String,
}

#[test]
fn tallyd_makes_takes_and_refuses_the_counts_of_the_vectors() {
    for Count { event, body, refused } in vectors("counts.json") {
        let Some(body) = body else {
            let mut unchecked = serde_json::to_value(&event).unwrap();
            unchecked["type"] = "count".into();
            unchecked["at"] = serde_json::from_str(&event.at).unwrap();
            assert_eq!(judge(&unchecked).unwrap_err(), refused.unwrap(), "{unchecked}");
            continue;
        };
        let (id, at) = (TargetId(event.target_id.parse().unwrap()), Micros(event.at.parse().unwrap()));
        let (delta, event_id) = (event.delta.as_i64().unwrap(), event.event_id.as_str().unwrap());
        let (target, metric) = (Target { kind: Kind(kinds()[&event.kind]), id }, Metric(2));
        let understood = CountEvent { target, metric, delta, at, id: EventId::of(target, metric, event_id) };
        assert_eq!(judge(&body), Ok(Message::Count(understood)), "{body}");
        let encoded = encode_count(id, (&event.kind, &event.metric), delta, at, event_id, None);
        assert_eq!(serde_json::from_slice::<Value>(&encoded).unwrap(), body);
    }
}

#[derive(Deserialize)]
struct Set {
    event: Setting,
    body: Option<Value>,
    refused: Option<String>,
}

/// The values from which a client makes a `set` event. Some rejected values have a wrong type.
#[derive(Deserialize, serde::Serialize)]
struct Setting {
    #[serde(rename = "type")]
    event_type: String,
    kind: String,
    target_id: String,
    metric: String,
    value: Value,
    at: String,
}

#[test]
fn tallyd_makes_takes_and_refuses_the_sets_of_the_vectors() {
    for Set { event, body, refused } in vectors("sets.json") {
        let Some(body) = body else {
            let mut unchecked = serde_json::to_value(&event).unwrap();
            unchecked["at"] = serde_json::from_str(&event.at).unwrap();
            assert_eq!(judge(&unchecked).unwrap_err(), refused.unwrap(), "{unchecked}");
            continue;
        };
        let (id, at) = (TargetId(event.target_id.parse().unwrap()), Micros(event.at.parse().unwrap()));
        let is_set = event.event_type == "set";
        let value = if is_set { event.value.as_i64().unwrap() } else { 0 };
        let target = Target { kind: Kind(kinds()[&event.kind]), id };
        let understood = SetEvent { target, metric: Metric(3), value, at };
        assert_eq!(judge(&body), Ok(Message::Set(understood)), "{body}");
        let names = (event.kind.as_str(), event.metric.as_str());
        let encoded = if is_set { encode_set(id, names, value, at) } else { encode_reset(id, names, at) };
        assert_eq!(serde_json::from_slice::<Value>(&encoded).unwrap(), body);
    }
}

#[derive(Deserialize)]
struct Named {
    period: PeriodKind,
    instant: String,
    time_zone: String,
    week_starts: WeekStart,
    name: String,
}

#[test]
fn tallyd_names_the_periods_of_the_vectors() {
    for Named { period, instant, time_zone, week_starts, name } in vectors("periods.json") {
        let calendar = Calendar::new(TimeZone::get(&time_zone).unwrap(), week_starts);
        let at: Timestamp = instant.parse().unwrap();
        let found = Period::containing(period, Micros(at.as_microsecond()), &calendar);
        assert_eq!(found.to_string(), name, "{instant} in {time_zone}");
    }
}

#[test]
fn the_clients_agree_with_every_vector() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let mut expected = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name == "filters.json" {
            // No client needs to compute the bits of Bloom filters.
            continue;
        }
        let count = vectors::<Value>(&name).len();
        expected.insert(name.strip_suffix(".json").unwrap().to_owned(), count.to_string());
    }
    for example in Example::ALL {
        let output = example.command("vectors").output().unwrap();
        assert!(output.status.success(), "{example:?}: {}", stderr(&output));
        let text = stdout(&output);
        let checked = text.lines().map(|line| line.split_once(": ").unwrap());
        let checked: BTreeMap<String, String> =
            checked.map(|(name, count)| (name.to_owned(), count.to_owned())).collect();
        assert_eq!(checked, expected, "{example:?} has not checked all vectors");
    }
}
