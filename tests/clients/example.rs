//! The two example clients as commands.

#![allow(dead_code, reason = "every test file uses only a part of this module")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use redis::AsyncCommands;
use serde_json::Value;
use sqlx::Row;
use tallyd_core::model::Target;

use super::common::{World, stderr, stdout, target};

/// The board that counts the clicks.
pub const BOARD: &str = "clicked";

/// A client under examples/.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Example {
    Python,
    Node,
}

impl Example {
    pub const ALL: [Self; 2] = [Self::Python, Self::Node];

    /// The part of a test world's name that identifies the client.
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "py",
            Self::Node => "node",
        }
    }

    /// A command of the example, without its arguments.
    pub fn command(self, script: &str) -> Command {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = self.interpreter();
        match self {
            Self::Python => command.arg(root.join("examples/python").join(script).with_extension("py")),
            Self::Node => {
                let installed = root.join("target/clients");
                assert!(
                    installed.join("node_modules").exists(),
                    "the libraries of examples/node are missing: run dev/test"
                );
                command.arg(installed.join("examples/node").join(script).with_extension("js"))
            }
        };
        command
    }

    /// Runs the example with the test world's servers, or with other settings.
    pub fn run(self, world: &World, settings: &[(&str, &str)], arguments: &[&str]) -> Output {
        Self::for_world(self.command("like").args(arguments), world).envs(settings.iter().copied()).output().unwrap()
    }

    fn for_world<'a>(command: &'a mut Command, world: &World) -> &'a mut Command {
        command
            .env("REDIS_URL", world.api.redis.url.expose())
            .env("AMQP_URL", world.api.amqp.url.expose())
            .env("MYSQL_URL", world.api.mysql.url.expose())
            .env("EXCHANGE", world.broker.exchange())
            .env("KEY_PREFIX", &world.config.redis.key_prefix)
            .env("BUCKET_BITS", world.config.redis.bucket_bits.to_string())
            .env("BOARD", BOARD)
            .env("BOARD_PERIODS", "week total")
    }

    /// Runs a program that uses the client's functions. In Python, the program calls the functions of the variable
    /// `server`. In Node, the program calls the functions of the variable `client`. Returns the program's output.
    pub fn program(self, world: &World, settings: &[(&str, &str)], text: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = match self {
            Self::Python => {
                let mut command = self.interpreter();
                command.env("PYTHONPATH", root.join("examples/python"));
                command
                    .args(["-c", &format!("import like, pika, pymysql, redis, time\nserver = like.connect()\n{text}")]);
                command
            }
            Self::Node => {
                let client = root.join("target/clients/examples/node/client.js");
                let opening = format!(
                    "import {{ Client, defaults, Refused }} from {client:?};
                     const {{ env }} = process;
                     const client = new Client({{ redisUrl: env.REDIS_URL, amqpUrl: env.AMQP_URL, mysqlUrl: env.MYSQL_URL,
                       exchange: env.EXCHANGE, keyPrefix: env.KEY_PREFIX, bucketBits: Number(env.BUCKET_BITS),
                       timeoutMs: Number(env.TIMEOUT_S ?? 5) * 1_000 }});
                     await client.connect();"
                );
                let mut command = self.interpreter();
                command.args(["--input-type=module", "-e", &format!("{opening}\n{text}\nawait client.close();")]);
                command
            }
        };
        let output = Self::for_world(&mut command, world).envs(settings.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{self:?}: {}", stderr(&output));
        stdout(&output)
    }

    pub fn interpreter(self) -> Command {
        match self {
            Self::Python => {
                // Debian's own Python, which finds Debian's packages.
                let debian = Path::new("/usr/bin/python3");
                let mut command = Command::new(if debian.exists() { debian } else { Path::new("python3") });
                command.env("PYTHONDONTWRITEBYTECODE", "1");
                command
            }
            Self::Node => {
                let mut command = Command::new("node");
                // dev/test links the example's files into the folder that contains the libraries, so Node must not
                // follow the links.
                command.args(["--preserve-symlinks", "--preserve-symlinks-main"]);
                command
            }
        }
    }

    /// Returns the output line by line.
    pub fn lines(self, world: &World, arguments: &[&str]) -> Vec<String> {
        let output = self.run(world, &[], arguments);
        assert!(output.status.success(), "{self:?} {arguments:?}: {}", stderr(&output));
        stdout(&output).lines().map(str::to_owned).collect()
    }

    /// Returns the event of a published click, with the field `changed`.
    pub fn click(self, world: &World, arguments: &[&str]) -> Value {
        let lines = self.lines(world, arguments);
        serde_json::from_str(&lines[0]).unwrap_or_else(|error| panic!("{error}: {lines:?}"))
    }

    /// Returns the error of a click that fails.
    pub fn refused(self, world: &World, settings: &[(&str, &str)], arguments: &[&str]) -> String {
        let output = self.run(world, settings, arguments);
        assert!(!output.status.success(), "{self:?} {arguments:?}: {}", stdout(&output));
        stderr(&output)
    }
}

/// Returns two values: true if the click changed something, and the count after the click.
pub fn outcome(event: &Value) -> (bool, Option<i64>) {
    (event["changed"].as_bool().unwrap(), event["count"].as_i64())
}

/// Returns the target's scores on the board, for the week and in total.
pub async fn on_board(world: &World, id: u64) -> [Option<i64>; 2] {
    let mut redis = world.redis().await;
    let mut keys: Vec<String> = redis.keys(format!("{}:board:{{{BOARD}}}:*", world.name)).await.unwrap();
    keys.sort();
    let mut scores = [None; 2];
    for key in keys {
        let place = usize::from(key.ends_with(":total"));
        scores[place] = redis.zscore(key, id).await.unwrap();
    }
    scores
}

/// Returns three maps from targets to likes: from Redis, from MySQL's counters, and from the like records. Targets
/// without likes are left out.
pub async fn three_truths(world: &World) -> [BTreeMap<Target, i64>; 3] {
    let mut counters = world.counters().await;
    counters.retain(|_, likes| *likes != 0);
    let rows =
        sqlx::query("SELECT target_id, COUNT(*) FROM like_record WHERE kind = 1 AND is_del = 0 GROUP BY target_id");
    let rows = rows.fetch_all(&world.pool).await.unwrap();
    let records = rows.iter().map(|row| (target(row.get(0)), row.get(1))).collect();
    [world.redis_counters().await, counters, records]
}
