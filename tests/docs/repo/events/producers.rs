//! The maps of docs/events.md take the messages that they are for.

use serde_json::Value;
use tallyd_core::event::{Message, Terms};
use tallyd_core::mapping::{Envelope, decode_all};
use tallyd_core::model::{Micros, TargetId};

use super::blocks;

/// 2025-11-28T10:00:00.123Z, the time of each message.
const AT: Micros = Micros(1_764_324_000_123_000);

#[test]
fn the_maps_of_common_producers_take_their_messages() {
    let texts = blocks("docs/events.md", "toml");
    let [text] = &texts[..] else { panic!("{} blocks", texts.len()) };
    let config = tallyd::config::parse(text, "docs/events.md", []).unwrap();
    let terms = Terms { applied_event_keep: std::time::Duration::MAX, ..Terms::from(&config) };
    let sections: Vec<&str> = text.split("\n[[map]]\n").collect();
    assert_eq!((sections.len(), config.maps.len()), (11, 10));
    for (map, section) in config.maps.iter().zip(&sections) {
        let comments = section.rsplit("\n\n").next().unwrap();
        let (mut envelope, mut messages) = (Envelope::default(), 0);
        for line in comments.lines() {
            if let Some(headers) = line.strip_prefix("# headers ") {
                envelope = Envelope(serde_json::from_str(headers).unwrap());
            } else if let Some(body) = line.strip_prefix("# body ") {
                let _: Value = serde_json::from_str(body).unwrap();
                decode_all(body.as_bytes(), (map, &envelope), &terms, AT, |verdict, _| {
                    let (target, at) = match verdict {
                        Ok(Message::Like(event)) => (event.target, event.at),
                        Ok(Message::Count(event)) => (event.target, event.at),
                        other => panic!("{}: {other:?}", map.name),
                    };
                    assert_eq!((target.id, at), (TargetId(42), AT), "{}", map.name);
                    messages += 1;
                });
            }
        }
        assert!(messages > 0, "{} has no message", map.name);
    }
}
