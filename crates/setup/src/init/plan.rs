//! Makes the plan for all files from the facts about the servers and the user's answers. Pure.

use std::path::{Path, PathBuf};

use url::Url;

use super::address::{decoded, host_and_port};
use tallyd_base::config::{Config, DEFAULT_PATH, Kinds, SECRETS, ServerUrl, is_external, is_name};
use tallyd_core::partition::suited_partitions;
use tallyd_rabbitmq::config::PARTITIONS_MAX;
use tallyd_redis::space::suited_bits;
use tallyd_redis::topology::{Topology, Watched};

/// Facts about the servers. If no account could read a fact from its server, the fact is `None`.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub rabbitmq: Option<String>,
    pub plugin: Option<bool>,
    pub mysql: Option<String>,
    pub mysql_tls: Option<String>,
    pub redis: Option<String>,
    pub topology: Topology,
}

#[derive(Clone, Debug)]
pub(super) struct Load {
    pub targets: u64,
    pub events_per_s: u32,
    pub kinds: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Rabbitmq,
    Mysql,
    Redis,
}

impl Server {
    pub(super) const ALL: [Self; 3] = [Self::Rabbitmq, Self::Mysql, Self::Redis];

    pub(super) fn section(self) -> &'static str {
        match self {
            Self::Rabbitmq => "amqp",
            Self::Mysql => "mysql",
            Self::Redis => "redis",
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rabbitmq => "RabbitMQ",
            Self::Mysql => "MySQL",
            Self::Redis => "Redis",
        }
    }

    pub(super) fn url(self, config: &Config) -> &ServerUrl {
        match self {
            Self::Rabbitmq => &config.amqp.url,
            Self::Mysql => &config.mysql.url,
            Self::Redis => &config.redis.url,
        }
    }

    pub(super) fn url_mut(self, config: &mut Config) -> &mut ServerUrl {
        match self {
            Self::Rabbitmq => &mut config.amqp.url,
            Self::Mysql => &mut config.mysql.url,
            Self::Redis => &mut config.redis.url,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Daemon,
    Gateway,
    Administrator,
}

impl Reader {
    /// The accounts of packaging/sysusers.d.
    pub(super) fn account(self) -> Option<&'static str> {
        match self {
            Self::Daemon => Some("tallyd"),
            Self::Gateway => Some("tallyd-gateway"),
            Self::Administrator => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Password {
    Daemon(Server),
    Migrate,
    Api,
}

impl Password {
    pub(super) const ALL: [Self; 5] = [
        Self::Daemon(Server::Rabbitmq),
        Self::Daemon(Server::Mysql),
        Self::Daemon(Server::Redis),
        Self::Migrate,
        Self::Api,
    ];

    pub(super) fn file(self) -> String {
        match self {
            Self::Daemon(server) => format!("tallyd.{}-password", server.section()),
            Self::Migrate => "tallyd.migrate-password".to_owned(),
            Self::Api => "tallyd.api-password".to_owned(),
        }
    }

    pub(super) fn reader(self) -> Reader {
        match self {
            Self::Daemon(_) => Reader::Daemon,
            Self::Api => Reader::Gateway,
            Self::Migrate => Reader::Administrator,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub folder: PathBuf,
    pub secrets: PathBuf,
    pub config: Config,
    pub facts: Facts,
    pub load: Load,
}

impl Plan {
    pub(super) fn new(folder: &Path, daemon: &Config, facts: Facts, load: Load) -> Result<Self, String> {
        let mut config = daemon.clone();
        config.amqp.partitions = config.amqp.partitions.max(suited_partitions(load.events_per_s)).min(PARTITIONS_MAX);
        config.redis.bucket_bits = config.redis.bucket_bits.max(suited_bits(load.targets));
        config.kinds = Kinds((1..).zip(&load.kinds).map(|(code, kind)| (kind.clone(), code)).collect());
        let plan = Self { folder: folder.to_owned(), secrets: secrets_of(folder), config, facts, load };
        plan.check_names()?;
        Ok(plan)
    }

    pub(super) fn passwords(&self) -> Vec<Password> {
        let is_needed = |it: &Password| !matches!(it, Password::Daemon(server) if self.is_by_certificate(*server));
        Password::ALL.into_iter().filter(is_needed).collect()
    }

    /// Returns true if the passwords have a folder that only root can read, from which systemd passes them to the units.
    pub(super) fn has_store(&self) -> bool {
        self.secrets != self.folder
    }

    pub(super) fn is_by_certificate(&self, server: Server) -> bool {
        server == Server::Rabbitmq && is_external(&self.config.amqp.url)
    }

    pub(super) fn database(&self) -> String {
        self.config.mysql.url.parts().map(|url| decoded(url.path().trim_start_matches('/'))).unwrap_or_default()
    }

    pub(super) fn vhost(&self) -> String {
        let vhost = |url: Url| decoded(url.path().strip_prefix('/').unwrap_or_default());
        self.config.amqp.url.parts().map(vhost).unwrap_or_default()
    }

    pub(super) fn redis_nodes(&self) -> Vec<String> {
        match &self.facts.topology {
            Topology::Cluster(nodes) => nodes.clone(),
            Topology::Sentinel(_) | Topology::Single => {
                let replicas = chosen(&self.config, &self.facts.topology).ok().flatten();
                let replicas = replicas.map(|watched| watched.replicas.clone()).unwrap_or_default();
                std::iter::once(host_and_port(&self.config.redis.url, 6_379)).chain(replicas).collect()
            }
        }
    }

    fn check_names(&self) -> Result<(), String> {
        let is_plain = |text: &str, others: &str| {
            !text.is_empty()
                && !text.starts_with('-')
                && text.chars().all(|letter| letter.is_ascii_alphanumeric() || others.contains(letter))
        };
        let addresses = Server::ALL.map(|server| host_and_port(server.url(&self.config), 0));
        if let Some(odd) = addresses.into_iter().chain(self.redis_nodes()).find(|it| !is_plain(it, ".:_-[]")) {
            return Err(format!(
                "the address {odd:?}: accounts.sh accepts only a host that consists of letters, digits, ., :, - and _. Use another name of the server"
            ));
        }
        let Config { amqp, redis, kinds, .. } = &self.config;
        let mut files =
            [&redis.login.tls_ca_file, &redis.login.tls_cert_file, &redis.login.tls_key_file].into_iter().flatten();
        if let Some(odd) = files.find(|file| !is_plain(file, "/._-+@:,=")) {
            return Err(format!(
                "the file {odd:?} of [redis]: accounts.sh can only use a path of letters, digits and / . _ - + @ : , =. Copy the file to such a path"
            ));
        }
        if !is_plain(&self.database(), "_") {
            return Err("[mysql] url: use a database name of letters, digits and _, for example tally".to_owned());
        }
        if !is_plain(&self.vhost(), "_-./") {
            return Err("[amqp] url: use a vhost name of letters, digits, _, -, . and /, or %2f for the default vhost"
                .to_owned());
        }
        if !is_plain(&amqp.prefix, "_-.") || (!redis.key_prefix.is_empty() && !is_plain(&redis.key_prefix, "_-.:")) {
            return Err("[amqp] prefix and [redis] key_prefix: use letters, digits, _, -, . and :".to_owned());
        }
        match kinds.0.keys().find(|kind| !is_name(kind)) {
            Some(kind) => Err(format!("the kind \"{kind}\": a name must have 1 to 32 characters of a-z, 0-9, - and _")),
            None if kinds.0.len() < self.load.kinds.len() => Err("two kinds have the same name: remove one".to_owned()),
            None if kinds.0.is_empty() => Err("no kind is named: name at least one, for example video".to_owned()),
            None => Ok(()),
        }
    }
}

/// Returns the folder of the passwords for the configuration in `folder`.
pub(super) fn secrets_of(folder: &Path) -> PathBuf {
    let is_of_units = folder.join("config.toml") == Path::new(DEFAULT_PATH);
    if is_of_units { PathBuf::from(SECRETS) } else { folder.to_owned() }
}

pub(super) fn topology(config: &mut Config, found: &Topology) -> Result<(), String> {
    config.redis.cluster = false;
    config.redis.seeds.clear();
    config.redis.sentinels.clear();
    match found {
        Topology::Single => {}
        Topology::Cluster(nodes) => {
            config.redis.cluster = true;
            let own = host_and_port(&config.redis.url, 6_379);
            config.redis.seeds = nodes.iter().filter(|node| **node != own).cloned().collect();
        }
        Topology::Sentinel(_) => {
            let watched = chosen(config, found)?
                .cloned()
                .ok_or("the sentinel has no master: configure it with `sentinel monitor`")?;
            let asked = host_and_port(&config.redis.url, 26_379);
            config.redis.url = config.redis.url.at(&watched.master)?;
            config.redis.sentinel_master = watched.name;
            config.redis.sentinels = std::iter::once(asked).chain(watched.sentinels).collect();
        }
    }
    Ok(())
}

pub(super) fn chosen<'a>(config: &Config, found: &'a Topology) -> Result<Option<&'a Watched>, String> {
    let Topology::Sentinel(masters) = found else { return Ok(None) };
    let named = masters.iter().find(|watched| watched.name == config.redis.sentinel_master);
    match (named, masters.as_slice()) {
        (Some(named), _) => Ok(Some(named)),
        (None, [only]) => Ok(Some(only)),
        (None, _) => {
            let names: Vec<&str> = masters.iter().map(|watched| watched.name.as_str()).collect();
            Err(format!(
                "the sentinel watches the masters {}: set TALLYD__REDIS__SENTINEL_MASTER to one of them",
                names.join(", ")
            ))
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::address::completed;
    use super::*;

    pub(in super::super) fn daemon(urls: [&str; 3]) -> Config {
        let mut config = Config::default();
        for (server, text) in Server::ALL.into_iter().zip(urls) {
            *server.url_mut(&mut config) = completed(server, text).unwrap();
        }
        config
    }

    pub(in super::super) fn load() -> Load {
        Load { targets: 1_000_000, events_per_s: 1_000, kinds: vec!["video".to_owned()] }
    }

    fn plan(urls: [&str; 3], facts: Facts, load: Load) -> Result<Plan, String> {
        let mut daemon = daemon(urls);
        topology(&mut daemon, &facts.topology)?;
        Plan::new(Path::new("/etc/tallyd"), &daemon, facts, load)
    }

    #[test]
    fn what_is_found_behind_redis_is_configured() {
        let cluster = Topology::Cluster(vec!["a:6379".to_owned(), "b:6379".to_owned()]);
        let found = plan(["h", "h", "a"], Facts { topology: cluster, ..Facts::default() }, load()).unwrap();
        assert_eq!((found.config.redis.cluster, &found.config.redis.seeds[..]), (true, &["b:6379".to_owned()][..]));
        assert_eq!(found.redis_nodes(), ["a:6379", "b:6379"]);

        let watched = Watched {
            name: "likes".to_owned(),
            master: "m:6379".to_owned(),
            replicas: vec!["r:6379".to_owned()],
            sentinels: vec!["t:26379".to_owned()],
        };
        let facts = |masters| Facts { topology: Topology::Sentinel(masters), ..Facts::default() };
        let found = plan(["h", "h", "s"], facts(vec![watched.clone()]), load()).unwrap();
        let redis = &found.config.redis;
        assert_eq!((redis.url.expose(), redis.sentinel_master.as_str()), ("redis://tallyd@m:6379/0", "likes"));
        assert_eq!(redis.sentinels, ["s:26379", "t:26379"]);
        assert_eq!(found.redis_nodes(), ["m:6379", "r:6379"]);
        let two = [watched.clone(), Watched { name: "other".to_owned(), ..watched }];
        let problem = plan(["h", "h", "s"], facts(two.to_vec()), load()).unwrap_err();
        assert!(problem.contains("watches the masters likes, other: set TALLYD__REDIS__SENTINEL_MASTER"), "{problem}");
    }

    #[test]
    fn buckets_and_partitions_suit_what_is_expected() {
        for (targets, events_per_s, expected) in
            [(0, 0, (13, 1)), (1_000_000, 1_000, (13, 1)), (100_000_000, 100_000, (20, 2))]
        {
            let load = Load { targets, events_per_s, ..load() };
            let config = plan(["h", "h", "h"], Facts::default(), load).unwrap().config;
            assert_eq!((config.redis.bucket_bits, config.amqp.partitions), expected);
        }
    }

    #[test]
    fn names_that_a_shell_or_a_server_could_misread_are_refused() {
        for (urls, expected) in [
            (["h", "mysql://h/a-b", "h"], "use a database name of letters"),
            (["amqp://h/a%27b", "h", "h"], "use a vhost name of letters"),
        ] {
            let refused = plan(urls, Facts::default(), load()).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
        let odd = "$(id):6379".to_owned();
        let watched =
            Watched { name: "m".to_owned(), master: odd.clone(), replicas: Vec::new(), sentinels: Vec::new() };
        let replica = Watched { master: "m:6379".to_owned(), replicas: vec![odd.clone()], ..watched.clone() };
        for topology in
            [Topology::Cluster(vec![odd]), Topology::Sentinel(vec![watched]), Topology::Sentinel(vec![replica])]
        {
            let refused = plan(["h", "h", "h"], Facts { topology, ..Facts::default() }, load()).unwrap_err();
            assert!(refused.contains("the address \"$(id):6379\""), "{refused}");
        }
        for urls in [["$(id)", "h", "h"], ["h", "`id`", "h"], ["h", "h", "a;b"]] {
            let refused = plan(urls, Facts::default(), load()).unwrap_err();
            assert!(refused.contains("accepts only a host that consists of letters"), "{refused}");
        }
        let mut config = daemon(["h", "h", "rediss://h"]);
        config.redis.login.tls_key_file = Some("/etc/$(id).key".to_owned());
        let refused = Plan::new(Path::new("/etc/tallyd"), &config, Facts::default(), load()).unwrap_err();
        assert!(refused.contains("the file \"/etc/$(id).key\" of [redis]"), "{refused}");
        for (kinds, expected) in
            [("a b", "1 to 32 characters of a-z"), ("a,a", "have the same name"), ("", "1 to 32 characters of a-z")]
        {
            let kinds = kinds.split(',').map(str::to_owned).collect();
            let refused = plan(["h", "h", "h"], Facts::default(), Load { kinds, ..load() }).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
