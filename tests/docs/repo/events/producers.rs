//! The maps of docs/events.md take the messages that they are for, in any order of their fields, and never panic.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use tallyd_base::config::Map;
use tallyd_core::event::{LIST_BYTES_MAX, Message, Refusal, Terms};
use tallyd_core::mapping::{Envelope, decode_all};
use tallyd_core::model::{Micros, TargetId};

use super::blocks;

/// 2025-11-28T10:00:00.123Z, the time of each message.
const AT: Micros = Micros(1_764_324_000_123_000);

/// A message of a common producer, with the map that takes it.
#[derive(Clone, Debug)]
struct Sample {
    map: Map,
    envelope: Envelope,
    body: Value,
}

/// Returns the terms and the messages of docs/events.md.
fn samples() -> (Terms, Vec<Sample>) {
    let texts = blocks("docs/events.md", "toml");
    let [text] = &texts[..] else { panic!("{} blocks", texts.len()) };
    let config = tallyd_base::config::parse(text, "docs/events.md", []).unwrap();
    let sections: Vec<&str> = text.split("\n[[map]]\n").collect();
    let mut samples = Vec::new();
    for (map, section) in config.maps.iter().zip(&sections) {
        let mut envelope = Envelope::default();
        for line in section.rsplit("\n\n").next().unwrap().lines() {
            if let Some(headers) = line.strip_prefix("# headers ") {
                envelope = Envelope(serde_json::from_str(headers).unwrap());
            } else if let Some(body) = line.strip_prefix("# body ") {
                let body = serde_json::from_str(body).unwrap();
                samples.push(Sample { map: map.clone(), envelope: envelope.clone(), body });
            }
        }
        assert_eq!(samples.last().map(|sample| sample.map.name.as_str()), Some(map.name.as_str()));
    }
    (Terms { applied_event_keep: Duration::MAX, ..Terms::from(&config) }, samples)
}

impl Sample {
    /// The result that is right: the time is rounded down to the map's unit.
    fn is(&self) -> Result<(TargetId, Micros), Refusal> {
        Ok((TargetId(42), self.map.at.unit.floor(AT)))
    }

    fn decode(&self, body: &[u8], terms: &Terms) -> Vec<Result<(TargetId, Micros), Refusal>> {
        let mut all = Vec::new();
        decode_all(body, (&self.map, &self.envelope), terms, AT, |verdict, range| {
            assert!(range.end <= body.len());
            all.push(verdict.map(|message| match message {
                Message::Like(event) => (event.target.id, event.at),
                Message::Count(event) => (event.target.id, event.at),
                Message::Set(_) | Message::Fence(_) => panic!("{} makes no such event", self.map.name),
            }));
        });
        all
    }
}

/// Writes an object with its fields in another order, and with a field that no map reads.
fn shuffled(value: &Value, turn: usize) -> String {
    let Value::Object(fields) = value else { return value.to_string() };
    let mut texts: Vec<String> =
        fields.iter().map(|(name, value)| format!("{}:{}", json!(name), shuffled(value, turn))).collect();
    texts.push(r#""x-more":{"a":[1.5e300,null,"\ud83d\ude00"]}"#.to_owned());
    let count = texts.len();
    texts.rotate_left(turn % count);
    format!("{{{}}}", texts.join(","))
}

#[test]
fn the_maps_of_common_producers_take_their_messages() {
    let (terms, samples) = samples();
    assert_eq!(samples.len(), 12);
    for sample in samples {
        let taken = sample.decode(sample.body.to_string().as_bytes(), &terms);
        assert_eq!(taken, [sample.is()], "{sample:?}");
    }
}

proptest! {
    #[test]
    fn no_order_of_fields_and_no_damage_loses_an_event_of_a_map(
        which in 0..12_usize, turn in 0..9_usize, copies in 1..200_usize, place in any::<usize>(), bit in 0..8_u32,
    ) {
        let (terms, samples) = samples();
        let sample = &samples[which];
        let body = shuffled(&sample.body, turn);
        prop_assert_eq!(sample.decode(body.as_bytes(), &terms), vec![sample.is()]);
        if !sample.map.single {
            let list = format!("[{}]", vec![body.as_str(); copies].join(","));
            prop_assert!(list.len() <= LIST_BYTES_MAX);
            prop_assert_eq!(sample.decode(list.as_bytes(), &terms), vec![sample.is(); copies]);
        }
        let mut damaged = body.into_bytes();
        let place = place % damaged.len();
        damaged[place] ^= 1 << bit;
        prop_assert!(sample.decode(&damaged, &terms).len() <= 1);
    }
}
