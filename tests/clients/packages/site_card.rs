//! Writes the site card, until daemons write it.

use redis::AsyncCommands;
use serde_json::json;

use crate::common::World;

/// Writes the site card that a daemon of this world will write at its start. Then delete this file.
pub async fn write_for_now(world: &World) {
    let config = &world.config;
    let card = json!({
        "version": 1, "number": 1, "layout": {"form": "packed", "bucket_bits": config.redis.bucket_bits},
        "kinds": config.kinds, "metrics": config.metrics, "api": [], "settable": [], "below_zero": [],
        "exchange": world.broker.exchange(), "partition_by": "user",
    });
    let key = format!("{}c:site", config.redis.key_prefix);
    let () = world.redis().await.set(key, card.to_string()).await.unwrap();
}
