//! `tallyd check-config`: the configuration, and what is wrong with the servers that it names.

use std::io::Write;

use anyhow::Result;

use super::EXIT_DONE;
use crate::app::Servers;
use crate::cache::keys::KindNames;
use crate::cache::space::{LISTPACK_FIELDS, fields_most};
use crate::config::{Config, ConfigError};
use crate::job::Refused;
use crate::layouts::FIELDS_MEAN_MAX;
use crate::model::Micros;
use crate::recounter::Recounter;
use crate::registry;
use crate::runtime::schedule;
use crate::store::Store;

/// Buckets of each kind whose fields are counted.
const CHECKED_BUCKETS: u32 = 4_096;

pub(super) async fn check_config(config: &Config, offline: bool) -> Result<u8> {
    let mut out = std::io::stdout();
    let servers = Servers::new(config)?;
    let broker = &servers.broker;
    writeln!(out, "RabbitMQ  {} (vhost \"{}\"), partitions: {}", config.amqp.url, broker.vhost(), broker.partitions())?;
    writeln!(out, "MySQL     {}", config.mysql.url)?;
    writeln!(out, "Redis     {}", config.redis.url)?;
    for (what, cron) in [
        ("changed", config.reconcile.changed_cron.as_str()),
        ("full", &config.reconcile.full_cron),
        ("scrub", &config.reconcile.scrub_cron),
        ("archive", &config.archive.cron),
        ("filters", config.filter.schedule()),
    ] {
        let next = match schedule::parse(cron) {
            Ok(cron) => schedule::next_runs(&cron, Micros::now(), 3).join(", "),
            Err(_) => "never".to_owned(),
        };
        writeln!(out, "{what:<9} {next}")?;
    }
    for board in &config.boards {
        writeln!(out, "board     {} by {:?}, {}", board.name, board.period, board.time_zone)?;
    }
    for recount in &config.recounts {
        let next = match schedule::parse(&recount.cron) {
            Ok(cron) => schedule::next_runs(&cron, Micros::now(), 3).join(", "),
            Err(_) => "only by hand".to_owned(),
        };
        writeln!(out, "recount   {} {next}", recount.name())?;
    }
    if !offline {
        check_servers(config, &servers, &mut out).await?;
    }
    writeln!(out, "the configuration is valid")?;
    Ok(EXIT_DONE)
}

async fn check_servers(config: &Config, servers: &Servers, out: &mut impl Write) -> Result<()> {
    servers.broker.connect("check-config").await?;
    writeln!(out, "RabbitMQ  answers")?;
    servers.check_schema().await?;
    for change in registry::compare(&servers.store, config).await? {
        writeln!(out, "MySQL     {change}: a daemon notes it when it starts or reloads")?;
    }
    let (version, warnings) = servers.store.durability().await?;
    writeln!(out, "MySQL     answers: {version}, schema up to date")?;
    for (name, store) in Store::replicas(&config.mysql, &config.reconcile.replicas).map_err(anyhow::Error::msg)? {
        let error = store.stamp_seen(0).await.err();
        store.close().await;
        match error {
            None => writeln!(out, "MySQL     the replica {name} answers")?,
            Some(error) => return Err(anyhow::Error::from(error).context(format!("the replica {name}"))),
        }
    }
    for warning in warnings {
        writeln!(out, "MySQL     warning: {warning}")?;
    }
    check_recounts(config, servers, out).await?;
    servers.cache.ping().await?;
    writeln!(out, "Redis     answers")?;
    for policy in servers.cache.eviction_policies().await?.iter().filter(|policy| policy.starts_with("allkeys-")) {
        writeln!(
            out,
            "Redis     warning: maxmemory-policy is {policy}, which takes counters and boards away when memory is short; set \
             noeviction, or one that begins with volatile-"
        )?;
    }
    check_buckets(config, servers, out).await
}

/// A query that can't be run is a mistake in the configuration.
async fn check_recounts(config: &Config, servers: &Servers, out: &mut impl Write) -> Result<()> {
    let mut problems = Vec::new();
    for recount in &config.recounts {
        let recounter = Recounter::new(config, recount, servers.store.clone(), servers.broker.clone())?;
        match recounter.explain().await {
            Ok(lines) => {
                for line in lines {
                    writeln!(out, "recount   {}: {line}", recount.name())?;
                }
            }
            Err(error) if error.is::<Refused>() => problems.push(error.to_string()),
            Err(error) => return Err(error),
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems).into()) }
}

/// Past the server's limit a bucket takes ten times the room.
async fn check_buckets(config: &Config, servers: &Servers, out: &mut impl Write) -> Result<()> {
    let Servers { cache, .. } = servers;
    if !cache.is_packed() {
        return Ok(());
    }
    let told = cache.listpack_fields().await;
    let limit = told.unwrap_or(LISTPACK_FIELDS);
    let likely = fields_most(cache.keys.layout(), FIELDS_MEAN_MAX, config.amqp.partitions);
    if limit < likely {
        writeln!(
            out,
            "Redis     warning: hash-max-listpack-entries is {limit}: a bucket holds up to {FIELDS_MEAN_MAX} targets on average, and now \
             and then {likely}; \
             set 512"
        )?;
    }
    for (_, kind) in KindNames::new(&config.kinds).all() {
        let most = cache.largest_bucket(kind, 0..cache.keys.buckets().min(CHECKED_BUCKETS)).await?;
        if most * 10 > limit * 8 {
            let bits = config.redis.bucket_bits;
            writeln!(
                out,
                "Redis     warning: a bucket of the kind {kind} has {most} of {limit} fields, past which it takes ten times the room: raise \
                 bucket_bits, which is {bits}, as docs/layouts.md says"
            )?;
        }
    }
    Ok(())
}
