//! Installs and starts the peers, which are the other consumers in `benches/peers`. Peers are installed under
//! target/bench/peers when they are needed. Peers run with the same settings as tallyd.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use tokio::process::Command;

use super::world::World;

/// The language of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Runtime {
    Node,
    Python,
    Go,
}

impl Runtime {
    fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Python => "python",
            Self::Go => "go",
        }
    }

    fn source(self) -> PathBuf {
        tallyd_testkit::root().join("benches/peers").join(self.name())
    }

    fn installed(self) -> PathBuf {
        tallyd_testkit::root().join("target/bench/peers").join(self.name())
    }

    /// Installs missing parts. Returns the versions of the peer's software in one line.
    ///
    /// # Errors
    /// Fails if the peer can't be installed on this machine. The returned error contains the installer's message.
    pub async fn install(self) -> Result<String> {
        let script = self.source().with_file_name("install");
        let output = Command::new(script).arg(self.name()).arg(self.installed()).output().await;
        let output = output.context("run the installer")?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let reason = errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given").to_owned();
        Err(anyhow!(reason))
    }

    /// Returns the command that starts a peer in one of its write modes.
    pub fn command(self, way: &str, world: &World) -> Command {
        let installed = self.installed();
        let mut command = match self {
            Self::Node => {
                let mut command = Command::new("node");
                command.arg(installed.join("consumer.mjs"));
                command
            }
            Self::Python => {
                let mut command = Command::new(installed.join("venv/bin/python"));
                command.arg(self.source().join("consumer.py"));
                command
            }
            Self::Go => Command::new(installed.join("consumer")),
        };
        let (config, peers) = (&world.config, world.setup.peers);
        command
            .arg(way)
            .env("AMQP_URL", config.amqp.url.expose())
            .env("QUEUE", world.broker.queue(0))
            .env("PREFETCH", peers.prefetch.unwrap_or(config.amqp.prefetch).to_string())
            .env("MYSQL_URL", config.mysql.url.expose())
            .env("BATCH", peers.batch.unwrap_or(config.consumer.batch_events_max).to_string())
            .env("LINGER_MS", peers.linger_ms.unwrap_or(config.consumer.linger_ms).to_string());
        command
    }
}
