//! Users' clicks through the gateway.

use serde_json::{Value, json};
use tallyd_core::model::{Target, UserId};
use tallyd_testkit::gateway::Gateway;

use super::POST;
use crate::history::Answer;

/// Publishes a click.
pub async fn click(gateway: &Gateway, target: Target, user: UserId, liked: bool) -> Answer {
    let kind = if target.kind == POST { "post" } else { "video" };
    let action = if liked { "like" } else { "unlike" };
    let (target_id, user_id) = (target.id.0.to_string(), user.0.to_string());
    let event = json!({ "type": action, "kind": kind, "target_id": target_id, "user_id": user_id });
    let answer = gateway.post(&event.to_string()).await.json();
    let verdict = &answer["events"][0];
    let at = || verdict["at"].as_i64().unwrap();
    match verdict["verdict"].as_str() {
        Some("confirmed") => Answer::Done { at: at() },
        Some("unconfirmed") => Answer::NotConfirmed { at: at() },
        Some("limited") => Answer::Nothing,
        // The answer is about the whole request: nothing was published.
        None if answer["error"] != Value::Null => Answer::NotCounted,
        _ => panic!("the gateway refused {event}: {answer}"),
    }
}
