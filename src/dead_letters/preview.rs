//! Decides whether the consumer would accept a body today, and where the body must be published. Pure.

use std::collections::HashMap;
use std::ops::Range;

use serde_json::Value;

use tallyd_base::config::{Config, Map, PartitionBy};
use tallyd_core::event::{self, Message, Reason, Refusal, Terms};
use tallyd_core::mapping::{self, Envelope};
use tallyd_core::model::Micros;
use tallyd_mysql::letters::Letter;
use tallyd_rabbitmq::Broker;

/// The routing key of a body without an id. Any other key would work, too.
const NOBODY: &str = "0";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    pub taken: usize,
    pub refused: usize,
    pub refusal: Option<Refusal>,
    /// The body is a fence message of a run that ended long ago. The message is no longer needed.
    pub is_fence: bool,
    /// The body contains likes. The Bloom filters must be rebuilt to include them.
    pub has_likes: bool,
    /// For likes by `[amqp] partition_by`, for counts the target's id, for a list that of the first event.
    pub routing_key: String,
    /// The map's queue that the letter came through. The letter is replayed to this queue, and not through tallyd's
    /// exchange.
    pub map_queue: Option<String>,
}

/// Judges letters. The queue that a letter came through decides how the letter is decoded, because messages of maps are
/// not tallyd's own JSON.
pub(crate) struct Judge {
    terms: Terms,
    maps: HashMap<String, Map>,
    map_queues: String,
}

impl Judge {
    pub(crate) fn new(config: &Config, broker: &Broker) -> Self {
        let maps = config.maps.iter().map(|map| (broker.map_queue(&map.name), map.clone()));
        Self { terms: Terms::from(config), maps: maps.collect(), map_queues: broker.map_queues() }
    }

    pub(crate) fn judge(&self, letter: &Letter, body: &[u8], now: Micros) -> Preview {
        let queue = letter.queue.as_str();
        let Some(name) = queue.strip_prefix(&self.map_queues) else { return judge(body, &self.terms, now) };
        let mut preview = match self.maps.get(queue) {
            Some(map) => {
                let envelope = Envelope(serde_json::from_str(&letter.headers).unwrap_or_default());
                preview(&self.terms, |each| mapping::decode_all(body, (map, &envelope), &self.terms, now, each))
            }
            None => {
                let error = format!("it arrived through the map {name}, which is not in the configuration");
                Preview {
                    refused: 1,
                    refusal: Some(Refusal { reason: Reason::UnknownType, error }),
                    ..Preview::default()
                }
            }
        };
        preview.is_fence = event::fence_of(body).is_some();
        preview.map_queue = Some(queue.to_owned());
        preview
    }
}

pub fn judge(body: &[u8], terms: &Terms, now: Micros) -> Preview {
    let mut preview = preview(terms, |each| event::decode_all(body, terms, now, each));
    if preview.routing_key.is_empty() {
        preview.routing_key = guessed(body, terms.partition_by);
    }
    preview
}

fn preview(terms: &Terms, decode: impl FnOnce(&mut dyn FnMut(Result<Message, Refusal>, Range<usize>))) -> Preview {
    let mut preview = Preview::default();
    let mut key = None;
    decode(&mut |decoded, _| match decoded {
        Ok(Message::Fence(_)) => preview.is_fence = true,
        Ok(Message::Like(event)) => {
            preview.taken += 1;
            preview.has_likes = true;
            key.get_or_insert_with(|| terms.partition_by.routing_key(event.target, event.user));
        }
        Ok(Message::Count(event)) => {
            preview.taken += 1;
            key.get_or_insert_with(|| event.target.id.to_string());
        }
        Ok(Message::Set(event)) => {
            preview.taken += 1;
            key.get_or_insert_with(|| event.target.id.to_string());
        }
        Err(refusal) => {
            preview.refused += 1;
            preview.refusal.get_or_insert(refusal);
        }
    });
    preview.routing_key = key.unwrap_or_default();
    preview
}

impl Preview {
    pub fn is_taken(&self) -> bool {
        self.refused == 0 && !self.is_fence
    }

