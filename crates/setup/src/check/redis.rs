//! Checks that Redis answers and that the account has its rights. Warns if data can get lost or take too much memory.

use tallyd_base::config::Config;
use tallyd_base::servers::Servers;
use tallyd_redis::Cache;
use tallyd_redis::keys::{KindNames, fields_beside};
use tallyd_redis::probe::{Persistence, Scripts};
use tallyd_redis::space::{FIELDS_MEAN_MAX, LISTPACK_ENTRIES, LISTPACK_FIELDS, field_bytes, fields_most, suited_bits};

use tallyd_base::cli::check::{Check, Status, What, clock};

const CHECKED_BUCKETS: u32 = 4_096;

/// With more partitions than this, the partitions' marks take a large part of a bucket.
const MARKS_MAX: u16 = 32;

/// The bytes that a mark takes in a compact bucket, as MEMORY USAGE reports them.
const MARK_BYTES: u64 = 18;

const LISTPACK_VALUE: &str = "hash-max-listpack-value";

const VERSION_MIN: u32 = 7;

const AWAY: &str = "start Redis, or correct [redis] url; meanwhile the daemon still writes events to MySQL";

const SILENT: &str = "look for slow commands (SLOWLOG GET), and check again";

const REFUSED: &str = "correct [redis], for example the password; if the account does not exist, create it: run accounts.sh of `tallyd init`, or ACL SETUSER as docs/operations/security.md says";

pub(super) async fn check(config: &Config, servers: &Servers) -> Vec<Check> {
    let cache = &servers.cache;
    if let Err(error) = cache.ping().await {
        return vec![Check::failed(What::RedisAnswers, error, AWAY, REFUSED)];
    }
    let found = match cache.master().await {
        Some(master) => format!("{master} is the master {}, according to its sentinels", config.redis.sentinel_master),
        None => config.redis.url.to_string(),
    };
    let mut checks = vec![Check::ok(What::RedisAnswers, found)];
    checks.push(match cache.versions().await {
        Ok(versions) => version(&versions),
        Err(error) => Check::unanswered(What::RedisVersion, error, SILENT),
    });
    let scripts = scripts(config, cache).await;
    if scripts.status == Status::Error && !scripts.passes {
        // Without scripts, no other check is possible.
        checks.push(scripts);
        return checks;
    }
    checks.push(scripts);
    checks.push(match cache.missing_rights(config.filter.is_on()).await {
        Ok(missing) if missing.is_empty() => {
            Check::ok(What::RedisPermissions, "the account has all rights that the daemon needs")
        }
        Ok(missing) => {
            let found = format!("the account has no right to run {}", missing.join(", "));
            Check::error(What::RedisPermissions, found, "run ACL SETUSER, as docs/operations/security.md says")
        }
        Err(error) => {
            Check::failed(What::RedisPermissions, error, SILENT, "run ACL SETUSER, as docs/operations/security.md says")
        }
    });
    memory(cache, &mut checks).await;
    let before = tallyd_base::runtime::clock::now();
    checks.push(match cache.clocks().await {
        Ok((slowest, fastest)) => {
            let after = tallyd_base::runtime::clock::now();
            let [slow, fast] = [slowest, fastest].map(|time| clock(What::RedisClock, time, before, after));
            if slow.status == Status::Warning { slow } else { fast }
        }
        Err(error) => Check::unanswered(What::RedisClock, error, SILENT),
    });
    if cache.is_packed() {
        checks.push(listpack(config, cache).await);
        checks.extend(buckets(config, servers).await);
    }
    checks
}

async fn scripts(config: &Config, cache: &Cache) -> Check {
    let also = cache.also(&config.redis, &config.metrics).ok().flatten();
    match cache.scripts().await {
        Ok(Scripts::All) => Check::ok(What::RedisScripts, "Redis runs scripts"),
        Ok(Scripts::OneSlot) if !cache.is_packed() || also.is_some_and(|also| !also.is_packed()) => Check::error(
            What::RedisScripts,
            "several shards are behind one address, which is only possible with the layout packed",
            "use the layout packed, as docs/layouts.md says",
        ),
        Ok(Scripts::OneSlot) => Check::ok(
            What::RedisScripts,
            "several shards are behind one address, so tallyd sends one bucket with each script",
        ),
        Ok(Scripts::LiteralKeys) => Check::error(
            What::RedisScripts,
            "the proxy of Redis refuses scripts whose keys are not written as KEYS[1]",
            "set script_check_enable = 0 (Alibaba Cloud), or use an address without this proxy",
        ),
        Ok(Scripts::None) => Check::error(
            What::RedisScripts,
            "Redis runs no Lua scripts: it does not know EVAL",
            "use a Redis or Valkey with Lua",
        ),
        Err(error) => Check::unanswered(What::RedisScripts, error, SILENT),
    }
}

fn version(versions: &[String]) -> Check {
    let major = |version: &String| version.split([' ', '.']).nth(1).and_then(|major| major.parse::<u32>().ok());
    let listed = versions.join(", ");
    match versions.iter().filter_map(major).min() {
        None => Check::unknown(What::RedisVersion, "Redis does not report its version"),
        Some(VERSION_MIN..) => Check::ok(What::RedisVersion, listed),
        Some(_) => Check::error(
            What::RedisVersion,
            format!("Redis {listed} is too old"),
            "use Redis 7 or later, or Valkey 8 or later",
        ),
    }
}

