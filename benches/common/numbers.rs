//! Reads the like count of each target from Redis, without the daemon's code.

use std::collections::BTreeMap;

use anyhow::Result;
use redis::aio::MultiplexedConnection;
use tallyd_redis::Cache;
use tallyd_redis::keys::NO_TARGET;

use super::world::World;

/// Number of buckets that one pipeline reads.
const BUCKETS: usize = 256;

/// Returns the like counts of all targets of the kind `video` that are not zero.
pub async fn likes_in_redis(world: &World, redis: &mut MultiplexedConnection) -> Result<BTreeMap<u64, i64>> {
    let keys = Cache::new(&world.config.redis, &world.config.metrics)?.keys;
    let buckets: Vec<u32> = (0..keys.buckets()).collect();
    let mut likes = BTreeMap::new();
    for some in buckets.chunks(BUCKETS) {
        let mut pipeline = redis::pipe();
        for bucket in some {
            pipeline.cmd("HGETALL").arg(keys.counters("video", *bucket));
        }
        let read: Vec<BTreeMap<String, String>> = pipeline.query_async(redis).await?;
        for (field, value) in read.iter().flatten().filter(|(field, _)| !field.starts_with(NO_TARGET)) {
            // The like count is the first of a target's counters.
            let number = value.split(',').next().unwrap_or_default();
            likes.insert(field.parse()?, number.parse()?);
        }
    }
    likes.retain(|_, likes| *likes != 0);
    Ok(likes)
}