    pub fn words(&self) -> String {
        match (&self.refusal, self.taken) {
            _ if self.is_fence => "a fence of a run that has ended: it is no longer needed".to_owned(),
            (None, 0) => "it contains no event".to_owned(),
            (None, 1) => "would be accepted".to_owned(),
            (None, taken) => format!("all {taken} events would be accepted"),
            (Some(Refusal { reason, error }), 0) => format!("would be refused: {}: {error}", reason.code()),
            (Some(Refusal { reason, error }), taken) => {
                let all = taken + self.refused;
                format!("{taken} of {all} events would be accepted; first refusal: {}: {error}", reason.code())
            }
        }
    }
}

fn guessed(body: &[u8], partition_by: PartitionBy) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let event = value.get(0).unwrap_or(&value);
    let fields = match partition_by {
        PartitionBy::User => ["user_id", "target_id"],
        PartitionBy::Target => ["target_id", "user_id"],
    };
    let id = fields.into_iter().find_map(|field| match event.get(field)? {
        Value::Number(number) => number.as_u64().map(|id| id.to_string()),
        Value::String(text) => text.parse::<u64>().ok().map(|id| id.to_string()),
        _ => None,
    });
    id.unwrap_or_else(|| NOBODY.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Micros = Micros(1_795_251_385_004_538);

    fn judged(body: &str) -> Preview {
        let text = "[metrics]\nlike = 1\nview = 3\nstock = 4\n[[rule]]\nmetric = \"stock\"\nsettable = true\n";
        let config = tallyd_base::config::parse(text, "test", []).unwrap();
        judge(body.as_bytes(), &Terms::from(&config), NOW)
    }

    fn like(user: u64, kind: &str) -> String {
        format!(r#"{{"type":"like","kind":"{kind}","target_id":42,"user_id":"{user}","at":{NOW}}}"#)
    }

    #[test]
    fn what_producers_send_is_taken_with_their_routing_key() {
        let preview = judged(&like(7, "video"));
        assert!(preview.is_taken() && preview.has_likes);
        assert_eq!((preview.routing_key.as_str(), preview.words().as_str()), ("7", "would be accepted"));
        let count = format!(
            r#"{{"type":"count","kind":"video","target_id":"42","metric":"view","delta":1,"event_id":"a","at":{NOW}}}"#
        );
        let preview = judged(&count);
        assert!(preview.is_taken() && !preview.has_likes);
        assert_eq!(preview.routing_key, "42");
        let set = format!(r#"{{"type":"set","kind":"video","target_id":43,"metric":"stock","value":9,"at":{NOW}}}"#);
        let preview = judged(&set);
        assert_eq!((preview.is_taken(), preview.routing_key.as_str()), (true, "43"), "{}", preview.words());
        let old = judged(&count.replace(&NOW.to_string(), "1262304000000000"));
        assert_eq!(old.refusal.unwrap().reason, Reason::AtTooOld);
    }

    #[test]
    fn a_list_is_judged_event_by_event() {
        let preview = judged(&format!("[{},{},{}]", like(8, "film"), like(9, "video"), like(10, "video")));
        assert_eq!((preview.taken, preview.refused, preview.routing_key.as_str()), (2, 1, "9"));
        assert!(!preview.is_taken());
        assert!(preview.words().starts_with("2 of 3 events would be accepted; first refusal: unknown-kind: "));
        assert!(judged("[]").is_taken());
    }

    #[test]
    fn what_can_not_be_read_is_refused_and_still_has_a_routing_key() {
        for (body, key) in [
            (like(11, "film").as_str(), "11"),
            (r#"{"type":"count","target_id":42}"#, "42"),
            (r#"[{"type":"like","user_id":12}]"#, "12"),
            (r#"{"user_id":"a key of 300 bytes"}"#, "0"),
            ("nonsense", "0"),
            ("", "0"),
        ] {
            let preview = judged(body);
            assert_eq!((preview.is_taken(), preview.routing_key.as_str()), (false, key), "{body}");
        }
    }

    #[test]
    fn a_fence_is_never_worth_a_replay() {
        assert!(!judged(r#"{"type":"fence","fence":7}"#).is_taken());
    }
}