/// Checks that Redis neither evicts counters and boards nor loses them at a restart.
async fn memory(cache: &Cache, checks: &mut Vec<Check>) {
    match cache.eviction_policies().await {
        Err(error) => checks.push(Check::unanswered(What::RedisEviction, error, SILENT)),
        Ok(policies) => {
            let all: Vec<&str> =
                policies.iter().map(String::as_str).filter(|policy| policy.starts_with("allkeys-")).collect();
            checks.push(if all.is_empty() {
                Check::ok(What::RedisEviction, "Redis does not evict counters and boards")
            } else {
                Check::warning(
                    What::RedisEviction,
                    format!("maxmemory-policy is {}, which evicts counters and boards when memory is short", all.join(", ")),
                    "CONFIG SET maxmemory-policy noeviction, or a policy that begins with volatile-, and set it in the server's configuration",
                )
            });
        }
    }
    checks.push(match cache.persistence().await {
        Ok(Persistence::Log) => Check::ok(What::RedisPersistence, "appendonly is on"),
        Ok(Persistence::Snapshots) => Check::ok(What::RedisPersistence, "Redis saves snapshots"),
        Ok(Persistence::None) => Check::warning(
            What::RedisPersistence,
            "Redis saves nothing to disk: after a restart tallyd loads counters again, and boards fall back to their last snapshot",
            "CONFIG SET appendonly yes, and set it in the server's configuration",
        ),
        Ok(Persistence::Unknown) => Check::unknown(What::RedisPersistence, "the account has no right to run CONFIG GET"),
        Err(error) => Check::unanswered(What::RedisPersistence, error, SILENT),
    });
}

/// If a bucket exceeds the server's limits for listpacks, Redis permanently needs up to ten times as much memory for
/// this bucket.
async fn listpack(config: &Config, cache: &Cache) -> Check {
    let asked = async { anyhow::Ok((cache.setting(LISTPACK_ENTRIES).await?, cache.setting(LISTPACK_VALUE).await?)) };
    let (entries, bytes) = match asked.await {
        Ok((Some(entries), Some(bytes))) => (entries, bytes),
        Ok(_) => return Check::unknown(What::RedisListpack, "the account has no right to run CONFIG GET"),
        Err(error) => return Check::unanswered(What::RedisListpack, error, SILENT),
    };
    let likely = fields_most(cache.keys.layout(), FIELDS_MEAN_MAX, config.partitions());
    let longest = field_bytes(&config.metrics.codes());
    if entries < likely {
        return Check::warning(
            What::RedisListpack,
            format!(
                "{LISTPACK_ENTRIES} is {entries}, but if buckets have {FIELDS_MEAN_MAX} targets on average, some buckets have {likely} fields"
            ),
            "CONFIG SET hash-max-listpack-entries 512, and set it in the server's configuration",
        );
    }
    if bytes < longest {
        return Check::warning(
            What::RedisListpack,
            format!("{LISTPACK_VALUE} is {bytes}, but a target with counters of seven digits takes {longest} bytes"),
            format!(
                "CONFIG SET {LISTPACK_VALUE} {longest}, and set it in the server's configuration; or use low codes in [metrics]"
            ),
        );
    }
    Check::ok(What::RedisListpack, format!("{LISTPACK_ENTRIES} is {entries}, {LISTPACK_VALUE} is {bytes}"))
}

async fn buckets(config: &Config, Servers { store, cache, .. }: &Servers) -> Vec<Check> {
    let (mut checks, mut largest) = (Vec::new(), 0);
    let limit = cache.listpack_fields().await.unwrap_or(LISTPACK_FIELDS);
    let bits = config.redis.bucket_bits;
    let raise = || format!("raise bucket_bits, which is {bits}, as docs/layouts.md says");
    for (code, kind) in KindNames::new(&config.kinds).all() {
        // If MySQL does not answer, the checks of MySQL report that.
        let targets = store.estimate_targets(code).await.ok().flatten().unwrap_or(0);
        if suited_bits(targets) > bits {
            let found = format!(
                "the kind {kind} has about {targets} targets, which need bucket_bits = {}",
                suited_bits(targets)
            );
            checks.push(Check::warning(What::RedisBuckets, found, raise()));
        }
        let most = match cache.largest_bucket(kind, 0..cache.keys.buckets().min(CHECKED_BUCKETS)).await {
            Ok(most) => most,
            Err(error) => return vec![Check::unanswered(What::RedisBuckets, error, SILENT)],
        };
        largest = most.max(largest);
        if most * 10 > limit * 8 {
            let found = format!(
                "a bucket of the kind {kind} has {most} of at most {limit} fields: with more fields it takes ten times the memory"
            );
            checks.push(Check::warning(What::RedisBuckets, found, raise()));
        }
    }
    let partitions = config.partitions();
    if partitions > MARKS_MAX {
        let found = format!(
            "each bucket has a mark for each of the {partitions} partitions: the marks of a bucket take about {} bytes",
            fields_beside(partitions) * MARK_BYTES
        );
        let fix = "use fewer partitions, or plan more memory for Redis: docs/scaling.md";
        checks.push(Check::warning(What::RedisBuckets, found, fix));
    }
    if checks.is_empty() {
        checks.push(Check::ok(What::RedisBuckets, format!("the largest bucket has {largest} of {limit} fields")));
    }
    checks
}
