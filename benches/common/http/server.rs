//! A server as a separate process: the gateway of the release binary, or the bare handler.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::world::World;

/// A server to measure.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Gateway,
    Bare,
}

/// Killed when dropped.
pub struct Server {
    child: Child,
    pub address: String,
}

/// The log line that contains the server's address.
#[derive(Deserialize)]
struct Started {
    address: String,
}

impl Server {
    /// Starts the server, and waits until it listens.
    pub async fn start(world: &World, kind: Kind) -> Result<Self> {
        let mut command = match kind {
            Kind::Gateway => Command::new(tallyd_testkit::program()),
            Kind::Bare => Command::new(std::env::current_exe()?),
        };
        match kind {
            Kind::Gateway => {
                command.arg("--config").arg(world.gateway_path()?).arg("gateway");
                command.envs(tallyd_testkit::unit_environment())
            }
            Kind::Bare => command.arg("--config").arg(world.config_path()).args(["--role", "bare"]),
        };
        command.env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET").stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().context("start the server")?;
        let mut lines = BufReader::new(child.stderr.take().context("no pipe for the server's log")?).lines();
        let mut log = Vec::new();
        loop {
            let Some(line) = lines.next_line().await? else { bail!("the server exited:\n{}", log.join("\n")) };
            if let Ok(Started { address }) = serde_json::from_str(&line) {
                // Reads the remaining log, because a full pipe would block the server.
                tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
                return Ok(Self { child, address });
            }
            log.push(line);
        }
    }

    pub fn pid(&self) -> Result<u32> {
        self.child.id().context("the server has exited")
    }
}
