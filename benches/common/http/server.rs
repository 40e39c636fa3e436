//! A server as a separate process: the gateway of the release binary, or the bare handler.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::bare;
use crate::world::World;

/// A server to measure.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Gateway,
    Bare,
}

/// The options of a benchmark that starts itself as the bare handler.
#[derive(Args, Clone, Debug)]
pub struct BareHandler {
    /// Serve as the bare handler, with the configuration of the benchmark that started this process.
    #[arg(long, hide = true, value_name = "FILE")]
    serve: Option<PathBuf>,
}

impl BareHandler {
    /// Serves until the process is killed, if this process is the bare handler. Otherwise returns false.
    pub async fn has_served(&self) -> Result<bool> {
        let Some(config) = &self.serve else { return Ok(false) };
        bare::serve(&tallyd_base::config::load(config)?).await.map(|()| true)
    }
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
            Kind::Bare => command.arg("--serve").arg(world.config_path()),
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
