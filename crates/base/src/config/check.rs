//! Finds errors that the types can't exclude: values out of bounds, and keys whose values don't fit each other.

use std::collections::BTreeMap;

use jiff::tz::TimeZone;

use super::key::Key;
use super::password::set_password;
use super::problem::Faults;
use super::{Also, Config, Mysql, Redis, Scheduled, ServerUrl, admin, board, filter, map, recount, retired, rule, tls};
use crate::runtime::cron;
use tallyd_redis::layout::{Form, Layout};

/// `GET /v1/counters` of the gateway has the metrics' names beside these fields.
const FIELDS_OF_ANSWERS: [&str; 2] = ["id", "source"];

pub(super) fn problems(config: &Config, found: &mut Faults) {
    urls(config, found);
    filter::problems(config, found);
    tls::problems(config, found);
    bounds(config, found);
    schedules(config, found);
    names("kinds", &config.kinds.0, &[], found);
    names("metrics", &config.metrics.0, &FIELDS_OF_ANSWERS, found);
    retired::problems(&config.retired, &config.kinds, &config.metrics, found);
    admin::problems(&config.admin, found);
    rule::problems(config, found);
    recount::problems(config, found);
    map::problems(config, found);
    board::problems(config, found);
}

fn urls(config: &Config, found: &mut Faults) {
    check_url(&"amqp".into(), "amqp", &config.amqp.url, &["amqp", "amqps"], found);
    check_url(&"mysql".into(), "mysql", &config.mysql.url, &MYSQL_SCHEMES, found);
    check_url(&"redis".into(), "redis", &config.redis.url, &["redis", "rediss"], found);
    if let Ok(parts) = config.amqp.url.parts() {
        if parts.username().is_empty() && !tls::is_external(&config.amqp.url) {
            // Without a user, the library would log in as guest.
            found.at("amqp.url", "[amqp] url has no user: write amqp://user@host:5672/%2f");
        }
        if matches!(parts.path(), "" | "/") {
            let wish = "add the vhost, for example %2f for the default vhost: amqp://user@host:5672/%2f";
            let text =
                format!("[amqp] url ends in \"{}\", which means the vhost with the empty name: {wish}", parts.path());
            found.at("amqp.url", text);
        }
    }
    for (section, name, url, nodes) in [
        ("amqp", "seeds", &config.amqp.url, &config.amqp.seeds),
        ("reconcile", "replicas", &config.mysql.url, &config.reconcile.replicas),
        ("redis", "seeds", &config.redis.url, &config.redis.seeds),
        ("redis", "sentinels", &config.redis.url, &config.redis.sentinels),
    ] {
        for (place, node) in nodes.iter().enumerate() {
            if let Err(error) = url.at(node) {
                let key = Key::from(section).then(name).then(place);
                found.at(key, format!("[{section}] {name}: \"{node}\" {error}"));
            }
        }
    }
    cluster(&config.redis, found);
    sentinel(&config.redis, found);
    layouts(&config.redis, config, found);
    check_database(&"mysql".into(), "mysql", &config.mysql.url, found);
}

const MYSQL_SCHEMES: [&str; 2] = ["mysql", "mariadb"];

fn check_url(block: &Key, section: &str, url: &ServerUrl, schemes: &[&str], found: &mut Faults) {
    let problem = match url.parts() {
        Err(error) => error,
        Ok(parts) if !schemes.contains(&parts.scheme()) => {
            format!("begins with {}://, allowed is {}://", parts.scheme(), schemes.join(":// or "))
        }
        Ok(parts) if parts.host_str().is_none_or(str::is_empty) => {
            "has no host: write the host after the user and @".to_owned()
        }
        // This text is most likely the rest of a password, so it must not be used or shown as another part of the
        // address.
        Ok(parts) if parts.fragment().is_some() || parts.path().contains('@') => {
            "has a # or a second @: in a password write them as %23 and %40".to_owned()
        }
        Ok(_) => return,
    };
    found.at(block.then("url"), format!("[{section}] url {problem}"));
}

fn check_database(block: &Key, section: &str, url: &ServerUrl, found: &mut Faults) {
    if url.parts().is_ok_and(|parts| parts.path().trim_start_matches('/').is_empty()) {
        found.at(block.then("url"), format!("[{section}] url has no database: write mysql://user@host:3306/DATABASE"));
    }
}

