//! Fuzzes the decoder of custom JSON. The decoder must accept or reject each part of a body. If the decoder accepts a
//! part, the decoded message must contain the values of the JSON fields. If the decoder rejects a part, it returns a
//! sentence with the reason.

use std::sync::LazyLock;

use serde_json::Value;
use tallyd_core::event::Message;
use tallyd_core::mapping::{Envelope, Map, decode_all};
use tallyd_core::model::Micros;

use super::event::{NOW, TERMS};

static MAP: LazyLock<Map> = LazyLock::new(|| {
    let map = r#"
name = "site"
number = 1
exchange = "site.likes"
list = "/batch/events"
type = { pointer = "/action", values = { LIKE = "like", UNLIKE = "unlike", VIEW = "count", "1" = "like" } }
kind = { pointer = "/object/kind", values = { "1" = "video", "true" = "post" } }
target_id = { pointer = "/object/id" }
user_id = { pointer = "/actor~1id" }
at = { pointer = "/ts", unit = "ms" }
metric = { constant = "view" }
delta = { pointer = "/by" }
event_id = { pointer = "/uid" }
"#;
    toml::from_str(map).expect("it is a map")
});

/// The input is a body in a site's custom JSON.
pub fn map(body: &[u8]) {
    let mut until = 0;
    decode_all(body, (&MAP, &Envelope::default()), &TERMS, NOW, |verdict, range| {
        assert!(until <= range.start && range.end <= body.len(), "{range:?} of {} bytes", body.len());
        until = range.end;
        match verdict {
            Ok(message) => taken(&body[range], &message),
            Err(refusal) => assert!((1..=1_500).contains(&refusal.error.len()), "{}", refusal.error.len()),
        }
    });
}

fn taken(body: &[u8], message: &Message) {
    let value: Value = serde_json::from_slice(body).expect("an accepted body is JSON");
    let id = |pointer: &str| {
        let value = value.pointer(pointer).expect("the field is there");
        let whole = || value.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as u64);
        value.as_u64().or_else(|| value.as_str()?.parse().ok()).or_else(whole)
    };
    let (target, at) = match message {
        Message::Like(event) => {
            assert_eq!(id("/actor~1id"), Some(event.user.0));
            assert_eq!(event.liked, value["action"] != "UNLIKE");
            (event.target, event.at)
        }
        Message::Count(event) => {
            assert_eq!(value["action"], "VIEW");
            (event.target, event.at)
        }
        Message::Set(_) | Message::Fence(_) => panic!("the map defines no messages of this kind"),
    };
    assert_eq!(id("/object/id"), Some(target.id.0));
    // Texts and fractions have tests of their own.
    if let Some(ms) = value.pointer("/ts").and_then(Value::as_u64) {
        assert_eq!(Micros(ms.cast_signed() * 1_000), at);
    }
}
