//! Tests `tallyd gateway`, which accepts events and answers reads over HTTP.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod document;
mod events;
mod faults;
mod likes;
mod limits;
mod reads;

use tallyd_base::runtime::clock::now;

use tallyd_testkit as common;

/// The daemon counts likes and two other metrics.
const PLAIN: &str = "[kinds]\nvideo = 1\npost = 2\n[metrics]\nlike = 1\nview = 2\nunread = 3\n\
    [[rule]]\nmetric = \"unread\"\nsettable = true\n";

fn count(id: u64, event_id: &str) -> String {
    let at = now();
    format!(
        r#"{{"type":"count","kind":"video","target_id":"{id}","metric":"view","delta":1,"event_id":"{event_id}","at":{at}}}"#
    )
}

fn like(word: &str, id: u64, user: u64) -> String {
    format!(r#"{{"type":"{word}","kind":"video","target_id":"{id}","user_id":{user}}}"#)
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
}