/// Reads the password and the certificates of a further MySQL server, and finds the problems of its settings.
pub fn complete_mysql(block: &Key, section: &str, mysql: &mut Mysql, found: &mut Faults) {
    check_url(block, section, &mysql.url, &MYSQL_SCHEMES, found);
    check_database(block, section, &mysql.url, found);
    tls::mysql_problems(block, section, mysql, found);
    set_password(block, section, &mut mysql.url, &mysql.login, found);
    mysql.login.tls = tls::read_files(block, section, &mysql.login, found);
}

fn cluster(redis: &Redis, found: &mut Faults) {
    if !redis.cluster && !redis.seeds.is_empty() {
        let text = "[redis] seeds are only for a Redis Cluster: set cluster = true, or remove seeds";
        found.between(&["redis.seeds".into(), "redis.cluster".into()], text);
    }
    if redis.cluster && redis.url.parts().is_ok_and(|parts| !matches!(parts.path(), "" | "/" | "/0")) {
        found.at("redis.url", "[redis] url has a database number, but a Redis Cluster has only 0: remove the number");
    }
}

fn sentinel(redis: &Redis, found: &mut Faults) {
    for (place, sentinel) in redis.sentinels.iter().enumerate() {
        if redis.sentinels.iter().take(place).any(|earlier| earlier == sentinel) {
            let text =
                format!("[redis] sentinels: \"{sentinel}\" is listed twice and would have two votes: remove one");
            found.at(Key::from("redis.sentinels").then(place), text);
        }
    }
    if redis.sentinels.is_empty() {
        return;
    }
    if redis.cluster {
        let text = "[redis] sentinels can't be used with a Redis Cluster, whose nodes watch each other: remove sentinels, or \
                    set cluster = false";
        found.between(&["redis.sentinels".into(), "redis.cluster".into()], text);
    }
    if redis.sentinel_master.is_empty() {
        found.at(
            "redis.sentinel_master",
            "[redis] sentinel_master is empty: write the name in `sentinel monitor NAME ...`",
        );
    }
}

fn layouts(redis: &Redis, config: &Config, found: &mut Faults) {
    let kinds: Vec<&str> = config.kinds.0.keys().map(String::as_str).collect();
    let metrics: Vec<&str> = config.metrics.0.keys().map(String::as_str).collect();
    let first = redis.layout();
    let also = redis.also.as_ref().map(Also::layout);
    if let (Ok(first), Some(Ok(second))) = (&first, &also)
        && first.overlaps(second, &kinds, &metrics)
    {
        found.at(
            "redis.also",
            "[redis.also] shares keys with [redis]: remove it, or give it another layout, counter_key or bucket_bits",
        );
    }
    let all = std::iter::once(("redis", first)).chain(also.map(|also| ("redis.also", also)));
    for (section, layout) in all {
        let keys = ["counter_key", "layout"].map(|name| Key::from(section).then(name));
        let problem = match layout {
            Ok(layout) => layout_problem(&layout, redis, &kinds, &metrics),
            Err(error) => Some(format!("counter_key {error}")),
        };
        if let Some(problem) = problem {
            found.between(&keys, format!("[{section}] {problem}"));
        }
    }
}

fn layout_problem(layout: &Layout, redis: &Redis, kinds: &[&str], metrics: &[&str]) -> Option<String> {
    let template = layout.template.as_ref()?;
    let lacks = |what: &str, of: &str| {
        Some(format!("counter_key lacks {{{what}}}: [{of}] has several names, and they would share keys"))
    };
    let mut names = layout.key_names(kinds, metrics);
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    match layout.form {
        _ if redis.cluster => Some(format!(
            "layout is {layout}: a Redis Cluster needs the layout packed, which keeps each bucket in one slot"
        )),
        _ if kinds.len() > 1 && !template.has_kind() => lacks("kind", "kinds"),
        Form::String if metrics.len() > 1 && !template.has_metric() => lacks("metric", "metrics"),
        Form::Entity if template.has_metric() => Some(
            "counter_key has {metric}, but with layout = \"entity\" metrics are fields: remove {metric}".to_owned(),
        ),
        _ if names.len() < all => Some(
            "counter_key gives the same key to two pairs of kind and metric: put a : between {kind} and {metric}"
                .to_owned(),
        ),
        _ => None,
    }
}

