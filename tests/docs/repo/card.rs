//! Checks docs/site-card.schema.json against the cards that daemons write.

use serde_json::Value;
use tallyd_core::card::Card;

use super::events::{Validator, assert_is_schema_of};
use super::{parsed, with_examples};

const SCHEMA: &str = "docs/site-card.schema.json";

#[test]
fn the_schema_is_made_from_the_type_of_the_site_card() {
    assert_is_schema_of::<Card>(SCHEMA);
}

#[test]
fn the_schema_agrees_with_the_decoder_of_the_site_card() {
    let validator = Validator::new(SCHEMA);
    let text = Card::from(&parsed(&with_examples()).unwrap()).encode();
    let card: Value = serde_json::from_str(&text).unwrap();
    assert!(validator.accepts(&card), "{text}");
    assert!(!card["boards"].as_array().unwrap().is_empty(), "{text}");
    for name in card.as_object().unwrap().keys() {
        for other in [None, Some(2.into()), Some("x".into())] {
            let mut changed = card.clone();
            let fields = changed.as_object_mut().unwrap();
            match other {
                None => drop(fields.remove(name)),
                Some(other) => drop(fields.insert(name.clone(), other)),
            }
            let decoded = Card::decode(&changed.to_string());
            assert_eq!(validator.accepts(&changed), decoded.is_ok(), "{changed}: {decoded:?}");
        }
    }
}
