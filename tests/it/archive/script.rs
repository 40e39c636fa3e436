//! Tests the Lua script with which API servers change boards.

use redis::AsyncCommands;

use super::{Stage, WEEKLY, week};

#[tokio::test]
async fn the_script_adds_to_all_current_zsets_and_removes_what_falls_to_zero() {
    let mut stage = Stage::new("archive_script", WEEKLY).await;
    let keys = ["2026-11-21", "2026-W47", "2026-11", "total"].map(|period| stage.live(&week(period)));
    let script = redis::Script::new(include_str!("../../../lua/board.lua"));
    let mut add = async |keys: &[String], delta: &str| -> Vec<String> {
        let mut call = script.prepare_invoke();
        for key in keys {
            call.key(key);
        }
        call.arg("m").arg(delta).invoke_async(&mut stage.redis).await.unwrap()
    };
    assert_eq!(add(&keys, "2").await, ["2", "2", "2", "2"]);
    assert_eq!(add(&keys[2..], "0.5").await, ["2.5", "2.5"]);
    assert_eq!(add(&keys, "-2").await, ["0", "0", "0.5", "0.5"]);
    assert_eq!(add(&keys[..1], "-1").await, ["0"]);
    let mut left = Vec::new();
    for key in &keys {
        left.push(stage.redis.zscore::<_, _, Option<f64>>(key, "m").await.unwrap());
    }
    assert_eq!(left, [None, None, Some(0.5), Some(0.5)]);
}