fn bounds(config: &Config, found: &mut Faults) {
    let two_batches = config.consumer.batch_events_max.saturating_mul(2);
    if usize::from(config.amqp.prefetch) < two_batches {
        let text = format!(
            "[amqp] prefetch is {}, but must be at least two batches ([consumer] batch_events_max = {}): set it to {two_batches} or more",
            config.amqp.prefetch, config.consumer.batch_events_max
        );
        found.between(&["amqp.prefetch".into(), "consumer.batch_events_max".into()], text);
    }
    let (skew, overlap) = (config.reconcile.skew(), config.reconcile.overlap.0);
    if skew > overlap {
        let keys = ["reconcile.clock_skew_max".into(), "reconcile.overlap".into()];
        found.between(&keys, "[reconcile] clock_skew_max must not be longer than overlap");
    }
    if config.amqp.prefix.is_empty() || config.amqp.prefix.len() > 100 {
        found.at("amqp.prefix", "[amqp] prefix must have 1 to 100 characters");
    }
    if config.redis.key_prefix.contains(['{', '}']) {
        let text = "[redis] key_prefix must not have braces, because they select the slot on a Redis Cluster";
        found.at("redis.key_prefix", text);
    }
}

fn schedules(config: &Config, found: &mut Faults) {
    for Scheduled { key, cron, .. } in config.schedules() {
        if !cron.is_empty()
            && let Err(error) = cron::parse(cron)
        {
            let key = Key::from(key);
            found.at(key.clone(), format!("{key} is \"{cron}\": {error:#}"));
        }
    }
    let zone = &config.daemon.time_zone;
    if let Err(error) = TimeZone::get(zone) {
        let text =
            format!("[daemon] time_zone is \"{zone}\": write an IANA name, for example Europe/Berlin or UTC ({error})");
        found.at("daemon.time_zone", text);
    }
}

pub fn is_name(name: &str) -> bool {
    (1..=32).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_'))
}

