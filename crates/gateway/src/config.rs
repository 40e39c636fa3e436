//! gateway.toml: the settings of `tallyd gateway`. The daemon does not read this file.

use std::path::Path;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use serde_json::Value;
use tallyd_base::config::{
    Amqp, Config, ConfigError, Faults, File, Listen, Log, Mysql, NoAddress, Pause, Redis, Secret, checked,
    listen_problems, of_daemon, read_file, read_port_token, schema_of, token_problems, typed,
};

/// Keys that are not allowed in gateway.toml, because the gateway does not use them, or reads them from the site card.
const DAEMONS: [(&str, &[&str]); 2] = [
    ("amqp", &["partitions", "partition_by", "queue_type", "declare", "prefetch"]),
    ("redis", &["layout", "bucket_bits", "counter_key", "also", "cluster"]),
];

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let mut schema = schema_of::<GatewayConfig>("tallyd's gateway.toml");
    for (section, keys) in DAEMONS {
        let known = schema.pointer_mut(&format!("/properties/{section}/properties")).and_then(Value::as_object_mut);
        known.into_iter().for_each(|known| known.retain(|key, _| !keys.contains(&key.as_str())));
    }
    schema
});

pub fn schema() -> &'static Value {
    &SCHEMA
}

const GATEWAY_FILE: File = File { schema, elsewhere: of_daemon, has_variables: true };

pub const GATEWAY_PATH: &str = "/etc/tallyd/gateway.toml";

/// All settings of gateway.toml. The gateway learns everything else from the site card.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    /// Level and format of the log.
    pub log: Log,
    /// HTTP port of `tallyd gateway`, for API servers.
    pub gateway: Gateway,
    /// RabbitMQ.
    pub amqp: Amqp,
    /// MySQL, which the gateway asks for likes, and for numbers that Redis lacks.
    pub mysql: Mysql,
    /// The server with the counters. The gateway itself finds out whether it is a Redis Cluster.
    pub redis: Redis,
}

/// `[gateway]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Gateway {
    /// `ADDRESS:PORT`, or `unix:` and a socket's path. An address reachable from other machines requires a token.
    pub listen: String,
    /// File with a token of at least 16 characters, not world-readable. A relative path is a systemd credential.
    /// Requests to /v1 send the token as `Authorization: Bearer TOKEN`.
    #[schemars(with = "String")]
    pub token_file: Option<String>,
    /// The token, only from the environment.
    #[schemars(skip)]
    pub token: Option<Secret>,
    /// Maximum requests in flight that publish, and the same again for requests that read. Further requests get 503,
    /// and clients can retry.
    #[schemars(range(min = 1, max = 10_000))]
    pub requests_max: usize,
    /// Maximum open connections. Others wait.
    #[schemars(range(min = 1, max = 100_000))]
    pub connections_max: usize,
    /// Maximum number of likes and unlikes of a user per window. 0: no limit.
    pub rate_likes_max: u32,
    /// Length of a window, from the user's first click.
    #[schemars(extend("x-minimum" = "1s"))]
    pub rate_window: Pause,
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9191".to_owned(),
            token_file: None,
            token: None,
            requests_max: 512,
            connections_max: 10_000,
            rate_likes_max: 0,
            rate_window: Pause::from_secs(60),
        }
    }
}

impl Gateway {
    pub fn address(&self) -> Result<Listen, NoAddress> {
        self.listen.parse()
    }
}

pub fn load(path: &Path) -> Result<GatewayConfig, ConfigError> {
    let mut read = read_file(path, GATEWAY_FILE)?;
    let GatewayConfig { log, mut gateway, amqp, mysql, mut redis } = typed(&mut read);
    // Only a Redis Cluster has seeds.
    redis.cluster = !redis.seeds.is_empty();
    let servers = Config { log, amqp, mysql, redis, ..Config::default() };
    let mut found = Faults::default();
    problems(&mut gateway, &mut found);
    let Config { log, amqp, mysql, redis, .. } = checked(read, servers, found)?.config;
    Ok(GatewayConfig { log, gateway, amqp, mysql, redis })
}

