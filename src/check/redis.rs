//! Redis: is it there, may the account use it, and what could be lost or become large.

use crate::cache::Cache;
use crate::cache::keys::KindNames;
use crate::cache::probe::Persistence;
use crate::cache::space::{LISTPACK_FIELDS, fields_most};
use crate::config::Config;
use crate::layouts::FIELDS_MEAN_MAX;
use crate::model::Micros;

use super::{Check, What, clock};

/// Buckets of each kind whose fields are counted.
const CHECKED_BUCKETS: u32 = 4_096;

/// The first version that tallyd is tested with.
const VERSION_MIN: u32 = 7;

const AWAY: &str = "start Redis, or mend [redis] url; events go on into MySQL meanwhile";

/// What to do about a server that answered before.
const SILENT: &str = "see what Redis has to do (SLOWLOG GET), and check again";

const REFUSED: &str =
    "make the account and give it its rights, as docs/operations.md says: ACL SETUSER; or mend [redis]";

pub(super) async fn check(config: &Config, cache: &Cache) -> Vec<Check> {
    if let Err(error) = cache.ping().await {
        return vec![Check::failed(What::RedisAnswers, &error.into(), AWAY, REFUSED)];
    }
    let found = match cache.master().await {
        Some(master) => format!("{master} is the master {}, as its sentinels say", config.redis.sentinel_master),
        None => config.redis.url.to_string(),
    };
    let mut checks = vec![Check::ok(What::RedisAnswers, found)];
    checks.push(match cache.versions().await {
        Ok(versions) => version(&versions),
        Err(error) => Check::untold(What::RedisVersion, &error.into(), SILENT),
    });
    checks.push(match cache.missing_rights(config.filter.is_on()).await {
        Ok(missing) if missing.is_empty() => {
            Check::ok(What::RedisPermissions, "the account may do what the daemon does")
        }
        Ok(missing) => {
            let found = format!("the account may not run {}", missing.join(", "));
            Check::error(What::RedisPermissions, found, "ACL SETUSER, as docs/operations.md says")
        }
        Err(error) => {
            Check::failed(What::RedisPermissions, &error.into(), SILENT, "ACL SETUSER, as docs/operations.md says")
        }
    });
    memory(cache, &mut checks).await;
    let before = Micros::now();
    checks.push(match cache.clocks().await {
        Ok((slowest, fastest)) => {
            let after = Micros::now();
            let [slow, fast] = [slowest, fastest].map(|told| clock(What::RedisClock, told, before, after));
            if slow.status == super::Status::Warning { slow } else { fast }
        }
        Err(error) => Check::untold(What::RedisClock, &error.into(), SILENT),
    });
    buckets(config, cache, &mut checks).await;
    checks
}

fn version(versions: &[String]) -> Check {
    let major = |version: &String| version.split([' ', '.']).nth(1).and_then(|major| major.parse::<u32>().ok());
    let told = versions.join(", ");
    match versions.iter().filter_map(major).min() {
        None => Check::unknown(What::RedisVersion, "it doesn't tell"),
        Some(VERSION_MIN..) => Check::ok(What::RedisVersion, told),
        Some(_) => {
            Check::error(What::RedisVersion, format!("{told} is too old"), "use Redis 7 or later, or Valkey 8 or later")
        }
    }
}

/// What may be taken away, or lost with a restart.
async fn memory(cache: &Cache, checks: &mut Vec<Check>) {
    match cache.eviction_policies().await {
        Err(error) => checks.push(Check::untold(What::RedisEviction, &error.into(), SILENT)),
        Ok(policies) => {
            let all: Vec<&str> =
                policies.iter().map(String::as_str).filter(|policy| policy.starts_with("allkeys-")).collect();
            checks.push(if all.is_empty() {
                Check::ok(What::RedisEviction, "it takes no counters and boards away")
            } else {
                Check::warning(
                    What::RedisEviction,
                    format!("maxmemory-policy is {}, which takes counters and boards away when memory is short", all.join(", ")),
                    "CONFIG SET maxmemory-policy noeviction, or one that begins with volatile-; and in the server's configuration",
                )
            });
        }
    }
    checks.push(match cache.persistence().await {
        Ok(Persistence::Log) => Check::ok(What::RedisPersistence, "appendonly is on"),
        Ok(Persistence::Snapshots) => Check::ok(What::RedisPersistence, "it saves itself from time to time"),
        Ok(Persistence::None) => Check::warning(
            What::RedisPersistence,
            "it keeps nothing: after a restart counters are loaded again, and boards go back to their last snapshot",
            "CONFIG SET appendonly yes, and in the server's configuration",
        ),
        Ok(Persistence::Unknown) => Check::unknown(What::RedisPersistence, "the account may not ask (CONFIG GET)"),
        Err(error) => Check::untold(What::RedisPersistence, &error.into(), SILENT),
    });
}

/// Past the server's limit a bucket takes ten times the room.
async fn buckets(config: &Config, cache: &Cache, checks: &mut Vec<Check>) {
    if !cache.is_packed() {
        return;
    }
    let told = match cache.listpack_fields_told().await {
        Ok(told) => told,
        Err(error) => {
            checks.push(Check::untold(What::RedisListpack, &error.into(), SILENT));
            return;
        }
    };
    let limit = told.unwrap_or(LISTPACK_FIELDS);
    let likely = fields_most(cache.keys.layout(), FIELDS_MEAN_MAX, config.amqp.partitions);
    checks.push(match told {
        None => Check::unknown(What::RedisListpack, "the account may not ask (CONFIG GET)"),
        Some(limit) if limit < likely => Check::warning(
            What::RedisListpack,
            format!(
                "hash-max-listpack-entries is {limit}: a bucket holds up to {FIELDS_MEAN_MAX} targets on average, and now and then {likely}"
            ),
            "CONFIG SET hash-max-listpack-entries 512, and in the server's configuration",
        ),
        Some(limit) => Check::ok(What::RedisListpack, format!("hash-max-listpack-entries is {limit}")),
    });
    let mut largest = 0;
    for (_, kind) in KindNames::new(&config.kinds).all() {
        let most = match cache.largest_bucket(kind, 0..cache.keys.buckets().min(CHECKED_BUCKETS)).await {
            Ok(most) => most,
            Err(error) => {
                checks.push(Check::untold(What::RedisBuckets, &error.into(), SILENT));
                return;
            }
        };
        largest = most.max(largest);
        if most * 10 > limit * 8 {
            checks.push(Check::warning(
                What::RedisBuckets,
                format!(
                    "a bucket of the kind {kind} has {most} of {limit} fields, past which it takes ten times the room"
                ),
                format!("raise bucket_bits, which is {}, as docs/layouts.md says", config.redis.bucket_bits),
            ));
        }
    }
    if largest * 10 <= limit * 8 {
        checks.push(Check::ok(What::RedisBuckets, format!("the largest has {largest} of {limit} fields")));
    }
}