fn names(section: &str, codes: &BTreeMap<String, u8>, taken: &[&str], found: &mut Faults) {
    if codes.is_empty() {
        found.at(section, format!("[{section}] is empty: add a name with a code"));
    }
    let mut owners: BTreeMap<u8, &str> = BTreeMap::new();
    for (name, code) in codes {
        let key = Key::from(section).then(name);
        if !is_name(name) {
            found.at(
                key.clone(),
                format!("[{section}] {name}: a name must have 1 to 32 characters of a-z, 0-9, - and _"),
            );
        }
        if taken.contains(&name.as_str()) {
            let problem =
                format!("[{section}] {name}: the gateway's answers have a field of this name: choose another");
            found.at(key.clone(), problem);
        }
        if let Some(other) = owners.insert(*code, name) {
            found.at(key, format!("[{section}] {other} and {name} have the same code {code}: change one code"));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::config) fn found(text: &str) -> Vec<String> {
        match super::super::parse(text, "config.toml", []) {
            Ok(config) => Faults::texts(|found| problems(&config, found)),
            Err(error) => error.0,
        }
    }

    #[test]
    fn the_defaults_are_fine() {
        assert_eq!(found(""), Vec::<String>::new());
    }

    #[test]
    fn nodes_and_sentinels_that_do_not_fit_are_reported() {
        for (text, expected) in [
            ("[amqp]\nseeds = [\"amqp://h:5672\"]", "[amqp] seeds: \"amqp://h:5672\" is not HOST:PORT"),
            ("[redis]\nsentinels = [\"h\"]", "[redis] sentinels: \"h\" is not HOST:PORT"),
            ("[redis]\nsentinels = [\"h:1\"]\ncluster = true", "remove sentinels, or set cluster = false"),
            ("[redis]\nsentinels = [\"h:1\"]\nsentinel_master = \"\"", "the name in `sentinel monitor NAME ...`"),
        ] {
            let problems = found(text);
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{text}: {problems:?}");
        }
        assert_eq!(
            found("[amqp]\nseeds = [\"[fd00::1]:5672\"]\n[redis]\nsentinels = [\"h:1\", \"i:1\"]"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn what_does_not_fit_is_reported() {
        for (text, expected) in [
            ("[amqp]\nurl = \"amqp://u@h/\"", "the vhost with the empty name"),
            ("[amqp]\nurl = \"amqp://h/%2f\"", "has no user"),
            ("[amqp]\nurl = \"http://u@h/%2f\"", "allowed is amqp:// or amqps://"),
            ("[mysql]\nurl = \"mysql://u@h\"", "has no database"),
            ("[redis]\nurl = \"redis://tally#s3@h/0\"", "in a password write them as %23"),
            ("[redis]\nurl = \"redis://h/1\"\ncluster = true", "a Redis Cluster has only 0"),
            ("[redis]\nseeds = [\"h:1\"]", "set cluster = true, or remove seeds"),
            ("[redis]\ncluster = true\nseeds = [\"h\"]", "[redis] seeds: \"h\" is not HOST:PORT"),
            ("[amqp]\nprefetch = 19999", "set it to 20000 or more"),
            ("[reconcile]\nfull_cron = \"often\"", "[reconcile] full_cron is \"often\""),
            ("[reconcile]\nfull_cron = \"* * * *\"", "[reconcile] full_cron is \"* * * *\": use five fields"),
            ("[archive]\ncron = \"0 4 * * 7L\"", "[archive] cron is \"0 4 * * 7L\": no date matches it"),
            ("[daemon]\ntime_zone = \"Mars/Olympus\"", "[daemon] time_zone is \"Mars/Olympus\": write an IANA name"),
            ("[daemon]\ntime_zone = \"\"", "[daemon] time_zone is \"\": write an IANA name"),
            ("[reconcile]\nscrub_cron = \"never\"", "[reconcile] scrub_cron"),
            ("[reconcile]\nreplicas = [\"mysql://db2\"]", "\"mysql://db2\" is not HOST:PORT"),
            ("[reconcile]\nevent_clock = \"producer\"\nclock_skew_max = \"1h\"", "not be longer than overlap"),
            ("[kinds]\nvideo = 1\npost = 1", "post and video have the same code 1"),
            ("[kinds]\n\"Big Video\" = 1", "a name must have 1 to 32"),
            ("[metrics]\nview = 2", "must have `like`"),
            ("[metrics]\nlike = 1\nsource = 2", "[metrics] source: the gateway's answers have a field of this name"),
            ("[consumer]\nfuture_max = \"2d\"", "[consumer] future_max is \"2d\": write a duration, at most 1d"),
            (
                "[consumer]\napplied_event_keep = \"28d\"",
                "[consumer] applied_event_keep is \"28d\": write a duration, 1h to 27d",
            ),
            ("[redis]\nkey_prefix = \"{x}\"", "must not have braces"),
            ("[redis]\ncounter_key = \"x:{id}\"", "[redis] counter_key is for the layouts entity and string"),
            ("[redis]\nlayout = \"entity\"\ncounter_key = \"x:{user}\"", "[redis] counter_key has {user}"),
            ("[redis]\nlayout = \"string\"\n[kinds]\na = 1\nb = 2", "[redis] counter_key lacks {kind}"),
            ("[redis]\nlayout = \"string\"\ncounter_key = \"x:{id}\"\n[metrics]\nlike = 1\nb = 2", "lacks {metric}"),
            ("[redis]\nlayout = \"entity\"\ncounter_key = \"x:{id}:{metric}\"", "metrics are fields"),
            ("[redis]\nlayout = \"entity\"\ncluster = true", "a Redis Cluster needs the layout packed"),
            ("[redis.also]\nbucket_bits = 13", "[redis.also] shares keys with [redis]"),
            ("[redis]\nlayout = \"string\"\n[redis.also]\nlayout = \"string\"\nbucket_bits = 10", "shares keys"),
            (
                "[redis]\nlayout = \"string\"\n[redis.also]\nlayout = \"string\"\ncounter_key = \"x:{id}\"",
                "shares keys",
            ),
            (
                "[redis]\nlayout = \"string\"\ncounter_key = \"x:{id}\"\n[redis.also]\nlayout = \"entity\"\ncounter_key = \"x:{id}\"",
                "shares keys",
            ),
            (
                "[redis]\nlayout = \"string\"\ncounter_key = \"{kind}_{metric}_{id}\"\n[kinds]\na = 1\na_b = 2\n[metrics]\nlike = 1\nb_like = 2",
                "gives the same key to two pairs of kind and metric",
            ),
            ("[redis.also]\nbucket_bits = 29", "[redis.also] bucket_bits is 29, allowed are 0 to 28"),
            ("[redis.also]\ncounter_key = \"x:{id}\"", "[redis.also] counter_key is for"),
            ("[consumer]\nbatch_events_max = 0", "allowed are 1 to 30000"),
        ] {
            let problems = found(text);
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{text}: {problems:?}");
        }
    }
}