fn problems(gateway: &mut Gateway, found: &mut Faults) {
    let has_token = gateway.token.is_some() || gateway.token_file.is_some();
    listen_problems("gateway", &gateway.listen, &gateway.address().map(Some), has_token, found);
    read_port_token("gateway", &mut gateway.token, gateway.token_file.as_deref(), found);
    token_problems("gateway", gateway.token.as_ref(), found);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let name = format!("{}:", file.path().display());
        load(file.path()).err().map_or(String::new(), |error| error.to_string().replace(&name, ""))
    }

    #[test]
    fn each_file_refuses_the_settings_of_the_other_file() {
        let error = tallyd_base::config::parse("[log]\n[gateway]\nlisten = \"\"\n", "config.toml", []).unwrap_err();
        assert_eq!(
            error.0,
            ["config.toml:2:2: [gateway] belongs in gateway.toml, which only `tallyd gateway` reads: docs/gateway.md"]
        );
        let variable = ("TALLYD__GATEWAY__TOKEN".to_owned(), "0123456789-of-a-test".to_owned());
        let error = tallyd_base::config::parse("", "config.toml", [variable]).unwrap_err();
        assert!(error.0[0].starts_with("TALLYD__GATEWAY__TOKEN: [gateway] belongs in gateway.toml"), "{error}");

        let text = "[consumer]\nlinger_ms = 1\n[redis]\nbucket_bits = 13\n[redis.also]\nbucket_bits = 14\n\
                    [amqp]\nprefetch = 1\nprefech = 1\n[gateway]\nlisten = \"\"\nrate_window = \"1ms\"\n";
        let error = error_of(text);
        for problem in [
            "1:2: [consumer] belongs in the daemon's config.toml",
            "4:1: [redis] bucket_bits belongs in the daemon's config.toml",
            "5:8: [redis] also belongs in the daemon's config.toml",
            "8:1: [amqp] prefetch belongs in the daemon's config.toml",
            "9:1: unknown key `prefech` in [amqp]: did you mean `prefix`?",
            "11:1: [gateway] listen is \"\"",
            "12:1: [gateway] rate_window is \"1ms\": write a duration, 1s or more",
        ] {
            assert!(error.contains(&format!("\n  {problem}")), "{problem}: {error}");
        }
        assert_eq!(error.lines().count(), 8, "{error}");
    }

    #[test]
    fn the_gateway_finds_a_redis_cluster_by_its_seeds() {
        assert_eq!(error_of("[redis]\nseeds = [\"h:6379\"]\n"), "");
        assert!(error_of("[redis]\nseeds = [\"h\"]\n").contains("[redis] seeds: \"h\" is not HOST:PORT"));
    }

    #[test]
    fn a_gateway_that_others_reach_must_have_a_token() {
        let found = |gateway: &Gateway| Faults::texts(|found| problems(&mut gateway.clone(), found)).join(" ");
        let listens = |listen: &str| Gateway { listen: listen.to_owned(), ..Gateway::default() };
        assert_eq!(found(&listens("unix:/run/tallyd-gateway/http.sock")), "");
        assert!(
            found(&listens("0.0.0.0:9191"))
                .contains("[gateway] listen is \"0.0.0.0:9191\", which other machines can reach")
        );
        assert!(found(&listens("")).contains("[gateway] listen is \"\""));
        let short = Gateway { token: Some(Secret::new("short".to_owned())), ..listens("0.0.0.0:9191") };
        assert!(found(&short).contains("[gateway] token_file must hold 16 or more"));
        let unread = Gateway { token_file: Some("/nowhere".to_owned()), ..listens("0.0.0.0:9191") };
        assert!(found(&unread).contains("[gateway] token_file /nowhere: No such file"));
    }
}
